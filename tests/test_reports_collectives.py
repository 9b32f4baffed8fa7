"""Reported cases: collectives as breaks and as cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from routes import Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from test_reports_breakable import SIZES

from sgc_backend import eager_on_graph

__all__ = ["only_graphs_of_this_test"]


@torch.library.custom_op("sgc_test::times_world_", mutates_args=("x",))
def times_world_(x: torch.Tensor) -> None:
    x.mul_(3)


@torch.library.custom_op("sgc_test::times_world", mutates_args=())
def times_world(x: torch.Tensor) -> torch.Tensor:
    return x * 3


times_world_.register_fake(lambda x: None)
times_world.register_fake(lambda x: torch.empty_like(x))


WORLD = 3.0
REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place, the same tensor returned": lambda y: y.mul_(WORLD),
    "in place, nothing returned": lambda y: (y.mul_(WORLD), None)[1],
    "a new tensor": lambda y: y.clone().mul_(WORLD),
    "a tuple": lambda y: (y.clone().mul_(WORLD), None),
    "a tuple with the same tensor": lambda y: (y.mul_(WORLD), y),
    "a new tensor of another layout": lambda y: (y.t().contiguous() * WORLD).t(),
    "a view of a gathered one": lambda y: torch.cat((y, y * WORLD, y))[y.shape[0] : 2 * y.shape[0]],
    "a list": lambda y: [y * WORLD],
}


# BR07
@device
@pytest.mark.parametrize("flavour", REDUCTIONS)
def test_a_reduction_as_a_break_reaches_the_next_segment_in_every_flavour(flavour: str, device: str) -> None:
    body = REDUCTIONS[flavour]
    reduces = eager_on_graph(body)
    first, second = lin().to(device), lin().to(device)

    def forward(reduce: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        r = reduce(h)
        r = r[0] if isinstance(r, (tuple, list)) else r
        h = h if r is None else r
        h = second(h).relu()
        r = reduce(h)  # and once more
        r = r[0] if isinstance(r, (tuple, list)) else r
        return (h if r is None else r) + h

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: forward(reduces, x), x, sizes=SIZES)
    with torch.no_grad():
        for k in range(10):
            x.copy_(torch.randn(66, D))
            n = SIZES[k % 3]
            same(call(n), forward(body, x[:n]))


# BR07
@device
@routes("compiled", "tc_piecewise")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_reduction_as_a_cut_reaches_the_next_piece(in_place: bool, route: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        if in_place:
            ops.times_world_(h)
        else:
            h = ops.times_world(h)
        return m.b(h).relu() + h

    model = Model(fn, a=lin(), b=lin()).to(device)
    x = torch.randn(66, D, device=device)
    cuts = ("sgc_test::times_world_", "sgc_test::times_world")
    call = Recorded(route, device, model, x, sizes=SIZES, cuts=cuts)
    with torch.no_grad():
        for k in range(10):
            x.copy_(torch.randn(66, D))
            n = SIZES[k % 3]
            same(call(n), model(x[:n]))
    assert any(g.kind != "piece" for g in graphs()[0].split.groups)


@contextlib.contextmanager
def alone_in_a_group(device: str) -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("no process group can be made here")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


# BR07
@device
@pytest.mark.parametrize("flavour", ["all_reduce", "all_reduce, async", "functional", "gather into"])
def test_a_real_collective_as_a_break(flavour: str, device: str) -> None:
    first, second = lin().to(device), lin().to(device)
    with alone_in_a_group(device) as dist:
        import torch.distributed._functional_collectives as functional

        @eager_on_graph
        def reduces(y: torch.Tensor) -> Any:
            if flavour == "all_reduce":
                dist.all_reduce(y)
                return y * 3
            if flavour == "all_reduce, async":
                dist.all_reduce(y, async_op=True).wait()
                return y.mul_(3)
            if flavour == "functional":
                return functional.all_reduce(y, "sum", dist.group.WORLD) * 3
            out = torch.empty_like(y)
            dist.all_gather([out], y)
            return out.mul_(3)

        x = torch.randn(66, D, device=device)
        call = Recorded("breakable", device, lambda x: second(reduces(first(x))).relu(), x, sizes=SIZES)
        with torch.no_grad():
            for k in range(10):
                x.copy_(torch.randn(66, D))
                n = SIZES[k % 3]
                same(call(n), second(first(x[:n]) * 3).relu())


# BR07
@device
@pytest.mark.parametrize("flavour", ["all_reduce", "functional"])
def test_a_real_collective_in_a_compiled_model(flavour: str, device: str) -> None:
    with alone_in_a_group(device) as dist:
        import torch.distributed._functional_collectives as functional

        def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
            h = m.a(x)
            if flavour == "all_reduce":
                dist.all_reduce(h)
            else:
                h = functional.all_reduce(h, "sum", dist.group.WORLD)
            return m.b(h).relu() + 1

        model = Model(fn, a=lin(), b=lin()).to(device)
        call = compiled(model, dynamic=False)
        with torch.no_grad():
            for _ in range(6):
                x = torch.randn(4, D, device=device)
                same(call(x), m_without(model, x))
        assert total("replayed") > 0
        assert not [c for g in graphs() for c in g.counters.failures]


def m_without(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What the model gives in a world of one: a sum over one rank changes nothing."""
    return model.b(model.a(x)).relu() + 1
