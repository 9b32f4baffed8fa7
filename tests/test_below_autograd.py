import sys
import threading
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sgc_backend import BreakableCudaGraphBackend, below_autograd, eager_on_graph, emulated, sgc_piecewise
from sgc_backend.below_autograd import exclusion
from sgc_backend.devices import device_of
from sgc_backend.pools import pool_of

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


@torch.library.custom_op("sgc_below::made", mutates_args=())
def made(n: int) -> Tensor:
    look()
    with torch.enable_grad():
        x = torch.arange(float(n)).requires_grad_()
        y = (x * x).sum()
        return torch.autograd.grad(y, x)[0] if y.requires_grad else torch.zeros(n)


made.register_fake(lambda n: torch.empty(n))

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
    ops += [torch.ops.sgc_below.made.default]
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
    assert exclusion(op, [torch.ones(1)]) is not None
    watching.impl("watched", watch, "AutogradCPU")
    assert exclusion(op, [torch.ones(1)]) is None
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
    assert exclusion(target, [torch.ones(1)]) is None


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


@torch.no_grad()
def test_an_op_that_gets_no_tensor_can_differentiate_in_its_body():
    model, call = compiled(lambda x: torch.ops.sgc_below.made(4) + x, torch.ops.sgc_below.fresh)
    x = torch.randn(4)
    for _ in range(2):
        call(x)
    expected, eagerly = called(model, x)
    got, replayed = called(call, x)
    assert torch.equal(got, expected)
    assert [keys for keys, _ in replayed] == [keys for keys, _ in eagerly]


def recorded(model, x):
    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(4, lambda: model(x))
    return backend


with torch.inference_mode():
    OF_INFERENCE = torch.ones(4)


@pytest.mark.parametrize(
    "part",
    [partial(eager_on_graph(made), 4), partial(eager_on_graph(fresh), OF_INFERENCE)],
    ids=["no tensor", "inference tensors alone"],
)
@torch.no_grad()
def test_a_break_sees_what_it_sees_eagerly_where_torchs_kernels_for_gradients_are_not_called(part):
    def model(x):
        return part() * x

    x = torch.randn(4)
    backend = recorded(model, x)
    expected, eagerly = called(model, x)
    got, replayed = called(lambda x: backend.replay(4), x)
    assert torch.equal(got, expected)
    assert [keys for keys, _ in replayed] == [keys for keys, _ in eagerly]
    backend.cleanup()


@pytest.mark.parametrize("op", [fresh, torch.ops.sgc_below.fresh, torch.ops.sgc_below.fresh.default])
@torch.no_grad()
def test_a_mode_sees_the_function_of_a_break_that_it_sees_eagerly(op):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if "sgc_below" in str(func):
                seen.append(func)
            return func(*args, **(kwargs or {}))

    marked = eager_on_graph(op)

    def model(x):
        return marked(x + 1) * 2

    x = torch.randn(4)
    backend = recorded(model, x)
    with Mode():
        model(x)
        backend.replay(4)
    eagerly, replayed = seen
    assert replayed is eagerly
    backend.cleanup()


def test_threads_that_are_the_first_to_ask_get_one_answer():
    before = below_autograd._uncounted_inside()
    for _ in range(10):
        below_autograd._try_out.cache_clear()
        together, answers = threading.Barrier(4), []

        def ask(together=together, answers=answers):
            together.wait()
            answers.append(below_autograd._uncounted_inside())

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [before] * 4


@pytest.mark.parametrize("way", ["cut", "break"])
@torch.no_grad()
def test_no_pool_is_held_while_a_thread_is_waited_for(way):
    """A collection of garbage may begin in that thread, and give a dead model's recordings back to the pool."""
    below_autograd._try_out.cache_clear()
    pool, x, held = pool_of(device_of(emulated)), torch.randn(4), []

    def begins(*_):
        # In the thread that is about to run.
        sys.setprofile(None)
        free = pool.lock.acquire(blocking=False)
        if free:
            pool.lock.release()
        held.append(not free)

    threading.setprofile(begins)
    try:
        if way == "break":
            recorded(breaking("op", Kept()), x).cleanup()
        else:
            _, call = compiled(in_place)
            for _ in range(2):
                call(x)
    finally:
        threading.setprofile(None)
    assert held == [False]
