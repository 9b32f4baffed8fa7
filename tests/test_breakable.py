"""BreakableCudaGraphBackend: graph segments and eager breaks in turn."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import sgc_backend
from sgc_backend import BreakableCudaGraphBackend, ShapeKey, break_graph, eager_on_graph, emulated
from sgc_backend.errors import StrictError

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Box:
    inner: dict[str, Any]
    label: str


FLAVOURS: dict[str, Callable[[torch.Tensor], Any]] = {
    "fresh": lambda y: y * 2 + 1,
    "in place, returned": lambda y: y.mul_(3),
    "in place, nothing returned": lambda y: (y.mul_(3), None)[1],
    "a view": lambda y: y[1:],
    "several": lambda y: (y + 1, y * 2, y[0]),
    "nested": lambda y: {"a": [y + 1, (y * 2,)], "b": y},
    "named tuple": lambda y: Pair(y + 1, y - 1),
    "dataclass": lambda y: Box({"x": y * 3, "n": 2}, "label"),
    "ordered": lambda y: OrderedDict(z=y + 5, a=y),
    "expanded": lambda y: y[:1].expand(4, -1),
    "transposed": lambda y: (y * 2).t(),
    "tensor and host value": lambda y: (y + 1, 7),
    "bytes read as another dtype": lambda y: y.view(torch.int32),
    "two over one storage": lambda y: (lambda a: (a, a[1:]))(y + 1),
    "the same twice": lambda y: (lambda a: [a, a])(y * 2),
}


def total_of(tree: Any) -> torch.Tensor:
    from sgc_backend.tree import flatten

    leaves = flatten(tree)[0]
    numbers = [v for v in leaves if isinstance(v, (int, float))]
    return sum((v.float().sum() for v in leaves if isinstance(v, torch.Tensor)), torch.tensor(0.0)) + sum(numbers)


@device
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_break_may_return_anything(flavour: str, device: str) -> None:
    marked = eager_on_graph(FLAVOURS[flavour])
    backend = BreakableCudaGraphBackend(module(device))
    x = torch.randn(4, 3, device=device)

    def forward(broken: Callable[..., Any]) -> torch.Tensor:
        y = x * 2
        r = broken(y)
        from sgc_backend.tree import flatten

        out = y.sum()
        for leaf in flatten(r)[0]:
            if isinstance(leaf, torch.Tensor):
                out = out + leaf.sum() * 3
        return out

    with backend.capture_session():
        backend.capture_one(4, lambda: forward(marked))
    junk = []
    for _ in range(6):
        x.copy_(torch.randn(4, 3))
        junk.append(torch.full((4, 3), 9.0, device=device))
        got = backend.replay(4).clone()
        assert torch.equal(got, forward(FLAVOURS[flavour]))
    assert all((j == 9).all() for j in junk)
    backend.cleanup()


@device
def test_all_buckets_replay_right_in_any_order(device: str) -> None:
    @eager_on_graph
    def broken(y: torch.Tensor) -> torch.Tensor:
        return y.cumsum(0)

    backend = BreakableCudaGraphBackend(module(device))
    weight = torch.randn(16, 16, device=device)
    x = torch.randn(64, 16, device=device)

    def forward(n: int) -> torch.Tensor:
        y = x[:n] @ weight
        z = broken(y).relu()
        return broken(z * 2) @ weight + y

    sizes = (64, 32, 16, 8)
    with backend.capture_session():
        for n in sizes:
            backend.capture_one(n, lambda n=n: forward(n))
    order = random.Random(0)
    for _ in range(40):
        n = order.choice(sizes)
        x.copy_(torch.randn(64, 16))
        assert torch.equal(backend.replay(n), forward(n))
    handle = sgc_backend.get_or_create_global_graph_memory_pool(module(device))
    reserved = backend.device.reserved_bytes(handle)
    backend.cleanup()
    with backend.capture_session():
        backend.capture_one(64, lambda: forward(64))
    assert reserved <= 1.10 * backend.device.reserved_bytes(
        sgc_backend.get_or_create_global_graph_memory_pool(module(device))
    )
    backend.cleanup()


def test_segments_and_breaks_come_in_order_and_empty_segments_are_not_kept() -> None:
    @eager_on_graph
    def broken(y: torch.Tensor) -> torch.Tensor:
        return y + 1

    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: broken(broken(x) * 2))
    kinds = [type(s).__name__ for s in backend._recordings[ShapeKey(4)].segments]
    assert kinds == ["BreakSegment", "CUDAGraph", "BreakSegment"]
    assert torch.equal(backend.replay(4), (x + 1) * 2 + 1)


def test_nothing_of_a_break_runs_while_it_is_captured() -> None:
    runs = []

    @eager_on_graph
    def broken(y: torch.Tensor) -> torch.Tensor:
        runs.append(float(y.sum()))
        return y + 1

    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: broken(x * 2))
    assert runs == [8.0, 8.0]  # twice warmed up
    backend.replay(4)
    assert len(runs) == 3


def test_a_stub_stands_in_for_the_body_in_the_warm_up() -> None:
    ran = []
    marked = eager_on_graph(capture_stub=lambda y: torch.zeros_like(y))(lambda y: (ran.append(1), y * 5)[1])
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: marked(x * 1) + 1)
    assert not ran
    assert torch.equal(backend.replay(4), x * 5 + 1)


def test_a_break_inside_a_break_runs_inline() -> None:
    inner = eager_on_graph(lambda y: y * 2)
    outer = eager_on_graph(lambda y: inner(y) + 1)
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: outer(x * 3) * 2)
    assert torch.equal(backend.replay(4), (x * 6 + 1) * 2)
    assert len([s for s in backend._recordings[ShapeKey(4)].segments if hasattr(s, "fn")]) == 1


def test_a_break_reads_the_host_as_it_is_at_replay() -> None:
    lengths = [2]
    masked = eager_on_graph(lambda y: y * (torch.arange(4) < lengths[0]))
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: masked(x * 1) * 2)
    for n in (1, 3, 4, 0):
        lengths[0] = n
        assert backend.replay(4).sum() == 2 * n


def test_a_host_value_that_changes_is_said_once_and_refused_where_strict() -> None:
    value = [3]
    counted = eager_on_graph(lambda y: (y + 1, value[0]))
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        y, k = counted(x * 2)
        return y * k

    for strict in (False, True):
        value[0] = 3
        backend = BreakableCudaGraphBackend(emulated, strict=strict)
        with backend.capture_session():
            backend.capture_one(4, forward)
        backend.replay(4)
        value[0] = 4
        if strict:
            with pytest.raises(StrictError, match="host value 4; the recording goes on with 3"):
                backend.replay(4)
        else:
            with pytest.warns(UserWarning, match="host value 4; the recording goes on with 3"):
                backend.replay(4)
            backend.replay(4)
        backend.cleanup()


def test_a_callable_that_breaks_nowhere_is_a_warning_and_an_error_where_strict() -> None:
    x = torch.ones(4)
    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session(), pytest.warns(UserWarning, match="broke nowhere"):
        backend.capture_one(4, lambda: x + 1)
    assert torch.equal(backend.replay(4), x + 1)
    strict = BreakableCudaGraphBackend(emulated, strict=True)
    with strict.capture_session(), pytest.raises(StrictError, match="broke nowhere"):
        strict.capture_one(4, lambda: x + 1)
    assert not strict.can_run(4)
    backend.cleanup()
    with warnings.catch_warnings(), backend.capture_session(), pytest.raises(UserWarning, match="broke nowhere"):
        warnings.simplefilter("error")
        backend.capture_one(4, lambda: x + 1)
    assert not backend.can_run(4)
    assert not sgc_backend.memory_report().pools[0].owners


def test_break_graph_only_splits() -> None:
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        y = x * 2
        break_graph()
        return y + 1

    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(4, forward)
    assert len(backend._recordings[ShapeKey(4)].graphs()) == 2
    assert torch.equal(backend.replay(4), x * 2 + 1)


def test_the_debug_switch_runs_the_callable_as_one_break() -> None:
    runs = []
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        runs.append(1)
        return x * 2

    backend = BreakableCudaGraphBackend(emulated, one_break=True)
    with backend.capture_session():
        backend.capture_one(4, forward)
    before = len(runs)
    x.fill_(5)
    assert torch.equal(backend.replay(4), x * 2)
    assert len(runs) == before + 1


def replays_equal(forward: Callable[[], torch.Tensor], x: torch.Tensor, rounds: int = 4, **settings: Any) -> None:
    """Record ``forward``, which reads ``x``, and compare replays with it, restoring what it writes into ``x``."""
    backend = BreakableCudaGraphBackend(emulated, **settings)
    with backend.capture_session():
        backend.capture_one(4, forward)
    for _ in range(rounds):
        fresh = torch.randn_like(x)
        x.copy_(fresh)
        with torch.no_grad():
            expected = forward().clone()
        x.copy_(fresh)
        assert torch.equal(backend.replay(4), expected)
    backend.cleanup()


def test_a_view_that_a_break_returned_keeps_its_bytes_from_being_used_again() -> None:
    tail = eager_on_graph(lambda y: y[1:])
    x = torch.randn(4, 3)

    def forward() -> torch.Tensor:
        z = tail(x * 2)
        filler = torch.full((4, 3), 5.0) + x
        return z + filler[1:] + (x * 7)[1:]

    replays_equal(forward, x)


def test_results_that_alias_one_another_still_do_when_one_is_written() -> None:
    two = eager_on_graph(lambda y: (lambda a: (a, a[1:]))(y + 1))
    x = torch.randn(4, 3)

    def forward() -> torch.Tensor:
        a, b = two(x * 2)
        a.mul_(3)
        return b + 1

    replays_equal(forward, x)


def test_a_cache_of_the_bodys_own_is_the_cache_and_no_copy() -> None:
    cache = torch.zeros(4, 3)
    keep = eager_on_graph(lambda y: (cache.copy_(y), cache)[1])
    x = torch.randn(4, 3)

    def forward() -> torch.Tensor:
        c = keep(x * 2)
        c.add_(1)
        return cache * 2

    replays_equal(forward, x)


def test_arguments_that_hold_no_pool_memory_are_the_callers_own_objects() -> None:
    meta, log = {"n": 2.0}, []
    scaled = eager_on_graph(lambda y, d, entries: (entries.append(1), y * d["n"])[1])
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: scaled(x * 1, meta, log) + 0)
    meta["n"] = 5.0
    before = len(log)
    for _ in range(3):
        assert torch.equal(backend.replay(4), x * 5)
    assert len(log) == before + 3


def test_a_break_runs_under_the_modes_that_were_on_around_it() -> None:
    w = torch.randn(3, 3)
    product = eager_on_graph(lambda y: y @ w)
    x = torch.randn(4, 3)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return product(x * 2).float() + 1

    replays_equal(forward, x)


def test_a_break_outside_of_no_grad_builds_no_graph_of_gradients() -> None:
    layer = torch.nn.Linear(3, 3)
    linear = eager_on_graph(lambda y: layer(y))
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.randn(4, 3)
    with backend.capture_session():
        backend.capture_one(4, lambda: linear(x * 1) * 2)
    assert not backend.replay(4).requires_grad
