"""The emulated device's streams, events and counters."""

from __future__ import annotations

import threading

import pytest
import torch
from test_emulated import _fresh, capturing, record

from sgc_backend import emulated as dev

__all__ = ["_fresh"]


@pytest.fixture
def two_replays():
    """Two recordings of one pool, and a stream for each."""
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    x = torch.zeros(4)
    return [record(lambda n=n: x + n, pool, stream)[0] for n in (1, 2)], (dev.Stream(), dev.Stream())


def replay_on(graph, stream):
    with dev.stream(stream):
        graph.replay()


def test_overlapping_replays_of_one_pool_are_detected(two_replays):
    (a, b), (s, t) = two_replays
    replay_on(a, s)
    before = dev.stats().launches
    with pytest.raises(dev.EmulatedRaceError, match=f"overlapping.*stream {s.stream_id}.*stream {t.stream_id}"):
        replay_on(b, t)
    assert dev.stats().launches == before
    replay_on(b, s)


@pytest.mark.parametrize("order", ["event", "wait_stream", "synchronize", "stream", "event_sync", "chain"])
def test_ordered_replays_are_not(two_replays, order):
    (a, b), (s, t) = two_replays
    replay_on(a, s)
    if order == "event":
        t.wait_event(s.record_event())
    elif order == "wait_stream":
        t.wait_stream(s)
    elif order == "synchronize":
        dev.synchronize()
    elif order == "stream":
        s.synchronize()
    elif order == "event_sync":
        s.record_event().synchronize()
    else:
        between = dev.Stream()
        between.wait_stream(s)
        t.wait_stream(between)
    replay_on(b, t)


def test_an_event_recorded_before_the_replay_does_not_order_it(two_replays):
    (a, b), (s, t) = two_replays
    event = s.record_event()
    replay_on(a, s)
    t.wait_event(event)
    with pytest.raises(dev.EmulatedRaceError):
        replay_on(b, t)


def test_replays_of_different_pools_may_overlap():
    (a, _), (b, _) = record(lambda: torch.zeros(1)), record(lambda: torch.zeros(1))
    replay_on(a, dev.Stream())
    replay_on(b, dev.Stream())


def test_side_stream_joins_the_capture():
    x, side, graph = torch.ones(2), dev.Stream(), dev.CUDAGraph()
    with capturing(graph):
        main = dev.current_stream()
        y = x + 1
        side.wait_stream(main)
        with dev.stream(side):
            assert dev.is_current_stream_capturing()
            z = y * 3
        main.wait_stream(side)
        with dev.stream(dev.Stream()):
            assert not dev.is_current_stream_capturing()
            assert (x + 5).tolist() == [6, 6], "work on a stream that didn't join is executed at once"
    with dev.stream(side):
        assert not dev.is_current_stream_capturing()
    assert graph.num_nodes == 2
    graph.replay()
    assert z.tolist() == [6, 6]


@pytest.mark.parametrize("late", [False, True])
def test_unjoined_side_stream_invalidates(late):
    side, graph = dev.Stream(), dev.CUDAGraph()
    with dev.stream(dev.Stream()) as _:
        graph.capture_begin()
        main = dev.current_stream()
        side.wait_stream(main)
        if late:
            main.wait_stream(side)
            third = dev.Stream()
            third.wait_stream(side)
        with pytest.raises(dev.EmulatedCaptureError, match="unjoined work"):
            graph.capture_end()
    assert not dev.random_usable()
    with pytest.raises(RuntimeError):
        graph.replay()


def test_current_stream_is_the_threads_own():
    stream, seen = dev.Stream(), []
    with dev.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(dev.current_stream()))
        thread.start()
        thread.join()
        assert dev.current_stream() is stream and stream.cuda_stream == stream.stream_id > 0
    assert seen == [dev.default_stream()] and dev.default_stream().cuda_stream == 0
    assert dev.current_stream() == dev.default_stream()


def test_events_time_on_request():
    first, second = dev.Event(enable_timing=True), dev.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        first.elapsed_time(second)
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0 and first.query()


def test_counters():
    graph, _ = record(lambda: torch.zeros(3) + 1)
    graph.replay()
    graph.replay()
    assert dev.stats() == dev.Stats(launches=4, replays=2, captures=1)
