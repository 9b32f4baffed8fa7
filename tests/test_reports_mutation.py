"""Inputs with layouts of their own, writes, and memory that is shared: reported cases, named by their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aliasing import calls_as_eager
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module
from test_reports import captured
from torch import nn

from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, eager_on_graph

__all__ = ["only_graphs_of_this_test"]

gpu = pytest.mark.gpu
dynamic = pytest.mark.parametrize("dynamic", [None, True, False])


# Ops of this file, registered once a process.


@torch.library.custom_op("sgc_test::rotate_", mutates_args=("q", "k"))
def rotate_(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> None:
    for t in (q, k):
        t.copy_(torch.cat([t[:, D // 2 :] * angle, t[:, : D // 2] - angle], 1))


@rotate_.register_fake
def _(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> None:
    return None


@torch.library.custom_op("sgc_test::bump_and_pair", mutates_args=("x",))
def bump_and_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(1)
    return x * 2, x - 3


@bump_and_pair.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("sgc_test::fill_maybe", mutates_args=("out", "scale"))
def fill_maybe(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    out.copy_(x)
    if scale is not None:
        scale.mul_(2)


@fill_maybe.register_fake
def _(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    return None


test_ops = torch.ops.sgc_test
OURS = ("sgc_test::rotate_", "sgc_test::bump_and_pair", "sgc_test::fill_maybe")
cut_or_not = pytest.mark.parametrize("cuts", [CUTS, (*CUTS, *OURS)], ids=["captured", "cut"])


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device)


# -- layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "contiguous": lambda d: rand(D, D, device=d),
    "transposed": lambda d: rand(D, D, device=d).t(),
    "offset": lambda d: rand(D * D + 1, device=d)[1:].view(D, D),
    "rows apart": lambda d: rand(D, D + 3, device=d)[:, :D],
    "rows further apart": lambda d: rand(D, 2 * D, device=d)[:, 1 : D + 1],
    "every second column": lambda d: rand(D, 2 * D, device=d)[:, ::2],
    "every second row": lambda d: rand(2 * D, D, device=d)[::2],
    "expanded row": lambda d: rand(1, D, device=d).expand(D, D),
    "expanded column": lambda d: rand(D, 1, device=d).expand(D, D),
    "one element": lambda d: rand(9, device=d)[3:4].expand(D, D),
    "overlapping": lambda d: rand(2 * D, device=d).unfold(0, D, 1)[:D],
    "overlapping offset": lambda d: rand(2 * D + 1, device=d)[1:].as_strided((D, D), (1, 1)),
}

READERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mm": lambda m, x: torch.mm(x, m.a.weight),
    "cut": lambda m, x: m.a(ops.double(x)),
    "preserves": lambda m, x: (x + 1, x * 2, ops.double(x.t())),
    "stride as a value": lambda m, x: m.a(x) * x.stride(0) + x.stride(1),
    "reshaped": lambda m, x: m.a(x.reshape(-1).view(D, D)),
    "strided": lambda m, x: x.as_strided((3, 2), (1, 1)) * 2,
    "returned": lambda m, x: (x, m.a(x), x.t(), x[1:]),
}


# MA01
@device
@dynamic
@pytest.mark.parametrize("reader", READERS)
def test_an_input_is_read_in_the_layout_that_it_has(reader: str, dynamic: bool | None, device: str) -> None:
    model = Model(READERS[reader], a=lin()).to(device)
    order = list(LAYOUTS) * 3
    with torch._dynamo.config.patch(recompile_limit=64):
        call = compiled(model, dynamic=dynamic)
        # Thrice one after the other, so that a layout replays, and then mixed, so that the wrong one might.
        calls_as_eager(call, model, lambda k: (LAYOUTS[order[k]](device),), len(order))
        for name in LAYOUTS:
            calls_as_eager(call, model, lambda k, name=name: (LAYOUTS[name](device),), 3)
    assert total("replayed") > 0


# MA01
@device
@dynamic
def test_memory_formats_of_images_are_kept(dynamic: bool | None, device: str) -> None:
    model = Model(lambda m, x: (m.c(x), ops.double(x), x * 2), c=nn.Conv2d(3, 4, 3)).to(device)
    call = compiled(model, dynamic=dynamic)
    formats = [torch.channels_last, torch.contiguous_format]

    def image(k: int) -> tuple[torch.Tensor]:
        x = rand(2, 3, 8, 8, device=device).contiguous(memory_format=formats[k % 2])
        return (x if k % 3 else rand(2, 3, 8, 9, device=device)[..., 1:].to(memory_format=formats[k % 2]),)

    calls_as_eager(call, model, image, 12)
    assert total("replayed") > 0


# MA01
@device
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_pieces_read_any_alignment(inner: str, device: str) -> None:
    model = Model(lambda m, x, y: ops.double(m.a(x) + y).relu() * y, a=lin()).to(device)
    call = compiled(model, inner=inner, dynamic=False)
    flat = rand(3 * D * D + 8, device=device)
    with torch.no_grad():
        for k in range(10):
            x, y = (flat[o : o + D * D].view(D, D) for o in (k % 5, D * D + (k * 3) % 7))
            torch.testing.assert_close(call(x, y), model(x, y))
    assert total("replayed") > 0


# -- views of one storage ----------------------------------------------------------------------------------------------


def _adds_then_sums(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return m.a(a).sum() + m.a(b).sum()


def _writes_both(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(1)
    return m.a(a + b)


def _writes_across_a_cut(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = ops.double(m.a(b))
    a.copy_(h)
    ops.add_one_(a)
    return m.a(b) + ops.double(a)


def _writes_through_a_view(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:].t()[0].zero_()
    ops.add_one_(a[:, 1])
    return m.a(b) * 2


def _writes_late(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = m.a(b)
    before = b * 1
    a.zero_()
    return h, before, ops.double(b), b * 2


SHARING_BODIES = [_adds_then_sums, _writes_both, _writes_across_a_cut, _writes_through_a_view, _writes_late]
PAIRS: dict[str, Callable[[str], tuple[torch.Tensor, torch.Tensor]]] = {
    "apart": lambda d: (rand(4, D, device=d), rand(4, D, device=d)),
    "the same": lambda d: (rand(4, D, device=d),) * 2,
    "split columns": lambda d: tuple(rand(4, 2 * D, device=d).split(D, dim=1)),  # interleaved, no byte in common
    "split rows": lambda d: tuple(rand(8, D, device=d).split(4)),
    "one row on": lambda d: (lambda t: (t[:4], t[1:]))(rand(5, D, device=d)),
    "one row back": lambda d: (lambda t: (t[1:], t[:4]))(rand(5, D, device=d)),
    "two objects": lambda d: (lambda t: (t, t.view(4, D)))(rand(4, D, device=d)),
    "detached": lambda d: (lambda t: (t, t.detach()))(rand(4, D, device=d)),
    "reversed layout": lambda d: (lambda t: (t[:4, :D], t.t()[:4, :D]))(rand(D, D, device=d)),
    "a row of it": lambda d: (lambda t: (t, t[1:2].expand(4, D)))(rand(4, D, device=d)),
}


# MA03
@device
@dynamic
@pytest.mark.parametrize("body", SHARING_BODIES, ids=lambda f: f.__name__.strip("_"))
def test_writes_through_one_of_two_inputs_that_share_memory_are_seen_through_the_other(
    body: Any, dynamic: bool | None, device: str
) -> None:
    model = Model(body, a=lin()).to(device)
    names = list(PAIRS)
    with torch._dynamo.config.patch(recompile_limit=64):
        call = compiled(model, dynamic=dynamic)
        # First the pair that shares nothing, three times, so that there is a recording which would be wrong.
        if body is _writes_both:
            names.remove("a row of it")  # eager refuses to write it
        order = ["apart"] * 3 + [n for n in names for _ in range(3)] + ["apart"] + names
        calls_as_eager(call, model, lambda k: PAIRS[order[k]](device), len(order))
    assert total("replayed") > 0


# MA03
@device
def test_a_buffer_that_is_also_an_argument_is_written_once_and_seen_in_both(device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return m.cache[:4] + ops.double(m.a(x))

    def writes_the_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.cache.add_(1)
        return x * 2 + ops.double(m.a(x))

    for body in (fn, writes_the_buffer):
        model, reference = Model(body, a=lin()).to(device), Model(body, a=lin()).to(device)
        reference.load_state_dict(model.state_dict())
        call = compiled(model, dynamic=False)
        with torch.no_grad():
            for k in range(12):
                # Its own memory at first, so that there is a recording; then the buffer's; then its own again.
                inside = k % 4 == 3
                x = model.cache[2:6] if inside else rand(4, D, device=device)
                y = reference.cache[2:6] if inside else x.clone()
                same(call(x), reference(y))
                same(x, y)
                same(model.cache, reference.cache)
    assert total("replayed") > 0


# MA03
@device
def test_three_inputs_of_one_storage_keep_their_places(device: str) -> None:
    def fn(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q.mul_(0.5)
        k.copy_(ops.double(m.a(v)))
        return q + k + v, v

    model = Model(fn, a=lin()).to(device)
    call = compiled(model)

    def packed(k: int) -> tuple[torch.Tensor, ...]:
        qkv = rand(4 + k % 2, 3 * D, device=device)
        return qkv.chunk(3, 1) if k > 3 else tuple(t.clone() for t in qkv.chunk(3, 1))

    calls_as_eager(call, model, packed, 12)
    assert total("replayed") > 0


# -- outputs that are inputs -------------------------------------------------------------------------------------------

RETURNS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "itself and more": lambda m, x: (x, x + 1),
    "itself alone": lambda m, x: x,
    "flat view": lambda m, x: (x.view(-1), m.a(x)),
    "tail": lambda m, x: (x[1:], m.a(x)),
    "tail of a tail": lambda m, x: (lambda v: (v, v[1:].t(), m.a(v)))(x[1:]),
    "written and returned": lambda m, x: (x.add_(1), x * 2),
    "written by a cut and returned": lambda m, x: (ops.add_one_(x), x, x.t(), m.a(x))[1:],
    "twice": lambda m, x: (x, x, m.a(x), x[:]),
    "detached": lambda m, x: (x.detach(), m.a(x)),
    "weight": lambda m, x: (m.a.weight, m.a.weight.t(), m.a(x)),
    "buffer": lambda m, x: (m.cache, m.cache[1:3], m.a(x)),
    "written buffer": lambda m, x: (m.cache.add_(1), m.cache[2], m.a(x)),
    "itself behind a cut": lambda m, x: (ops.double(x), x[:, 2:], m.a(ops.double(x))),
    "split": lambda m, x: (*x.split(2), m.a(x)),
    "unbind": lambda m, x: (*x.unbind(1), m.a(x)),
    "a result and its views": lambda m, x: (lambda h: (h, h[1:], h.t(), h))(m.a(x)),
    "a result's views alone": lambda m, x: (lambda h: (h[1:], h[:-1], h.view(-1)[::3]))(m.a(x)),
    "a cut's result and its views": lambda m, x: (lambda h: (h, h[1:], m.a(h)))(ops.double(m.a(x))),
    "a cut's result's views alone": lambda m, x: (lambda h: (h[1:], h[:, 1]))(ops.double(x)),
    "expanded": lambda m, x: (x[:1].expand(4, D), m.a(x)[:1].expand(3, D)),
    "nested": lambda m, x: {"a": [x, (m.a(x), x[2:])], "b": None, "c": 3},
    "written result and its view": lambda m, x: (lambda h: (h, h[1:].add_(1)))(m.a(x)),
    "reshape of a transposed": lambda m, x: (x.t().reshape(-1), x.t().contiguous().view(-1), x.reshape(-1)),
    "to the same dtype": lambda m, x: (x.to(torch.float32), x.float(), x.contiguous(), m.a(x)),
    "another dtype": lambda m, x: (x.view(torch.int32), m.a(x).view(torch.int32)),
}


# MA04
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("how", RETURNS)
def test_what_is_returned_aliases_what_it_aliases_in_eager(how: str, outputs: str, device: str) -> None:
    model = Model(RETURNS[how], a=lin()).to(device)
    for dynamic in (False, True):
        call = compiled(model, dynamic=dynamic, outputs=outputs)
        calls_as_eager(call, model, lambda k: (rand(4 + k % 2, D, device=device),), 10, lasting=outputs == "clone")
        torch._dynamo.reset()


# MA04
@device
def test_the_first_result_does_not_follow_the_inputs_of_later_calls(device: str) -> None:
    model = Model(lambda m, x: (x[1:], x, m.a(x)), a=lin()).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        kept = []
        for _ in range(6):
            x = rand(4, D, device=device)
            tail, whole, h = call(x)
            kept.append((x, x.clone(), tail, whole, h, h.clone()))
        for x, was, tail, whole, h, h_was in kept:
            same((x, tail, whole, h), (was, was[1:], was, h_was))
            tail.zero_()
            assert (x[1:] == 0).all()
            same(whole[0], was[0])


# -- writes that pieces and cuts see of one another --------------------------------------------------------------------


def _pair_then_cut(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    a, b = test_ops.bump_and_pair(h)
    c = ops.double(a + b) + a
    return c, h, h * 2, b


def _pair_of_an_input(m: Any, x: torch.Tensor) -> Any:
    a, b = test_ops.bump_and_pair(x)
    h = ops.double(m.a(a))
    return h + x, ops.double(x) + b


def _index_put_then_cut(m: Any, x: torch.Tensor) -> Any:
    slots = torch.arange(3, 3 + x.shape[0], device=x.device)
    m.cache.index_put_((slots,), m.a(x))
    h = ops.double(x)
    return m.a(m.cache[slots] + h), m.cache, m.cache[slots]


def _index_put_of_a_local(m: Any, x: torch.Tensor) -> Any:
    cache = torch.zeros(16, D, device=x.device)
    cache.index_put_((torch.arange(x.shape[0], device=x.device),), m.a(x))
    h = ops.double(cache)
    cache.index_put_((torch.tensor([1], device=x.device),), h[:1], accumulate=True)
    ops.add_one_(cache)
    return m.a(cache) + h, cache


def _written_by_a_cut_through_a_view(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    test_ops.bump_and_pair(h[1:])
    g = h * 2
    test_ops.bump_and_pair(h.t())
    return g, h, ops.double(h)


def _optional_argument(m: Any, x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    test_ops.fill_maybe(m.a(x), out)
    test_ops.fill_maybe(ops.double(out), x, m.counter)
    return out + x, m.counter * 1


def _setitem_and_out(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    h[:, 0] = 5
    g = ops.double(h)
    torch.add(g, 1, out=h)
    h[0] = g[1]
    return m.a(h), h, g


def _foreach(m: Any, x: torch.Tensor) -> Any:
    h, g = m.a(x), ops.double(x)
    torch._foreach_add_([h, g, x], 1.0)
    ops.add_one_(g)
    return ops.double(h) + g + x, g


def _copy_between(m: Any, x: torch.Tensor) -> Any:
    m.cache[:4].copy_(m.cache[4:8])
    m.cache[2:6] = m.cache[:4] * 1 + ops.double(x)[:1]  # the rows overlap
    return m.cache[:6] + m.a(x)[:1]


CROSSING = [
    _pair_then_cut,
    _pair_of_an_input,
    _index_put_then_cut,
    _index_put_of_a_local,
    _written_by_a_cut_through_a_view,
    _optional_argument,
    _setitem_and_out,
    _foreach,
    _copy_between,
]


# MA06
@device
@cut_or_not
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("body", CROSSING, ids=lambda f: f.__name__.strip("_"))
def test_a_write_in_one_step_is_seen_in_later_ones(body: Any, inner: str, cuts: Any, device: str) -> None:
    if body is _optional_argument and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 itself fails where an optional argument that the op writes is None")
    model = Model(body, a=lin()).to(device)
    call = compiled(model, inner=inner, cut_ops=cuts)
    calls_as_eager(call, model, lambda k: (rand(4 + k % 2, D, device=device),), 8)
    assert not [c for g in graphs() for c in g.counters.failures]
    assert total("replayed") > 0


# -- ops that say which arguments they write ---------------------------------------------------------------------------


def _rotates_inputs(m: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    test_ops.rotate_(q, k, m.counter + 2)
    return m.a(q) @ k.t()


def _rotates_intermediates(m: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    q, k = m.a(q), ops.double(k)
    test_ops.rotate_(q, k, m.counter + 2)
    return q, k, q @ k.t()


def _rotates_views(m: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    qk = torch.cat([m.a(q), k], 1)
    test_ops.rotate_(qk[:, :D], qk[:, D:], m.counter + 2)
    test_ops.rotate_(q[:2], k[2:4], m.counter + 1)
    return qk, q + 1


def _rotates_between(m: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    h = ops.double(m.a(q))
    test_ops.rotate_(h, k, m.counter + 2)
    h = ops.double(h)
    test_ops.rotate_(q, h, m.counter + 3)
    return m.a(h), k * 1, q * 1


def _rotates_the_buffer(m: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
    test_ops.rotate_(m.cache[:4], m.cache[8:12], m.counter + 2)
    return m.cache[:4] + m.a(q), k


# MA08
@device
@cut_or_not
@dynamic
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "body",
    [_rotates_inputs, _rotates_intermediates, _rotates_views, _rotates_between, _rotates_the_buffer],
    ids=lambda f: f.__name__.strip("_"),
)
def test_an_op_that_writes_its_arguments_is_applied_once(
    body: Any, inner: str, dynamic: bool | None, cuts: Any, device: str
) -> None:
    model = Model(body, a=lin()).to(device)
    call = compiled(model, inner=inner, dynamic=dynamic, cut_ops=cuts)
    calls_as_eager(call, model, lambda k: (rand(4, D, device=device), rand(4, D, device=device)), 6)
    assert not [c for g in graphs() for c in g.counters.failures]
    assert total("replayed") >= 4


# -- state that is made on first use -----------------------------------------------------------------------------------


class Lazy(nn.Module):
    """Makes its cache at the first call, inside of whatever is captured then."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.how = lin(), how
        if how == "buffer":
            self.register_buffer("k", None)
        else:
            self.k: Any = None

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.k is None:
            self.k = torch.zeros(32, D, device=x.device)
        h = mark(self.a(x)) if self.how == "break" else self.a(x)
        self.k.index_copy_(0, position, h)
        return self.k.cumsum(0) + ops.double(h)


@eager_on_graph
def mark(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def decodes_sixteen(step: Callable[..., Any], model: Lazy, reference: Lazy, device: str, *, between: bool) -> None:
    """Sixteen positions through ``step``: cache and results are eager's, whatever is captured between."""
    others: list[Any] = []
    with torch.no_grad():
        for k in range(16):
            x, at = rand(1, D, device=device), torch.tensor([k], device=device)
            same(step(x, at).clone(), reference(x, at))
            same(model.k, reference.k)
            if between:
                other = nn.Linear(D, 64).to(device)
                wide = rand(128, D, device=device)
                backend = captured(device, lambda other=other, wide=wide: other(wide) * float("nan"))
                backend.replay(4)
                others.append(backend)
                same(model.k, reference.k)
    for backend in others:
        backend.cleanup()


# MA10
@device
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("how", ["attribute", "buffer"])
def test_a_cache_that_a_compiled_model_makes_on_first_use_lasts(how: str, between: bool, device: str) -> None:
    model, reference = Lazy(how).to(device), Lazy(how).to(device)
    reference.load_state_dict(model.state_dict())
    decodes_sixteen(compiled(model, dynamic=False), model, reference, device, between=between)
    assert total("replayed") > 8


# MA10
@device
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("kind", ["whole", "breakable"])
def test_a_cache_that_is_made_in_the_warm_up_of_a_wrapper_lasts(kind: str, between: bool, device: str) -> None:
    how = "break" if kind == "breakable" else "attribute"
    model, reference = Lazy(how).to(device), Lazy(how).to(device)
    reference.load_state_dict(model.state_dict())
    x, at = rand(1, D, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    backend = (FullCudaGraphBackend if kind == "whole" else BreakableCudaGraphBackend)(module(device))
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(1, lambda: model(x, at))
        reference(x, at)  # the warm-up ran for real, at position 0

    def step(now: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x.copy_(now)
        at.copy_(position)
        return backend.replay(1)

    decodes_sixteen(step, model, reference, device, between=between)
    backend.cleanup()


# MA10
@device
def test_what_a_capture_makes_and_keeps_is_not_taken_by_later_captures(device: str) -> None:
    kept: list[torch.Tensor] = []
    x = rand(8, D, device=device)
    model = lin().to(device)

    def forward() -> torch.Tensor:
        h = model(x)
        if module(device).is_current_stream_capturing() and not kept:
            kept.append(torch.zeros(8, D, device=device))  # persistent state, born in the capture
        if kept:
            kept[0].add_(h)
        return h * 2

    backend = captured(device, forward)
    with torch.no_grad():
        # It is zeroed at each replay: that is what was recorded. What lies in it must be that, and nothing else.
        for k in range(8):
            other = captured(device, lambda k=k: torch.full((8 + k, D), float("nan"), device=device) * 2)
            backend.replay(4)
            wanted = model(x)
            other.replay(4)
            same(kept[0], wanted)
            other.cleanup()
    kept.clear()
    backend.cleanup()
