"""The accessor, the stream, the keeper and the guard."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import sgc_backend
from sgc_backend import emulated
from sgc_backend.capture import record
from sgc_backend.device import device_of
from sgc_backend.errors import CaptureNestedError, NestedReplayError, OptionError, StalePoolError
from sgc_backend.pool import pool_of

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


@device
def test_the_accessor_gives_one_handle_and_one_stream(device: str) -> None:
    handle = sgc_backend.get_or_create_global_graph_memory_pool(module(device))
    assert handle is not None
    assert sgc_backend.get_or_create_global_graph_memory_pool(module(device)) == handle
    stream = sgc_backend.get_or_create_global_capture_stream(module(device))
    assert sgc_backend.get_or_create_global_capture_stream(module(device)) is stream


def test_threads_that_race_for_the_pool_get_the_same_one() -> None:
    seen = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        seen.append(sgc_backend.get_or_create_global_graph_memory_pool(emulated))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1


@pytest.mark.parametrize("wrong", [None, "cuda", torch, 7])
def test_what_is_no_device_module_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(OptionError, match="graph_pool_handle"):
        sgc_backend.get_or_create_global_graph_memory_pool(wrong)


@device
def test_the_generation_of_static_outputs_changes_with_every_replay_and_capture_and_never_comes_again(
    device: str,
) -> None:
    where = module(device)
    full = sgc_backend.FullCudaGraphBackend(where)
    x = torch.ones(4, device=device)
    seen = [sgc_backend.static_output_generation(where)]
    with full.capture_session():
        full.capture_one(4, lambda: x * 2)
        seen.append(sgc_backend.static_output_generation(where))
        full.capture_one(2, lambda: x[:2] * 2)
    for key in (4, 4, 2):
        seen.append(sgc_backend.static_output_generation(where))
        out = full.replay(key)
        assert sgc_backend.static_output_generation(where) != seen[-1]
    current = sgc_backend.static_output_generation(where)
    out.clone()
    x.add_(1)
    assert sgc_backend.static_output_generation(where) == current
    sgc_backend.static_output_generation(where, lane="other")
    full.cleanup()
    sgc_backend.reset()
    seen += [current, sgc_backend.static_output_generation(where)]
    assert len(set(seen)) == len(seen)


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


@device
def test_recordings_that_the_collector_finds_inside_a_capture_are_destroyed_behind_it(device: str) -> None:
    import gc

    pool = pool_of(device_of(module(device)))
    x = torch.randn(64, 64, device=device)

    def leave_garbage() -> None:
        wrapper: Any = sgc_backend.FullCudaGraphBackend(module(device))
        with wrapper.capture_session():
            wrapper.capture_one(4, lambda: x + 1)
        wrapper.itself = wrapper

    waiting: list[int] = []

    def body() -> torch.Tensor:
        y = x @ x
        gc.collect()
        waiting.append(len(pool._doomed))
        return y + torch.rand_like(y)

    leave_garbage()
    graph, out = record(pool, body, "test")
    assert waiting == [1]  # dropped by its owner's death, and not destroyed while the capture was open
    assert not pool._doomed
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    pool.drop(graph)
