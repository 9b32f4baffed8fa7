"""The stream, the keeper and the guard."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import sgc_backend
from sgc_backend import emulated, replay_guard
from sgc_backend.capture import record
from sgc_backend.devices import device_of
from sgc_backend.errors import CaptureNestedError, NestedReplayError, StalePoolError
from sgc_backend.pools import pool_of

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


@device
def test_the_pool_outlives_every_recording_even_while_a_tensor_in_it_lives(device: str) -> None:
    pool = pool_of(device_of(module(device)))
    x = torch.ones(1000, device=device)
    kept = []
    for _ in range(3):
        graph, out = record(pool, lambda: x * 2, "test")
        kept.append(out)
        graph.replay()
        pool.drop(graph)
    graph, out = record(pool, lambda: x * 3, "test")
    graph.replay()
    assert torch.equal(out, x * 3)
    pool.drop(graph)


@device
def test_recordings_on_one_stream_share_memory_and_the_largest_decides(device: str) -> None:
    pool = pool_of(device_of(module(device)))
    x = torch.randn(1 << 20, device=device)
    graphs = []

    def body(n: int) -> torch.Tensor:
        h = x[:n]
        for _ in range(4):
            h = h * 1.5
        return h.sum()

    graphs.append(record(pool, lambda: body(1 << 20), "largest")[0])
    largest = pool.reserved_bytes()
    for shift in range(19, 10, -1):
        graphs.append(record(pool, lambda n=1 << shift: body(n), "smaller")[0])
    assert pool.reserved_bytes() <= 1.02 * largest
    for graph in graphs:
        pool.drop(graph)


def test_a_replay_inside_a_replay_or_a_capture_is_refused() -> None:
    pool = pool_of(device_of(emulated))
    pool.replay_begin(pool.generation)
    with pytest.raises(NestedReplayError, match="inside a replay"):
        pool.replay_begin(pool.generation)
    with pytest.raises(CaptureNestedError, match="replaying from"), pool.capturing():
        pass
    pool.replay_end()
    with pool.capturing(), pytest.raises(NestedReplayError, match="inside a capture"):
        pool.replay_begin(pool.generation)
    pool.replay_begin(pool.generation)  # and the refusals left nothing locked
    pool.replay_end()


def test_a_recording_of_an_older_generation_refuses_to_replay() -> None:
    backend = sgc_backend.FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: x + 1)
    held = backend._recordings.copy()
    sgc_backend.reset()
    backend._recordings = held
    with pytest.raises(StalePoolError, match="record it again"):
        backend.replay(4)
    backend._recordings = {}


def overlapping(pool: Any, guarded: bool) -> None:
    """Two recordings of one pool, replayed on two streams that nothing orders."""
    x = torch.ones(16)
    graphs = [record(pool, lambda k=k: x * k, "test")[0] for k in (2, 3)]
    for graph in graphs * 2:
        with emulated.stream(emulated.Stream()):
            if guarded:
                pool.replay_begin(pool.generation)
            try:
                graph.replay()
            finally:
                if guarded:
                    pool.replay_end()
    for graph in graphs:
        pool.drop(graph)


def test_replays_on_unordered_streams_are_serialised_by_the_guard() -> None:
    pool = pool_of(device_of(emulated))
    with pytest.raises(emulated.EmulatedRaceError):
        overlapping(pool, guarded=False)
    emulated.synchronize()
    overlapping(pool, guarded=True)


def test_the_guard_compares_and_does_nothing_else_on_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(device_of(emulated))
    changes = []
    change = pool._change_stream
    monkeypatch.setattr(pool, "_change_stream", lambda raw: (changes.append(raw), change(raw)))
    for _ in range(5):
        pool.replay_begin(pool.generation)
        pool.replay_end()
    assert len(changes) == 1


@pytest.mark.gpu
def test_replays_on_two_streams_are_right_with_the_guard_and_wrong_without() -> None:
    pool = pool_of(device_of(torch.cuda))
    x = torch.randn(2048, 2048, device="cuda")

    def chain(scale: float) -> torch.Tensor:
        h = x
        for _ in range(12):
            h = (h @ x) * scale
            h = h / h.abs().amax()
        return h

    recordings = []
    for scale in (1.0, -1.0):
        recordings.append(record(pool, lambda s=scale: chain(s), "test"))
    views = [sgc_backend.capture.unowned_like(pool.device, out) for _, out in recordings]
    graphs = [graph for graph, _ in recordings]
    del recordings
    expected = [chain(1.0), chain(-1.0)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def wrong(guarded: bool) -> int:
        bad = 0
        for _ in range(25):
            torch.cuda.synchronize()
            got = []
            for graph, view, stream in zip(graphs, views, streams, strict=True):
                with torch.cuda.stream(stream):
                    if guarded:
                        pool.replay_begin(pool.generation)
                    graph.replay()
                    got.append(view.clone())
                    if guarded:
                        pool.replay_end()
            torch.cuda.synchronize()
            bad += any(not torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        return bad

    assert wrong(guarded=True) == 0
    assert wrong(guarded=False) > 0
    for graph in graphs:
        pool.drop(graph)


class InterruptedOnce:
    """Numbers, of which the first does not come."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> InterruptedOnce:
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.asked == 1:
            raise KeyboardInterrupt
        return -self.asked


@pytest.mark.parametrize("held", [False, True])
def test_an_interrupt_as_a_replay_begins_leaves_the_pool_usable(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(device_of(emulated))
    x = torch.ones(8)
    graph, out = record(pool, lambda: x * 2, "test")

    def replay() -> None:
        if held:
            pool.hold(pool.generation)
            try:
                pool.replay_held(graph.replay)
            finally:
                pool.let_go()
        else:
            pool.replay_begin(pool.generation)
            try:
                graph.replay()
            finally:
                pool.replay_end()

    monkeypatch.setattr(replay_guard, "writes", InterruptedOnce())
    with pytest.raises(KeyboardInterrupt):
        replay()
    others = threading.Thread(target=replay)  # for which the lock must be free
    others.start()
    others.join(10)
    assert not others.is_alive() and torch.equal(out, x * 2)
    pool.drop(graph)
