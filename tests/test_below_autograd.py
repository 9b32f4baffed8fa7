import sys

import pytest
import torch
from torch import Tensor

from sgc_backend import BreakableCudaGraphBackend, eager_on_graph, emulated, sgc_piecewise
from sgc_backend.below_autograd import exclusion

SEEN = []


def look():
    """What a body can see: the dispatch keys excluded, and whether torch's kernels for gradients called it."""
    frame, files = sys._getframe(), set()
    while frame is not None:
        files.add(frame.f_code.co_filename.replace("\\", "/").rpartition("torch/")[2])
        frame = frame.f_back
    SEEN.append((str(torch._C._dispatch_tls_local_exclude_set()), "_library/autograd.py" in files))


@torch.library.custom_op("sgc_below::into", mutates_args=("out",))
def into(x: Tensor, out: Tensor) -> None:
    look()
    out.copy_(x * 2)


@torch.library.custom_op("sgc_below::fresh", mutates_args=())
def fresh(x: Tensor) -> Tensor:
    look()
    return x * 3


@torch.library.custom_op("sgc_below::failing", mutates_args=())
def failing(x: Tensor) -> Tensor:
    if SEEN:
        raise ZeroDivisionError
    return x * 3


@torch.library.custom_op("sgc_below::watched", mutates_args=())
def watched(x: Tensor) -> Tensor:
    look()
    return x * 3


for op in (fresh, failing, watched):
    op.register_fake(torch.empty_like)

library = torch.library.Library("sgc_below", "FRAGMENT")
library.define("plain(Tensor x) -> Tensor")
library.impl("plain", lambda x: (look(), x * 3)[1], "CompositeExplicitAutograd")
torch.library.register_fake("sgc_below::plain", torch.empty_like)

watching = torch.library.Library("sgc_below", "FRAGMENT")
autograd_saw = []


def watch(x):
    autograd_saw.append(x)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.sgc_below.watched(x)


def in_place(x):
    out = torch.empty_like(x)
    torch.ops.sgc_below.into(x, out)
    return out


WAYS = {"in place": in_place, "new": torch.ops.sgc_below.fresh, "plainly registered": torch.ops.sgc_below.plain}


def compiled(*calls):
    def model(x):
        for call in calls:
            x = call(x + 1)
        return x - 1

    ops = [torch.ops.sgc_below.into.default, torch.ops.sgc_below.fresh.default, torch.ops.sgc_below.plain.default]
    ops += [torch.ops.sgc_below.failing.default, torch.ops.sgc_below.watched.default]
    options = {"inner": "eager", "device_module": emulated, "cut_ops": ops, "strict": False}
    return model, torch.compile(model, backend=sgc_piecewise, options=options)


def called(call, x):
    SEEN.clear()
    out = call(x)
    return out, [*SEEN]


@pytest.mark.parametrize(
    "names", [("in place",), ("new",), ("plainly registered",), ("in place", "new", "plainly registered", "in place")]
)
@torch.no_grad()
def test_a_body_sees_what_it_sees_eagerly(names):
    model, call = compiled(*(WAYS[name] for name in names))
    x = torch.randn(4, device="cpu")
    for _ in range(2):
        call(x)
    expected, eagerly = called(model, x)
    got, replayed = called(call, x)
    assert torch.equal(got, expected)
    assert [keys for keys, _ in replayed] == [keys for keys, _ in eagerly]
    assert len(replayed) == len(names)


@pytest.mark.parametrize("name", ["in place", "new"])
@torch.no_grad()
def test_a_cut_is_called_without_torchs_kernels_for_gradients(name):
    model, call = compiled(WAYS[name])
    x = torch.randn(4)
    for _ in range(2):
        call(x)
    assert [through for _, through in called(model, x)[1]] == [True]
    assert [through for _, through in called(call, x)[1]] == [False]


@torch.no_grad()
def test_nothing_is_left_excluded_behind_a_cut_that_raises():
    _, call = compiled(torch.ops.sgc_below.failing)
    x = torch.randn(4)
    SEEN.clear()
    for _ in range(3):
        call(x)
    before = str(torch._C._dispatch_tls_local_exclude_set())
    SEEN.append(None)
    with pytest.raises(ZeroDivisionError):
        call(x)
    SEEN.clear()
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before


@torch.no_grad()
def test_a_kernel_for_gradients_of_the_users_own_is_called():
    op = torch.ops.sgc_below.watched.default
    assert exclusion(op) is not None
    watching.impl("watched", watch, "AutogradCPU")
    assert exclusion(op) is None
    _, call = compiled(op)
    x = torch.randn(4)
    for _ in range(2):
        call(x)
    autograd_saw.clear()
    call(x)
    assert len(autograd_saw) == 1


@pytest.mark.parametrize(
    "target",
    [torch.ops.aten.cumsum.default, torch.ops.sgc_below.plain.default, torch.add, print],
    ids=["an op of torch", "plainly registered", "a function of torch", "a function"],
)
def test_what_is_no_custom_op_of_torchs_making_is_left_as_it_is(target):
    assert exclusion(target) is None


class Kept:
    """A tensor of the caller's that a break writes to."""

    def __init__(self):
        self.out = torch.zeros(4)


def breaking(kind, kept):
    into_op = eager_on_graph({"overload": torch.ops.sgc_below.into.default, "op": torch.ops.sgc_below.into}[kind])

    def model(x):
        y, out = x + 1, torch.empty_like(x)
        into_op(y, out)
        into_op(y, kept.out)
        return out - 1

    return model


@pytest.mark.parametrize("kind", ["overload", "op"])
@torch.no_grad()
def test_a_break_that_is_an_op_is_called_without_torchs_kernels_for_gradients(kind):
    model = breaking(kind, Kept())
    backend, x = BreakableCudaGraphBackend(emulated), torch.randn(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: model(x))
    expected, eagerly = called(model, x)
    got, replayed = called(lambda x: backend.replay(4), x)
    assert torch.equal(got, expected)
    assert [through for _, through in eagerly] == [True, True]
    assert [through for _, through in replayed] == [False, False]
    assert [keys for keys, _ in replayed] == [keys for keys, _ in eagerly]
    backend.cleanup()


@torch.no_grad()
def test_a_break_counts_its_writes_to_the_callers_tensors():
    kept = Kept()
    model, backend, x = breaking("op", kept), BreakableCudaGraphBackend(emulated), torch.randn(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: model(x))
    before = kept.out._version
    model(x)
    eagerly = kept.out._version - before
    before = kept.out._version
    backend.replay(4)
    assert kept.out._version - before == eagerly > 0
    backend.cleanup()
