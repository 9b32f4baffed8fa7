"""Reported cases: writes that pieces, cuts and calls see of one another."""

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
from test_reports_mutation import dynamic, rand, test_ops
from torch import nn

from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, eager_on_graph

__all__ = ["only_graphs_of_this_test"]


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


OURS = ("sgc_test::rotate_", "sgc_test::bump_and_pair", "sgc_test::fill_maybe")
cut_or_not = pytest.mark.parametrize("cuts", [CUTS, (*CUTS, *OURS)], ids=["captured", "cut"])


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
