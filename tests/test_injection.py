"""A failure at every step of a capture: the call is answered, the cause is kept, and nothing of it stays behind."""

from __future__ import annotations

import contextlib
import copy
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
from sgc_backend.devices import device_of
from sgc_backend.errors import CaptureError
from sgc_backend.pool import GraphPool
from sgc_backend.pools import pool_of

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
            if (n,) in graph._warm_ups.observed or (other,) in graph._warm_ups.observed:
                graph.release()
                at(anchor)
                at(anchor)
            at(n)
            injector = Injector(device, way, k)
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
            at(other)
            at(other)
            assert graph.counters.replayed[(other,)] >= 1
            recovered += 1
    assert recovered == sum(counts)
    second, second_reference = three_pieces(device)
    again = compiled(second)
    for _ in range(3):
        right(again, second, second_reference, 5, device)


@device
@ways
def test_strict_raises_the_true_cause_and_writes_nothing(way: str, device: str) -> None:
    on_device(way, device)
    model, reference = three_pieces(device)
    call = compiled(model, strict=True)
    errors = {"interrupt": KeyboardInterrupt, "raise": InjectedError, "memory": torch.OutOfMemoryError}
    for piece in range(3):
        n = 4 + 2 * piece
        right(call, model, reference, n, device)
        (graph,) = graphs()
        before = copy.deepcopy(dict(model.named_buffers()))
        with (
            failing_piece(graph, piece, Injector(device, way, 2)),
            torch.no_grad(),
            pytest.raises(errors.get(way, CaptureError)) as raised,
        ):
            call(*inputs(n, device))
        if errors.get(way) is None:
            assert re.search(WAYS[way], str(raised.value.__cause__))
        same(dict(model.named_buffers()), before)
        usable(device)
        if way != "interrupt":
            with torch.no_grad(), pytest.raises(StrictError, match="capture failed"):
                call(*inputs(n, device))
            n += 1
            right(call, model, reference, n, device)
        right(call, model, reference, n, device)
        assert graph.counters.replayed[(n,)] == 1


class FailsAt:
    """``fn``, but its call number ``at`` raises."""

    def __init__(self, fn: Callable[..., Any], at: int, kind: type[BaseException]) -> None:
        self.fn, self.left, self.kind, self.fired = fn, at, kind, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            self.fired = True
            raise self.kind("injected")
        return self.fn(*args, **kwargs)


STEPS = ("new_graph", "capture_begin", "allocating_to", "unowned", "allocator_mark", "pool_segments", "use_stream")
SELDOM = {("pool_segments", "cpu"): 1, ("pool_segments", "cuda"): 0}  # how often at least; a GPU looks where it grew


@device
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_between_the_ops_is_recovered_from(step: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = three_pieces(device)
    call = compiled(model)
    pool = pool_on(device)
    right(call, model, reference, 3, device)
    right(call, model, reference, 3, device)
    (graph,) = graphs()
    right(call, model, reference, 4, device)
    build = sgc_backend.piecewise.build_plan
    sizes = itertools.count(5)
    for kind in (InjectedError, KeyboardInterrupt):
        for k in itertools.count():
            right(call, model, reference, n := next(sizes), device)
            failing = FailsAt(getattr(pool.device, step), k, kind)

            # The rest of a call asks the device too; only what builds a plan may fail here.
            def building(*args: Any, failing: FailsAt = failing, **kwargs: Any) -> Any:
                with monkeypatch.context() as inner:
                    inner.setattr(pool.device, step, failing)
                    return build(*args, **kwargs)

            before = copy.deepcopy(dict(model.named_buffers()))
            with monkeypatch.context() as outer:
                outer.setattr(sgc_backend.piecewise, "build_plan", building)
                if kind is InjectedError:
                    right(call, model, reference, n, device)
                else:
                    with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
                        call(*inputs(n, device))
            usable(device)
            if not failing.fired:
                break
            if kind is KeyboardInterrupt:
                same(dict(model.named_buffers()), before)
            assert (n,) not in graph.plans
            seen = replayed(graph)
            right(call, model, reference, 3, device)
            assert replayed(graph) == seen + 1
        reference.load_state_dict(model.state_dict())
        assert k >= SELDOM.get((step, device), 3)
    right(call, model, reference, 4, device)
    assert graph.counters.replayed[(4,)] >= 1


def whole(m: Any, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    m.counter.add_(1)
    h = m.a(x).relu()
    m.cache.index_add_(0, slots, h)
    h = h + torch.rand_like(h) * 0
    return m.b(h) * m.counter + m.cache[slots]


class Whole:
    """A FullCudaGraphBackend that records ``whole`` at any size, beside a reference."""

    def __init__(self, device: str) -> None:
        self.pool = pool_on(device)
        self.backend = FullCudaGraphBackend(module(device))
        self.model = Model(whole, a=lin(), b=lin()).to(device)
        self.reference = copy.deepcopy(self.model)
        self.x, self.slots = torch.randn(64, D, device=device), torch.randperm(64).to(device)

    def capture(self, n: int, injector: Injector | None = None) -> None:
        def forward() -> torch.Tensor:
            with injector if injector is not None and self.pool._capturing else contextlib.nullcontext():
                return self.model(self.x[:n], self.slots[:n])

        with torch.no_grad():
            for _ in range(2):  # the warm-up runs are real
                self.reference(self.x[:n], self.slots[:n])
            with self.backend.capture_session():
                self.backend.capture_one(n, forward)

    def replays_right(self, n: int) -> None:
        self.x.copy_(torch.randn_like(self.x))
        with torch.no_grad():
            same(self.backend.replay(n), self.reference(self.x[:n], self.slots[:n]))
        same_state(self.model, self.reference)


@device
@ways
def test_a_failure_at_any_op_of_a_whole_callable_is_recovered_from(way: str, device: str) -> None:
    on_device(way, device)
    subject = Whole(device)
    errors = {"interrupt": KeyboardInterrupt, "raise": InjectedError, "memory": torch.OutOfMemoryError}
    counting = Injector(device, "raise", -1)
    subject.capture(64, counting)
    subject.replays_right(64)
    assert counting.seen >= 8
    recovered = 0
    for k in range(counting.seen):
        for n in (64, 8):  # a key that has a recording, and one that has none
            injector = Injector(device, way, k)
            reserved = subject.pool.reserved_bytes()
            failures = sum(subject.backend.counters.failures.values())
            with pytest.raises(errors.get(way, CaptureError)) as raised:
                subject.capture(n, injector)
            if errors.get(way) is None:
                assert re.search(WAYS[way], str(raised.value.__cause__))
            del raised
            assert injector.fired == 1
            same_state(subject.model, subject.reference)
            assert sum(subject.backend.counters.failures.values()) == failures + (way != "interrupt")
            assert not subject.backend.can_run(8)
            assert subject.pool.session_depth == 0
            assert abs(subject.pool.reserved_bytes() - reserved) <= SLACK
            usable(device)
            subject.replays_right(64)
        subject.capture(16)
        subject.replays_right(16)
        subject.replays_right(64)
        recovered += 1
    assert recovered == counting.seen
    subject.backend.cleanup()


@device
def test_an_interrupted_warm_up_writes_what_it_wrote_and_records_nothing(device: str) -> None:
    backend = FullCudaGraphBackend(module(device))
    x = torch.ones(4, device=device)
    state = torch.zeros(4, device=device)
    runs: list[int] = []

    def forward() -> torch.Tensor:
        runs.append(1)
        state.add_(x)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return x + state

    with pytest.raises(KeyboardInterrupt), backend.capture_session():
        backend.capture_one(4, forward)
    assert not backend.can_run(4)
    assert state[0] == 2
    usable(device)
    with backend.capture_session():
        backend.capture_one(4, forward)
    same(backend.replay(4), x * 6)
    backend.cleanup()
