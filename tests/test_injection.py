"""A failure at every step of a capture: the call is answered, the cause is kept, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import sgc_backend
from sgc_backend import FullCudaGraphBackend, StrictError, emulated
from sgc_backend.device import device_of
from sgc_backend.errors import CaptureError
from sgc_backend.pool import GraphPool, pool_of

__all__ = ["only_graphs_of_this_test"]

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])
SLACK = 2 << 20  # the allocator's smallest segment


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


def pool_on(device: str) -> GraphPool:
    return pool_of(device_of(module(device)))


class InjectedError(ArithmeticError):
    """What "raise" raises: no error that anything else could raise."""


class Injector(TorchDispatchMode):
    """Fails at the ``at``-th op that is dispatched while it is on.

    Attributes:
        seen: ops dispatched so far.
        fired: how often it failed.
    """

    def __init__(self, device: str, way: str, at: int) -> None:
        super().__init__()
        self.device, self.way, self.at = device, way, at
        self.seen = self.fired = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.seen == self.at:
            self.fired += 1
            tensor = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
            fail(self.way, self.device, tensor)
        self.seen += 1
        return func(*args, **(kwargs or {}))


def fail(way: str, device: str, tensor: torch.Tensor) -> None:
    """Do what a capture can't survive, ``way``."""
    where = module(device)
    if way == "raise":
        raise InjectedError("injected")
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "sync":
        tensor.sum().item()
    if way == "swallowed sync":  # the capture is invalid, and the callable goes on
        with contextlib.suppress(RuntimeError):
            tensor.sum().item()
    if way == "synchronize":
        where.synchronize()
    if way == "unjoined":
        side = where.Stream()
        side.wait_stream(where.current_stream())
        with where.stream(side):
            tensor.clone()
    if way == "memory":
        torch.empty(1 << 60, device=tensor.device)


WAYS = {  # what the counted cause says
    "raise": "InjectedError: injected",
    "sync": "not permitted",
    "swallowed sync": "invalidated|previous error|not permitted",
    "synchronize": "not permitted",
    "unjoined": "unjoined",
    "memory": "OutOfMemoryError",
}
ways = pytest.mark.parametrize(
    "way", [w if w != "memory" else pytest.param(w, marks=pytest.mark.gpu) for w in WAYS] + ["interrupt"]
)


def on_device(way: str, device: str) -> None:
    if way == "memory" and device == "cpu":
        pytest.skip("the emulated device has no limit to run into")


@contextlib.contextmanager
def failing_piece(graph: Any, piece: int, injector: Injector) -> Iterator[None]:
    """While open, ``injector`` is on while piece ``piece`` is recorded; uncaptured runs are left alone."""
    before = graph.recordable
    index = [k for k, g in enumerate(graph.split.groups) if g in graph.split.pieces][piece]
    fn = before[index]

    def failing(*args: Any) -> Any:
        with injector:
            return fn(*args)

    graph.recordable = [*before[:index], failing, *before[index + 1 :]]
    try:
        yield
    finally:
        graph.recordable = before


def _three_pieces(m: Any, x: torch.Tensor, slots: torch.Tensor) -> Any:
    m.counter.add_(1)
    h = m.a(x).relu()
    m.cache[slots] = h
    h = ops.double(h)
    h = m.b(h) + m.cache[slots]
    h = h + torch.rand_like(h) * 0  # uses the generator, and every value is known
    m.cache.index_add_(0, slots, h)
    h = ops.double(h)
    m.counter.mul_(2)
    return h * m.counter, m.counter.clone()


def three_pieces(device: str) -> tuple[Model, Model]:
    """A model with three pieces and two cuts that writes state in the first two and the last, and its reference."""
    model = Model(_three_pieces, a=lin(), b=lin()).to(device)
    return model, copy.deepcopy(model)


def inputs(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, D, device=device), torch.randperm(64)[:n].to(device)


def same_state(model: Model, reference: Model) -> None:
    for mine, wanted in zip(model.buffers(), reference.buffers(), strict=True):
        same(mine, wanted)


def right(call: Callable[..., Any], model: Model, reference: Model, n: int, device: str) -> None:
    """One call at size ``n``: the result is eager's, and the state was written exactly once."""
    with torch.no_grad():
        model.counter.fill_(1)  # or it would double until it is infinite, and equal to anything
        reference.counter.fill_(1)
        args = inputs(n, device)
        same(call(*args), reference(*args))
    same_state(model, reference)


def usable(device: str) -> None:
    """Nothing captures, and the random generator works and is reproducible."""
    assert not module(device).is_current_stream_capturing()
    assert not pool_on(device)._capturing
    torch.manual_seed(3)
    first = torch.randn(4, device=device)
    second = torch.randn(4, device=device)
    torch.manual_seed(3)
    same(torch.randn(4, device=device), first)
    assert not torch.equal(first, second)


def replayed(graph: Any) -> int:
    return sum(graph.counters.replayed.values())


def ops_of_pieces(graph: Any, call: Callable[[int], None], sizes: Iterator[int], device: str) -> list[int]:
    """How many ops each piece dispatches while it is recorded."""
    found = []
    for piece in range(len(graph.split.pieces)):
        counting = Injector(device, "raise", -1)
        n = next(sizes)
        call(n)
        with failing_piece(graph, piece, counting):
            call(n)
        found.append(counting.seen)
    return found


def fresh_sizes() -> Iterator[int]:
    """Sizes that were never used. They start over where the cache has no more rows; its model must forget then."""
    return itertools.cycle(range(4, 64))


@device
@ways
def test_a_failure_at_any_op_of_any_piece_is_recovered_from(way: str, device: str) -> None:
    on_device(way, device)
    model, reference = three_pieces(device)
    call = compiled(model, max_recordings=10_000)
    pool = pool_on(device)
    sizes = fresh_sizes()

    def at(n: int) -> None:
        right(call, model, reference, n, device)

    anchor = 3
    for _ in range(3):
        at(anchor)
    (graph,) = graphs()
    assert len(graph.split.pieces) == 3
    assert len(graph.split.groups) == 5
    counts = ops_of_pieces(graph, at, sizes, device)
    assert min(counts) >= 3
    recovered = 0
    for piece, count in enumerate(counts):
        for k in range(count):
            n, other = next(sizes), next(sizes)
            if (n,) in graph._observed or (other,) in graph._observed:
                graph.release()
                at(anchor)
                at(anchor)
            at(n)
            injector = Injector(device, way, k)
            gc.collect()
            reserved = pool.reserved_bytes()
            failures = sum(graph.counters.failures.values())
            with failing_piece(graph, piece, injector):
                if way == "interrupt":
                    before = copy.deepcopy(dict(model.named_buffers()))
                    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                        call(*inputs(n, device))
                    same(dict(model.named_buffers()), before)
                else:
                    at(n)
            assert injector.fired == 1
            gc.collect()
            assert (n,) not in graph.plans
            assert abs(pool.reserved_bytes() - reserved) <= SLACK
            usable(device)
            if way == "interrupt":
                assert sum(graph.counters.failures.values()) == failures
                at(n)  # nothing was wrong with the graph: it is recorded now
                assert (n,) in graph.plans
            else:
                assert sum(graph.counters.failures.values()) == failures + 1
                cause = list(graph.counters.failures)[-1]
                assert re.search(WAYS[way], cause), cause
                at(n)
                assert (n,) not in graph.plans
                assert graph.counters.uncaptured[cause] >= 2
            seen = replayed(graph)
            at(anchor)
            assert replayed(graph) == seen + 1
            for _ in range(3):
                at(other)
            assert graph.counters.replayed[(other,)] >= 2
            recovered += 1
    assert recovered == sum(counts)
    second, second_reference = three_pieces(device)
    again = compiled(second)
    for _ in range(3):
        right(again, second, second_reference, 5, device)
