"""Reported cases: threads, and several models at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import (
    device,
    module,
    usable,
)
from test_reports import captured, in_threads

from sgc_backend import FullCudaGraphBackend, emulated

__all__ = ["only_graphs_of_this_test"]


# TH01
@device
@pytest.mark.parametrize("locked", [True, False])
def test_worker_threads_each_get_their_own_result(locked: bool, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model)
    lock = threading.Lock() if locked else contextlib.nullcontext()

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for k in range(20):
                x = torch.randn(4 + 2 * (k % 2), D, generator=generator).to(device)
                with lock:
                    got = call(x)
                same(got, model(x))

    with torch.no_grad():
        call(torch.randn(4, D, device=device))
    in_threads([lambda seed=seed: work(seed) for seed in range(8)])
    in_threads([lambda: work(8)])  # the old ones are dead
    assert total("replayed") > 150


# TH03
@device
def test_work_of_another_thread_neither_breaks_a_capture_nor_is_broken(device: str) -> None:
    where = module(device)
    stop = threading.Event()
    rounds: list[int] = []

    def background() -> None:
        stream = where.Stream()
        with where.stream(stream):
            while not stop.is_set():
                host = torch.full((1024,), float(len(rounds)))
                if device == "cuda":
                    host = host.pin_memory()
                there = host.to(device, non_blocking=True)
                junk = torch.empty(1 << 16, device=device)
                event = where.Event()
                event.record()
                while not event.query():
                    pass
                assert (there == float(len(rounds))).all()
                del junk
                rounds.append(1)

    def foreground() -> None:
        try:
            while not rounds:
                pass
            x = torch.randn(64, D, device=device)
            layers = [lin().to(device) for _ in range(3)]
            with torch.no_grad():
                for k in range(30):
                    layer, n = layers[k % 3], 4 + 2 * k
                    backend = captured(device, lambda layer=layer, n=n: layer(x[:n]).relu(), n)
                    same(backend.replay(n), layer(x[:n]).relu())
                    assert not backend.counters.failures
                    backend.cleanup()
        finally:
            stop.set()

    in_threads([background, foreground])
    assert rounds


# TH05
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_a_replay_is_ordered_with_the_callers_stream(kind: str, device: str) -> None:
    where = module(device)
    model = Model(lambda m, x: ops.double(m.a(x)) if kind == "compiled" else m.a(x), a=lin()).to(device)
    x = torch.zeros(4, D, device=device)
    if kind == "whole":
        backend = captured(device, lambda: model(x))
        f = lambda x: backend.replay(4)  # noqa: E731
    else:
        f = compiled(model, dynamic=False)
    with torch.no_grad():
        expected = [model(torch.full((4, D), float(i), device=device)) + 1 for i in range(100)]
        for _ in range(3):
            f(x)
        where.synchronize()
        streams = [where.Stream() for _ in range(2)]
        got = []
        for i in range(100):
            stream, other = streams[i % 2], streams[(i + 1) % 2]
            stream.wait_stream(other)
            with where.stream(stream):
                if device == "cuda":
                    torch.cuda._sleep(200_000)
                x.fill_(i)
                got.append(f(x) + 1)
        where.synchronize()
        for mine, wanted in zip(got, expected, strict=True):
            same(mine, wanted)
    if kind == "whole":
        backend.cleanup()


def long_kernels(device: str, scale: float) -> Callable[[], torch.Tensor]:
    """A callable that keeps a device busy for long enough that two of them overlap, where nothing orders them."""
    n = 1024 if device == "cuda" else 16
    x = torch.randn(n, n, device=device)

    def chain() -> torch.Tensor:
        h = x
        for _ in range(12 if device == "cuda" else 4):
            h = (h @ x) * scale
            h = h / h.abs().amax()
        return h

    return chain


def pairs_of_replays(device: str, threads: int, pairs: int, guarded: bool) -> int:
    """How many of ``pairs`` pairs of replays, of two models from one pool, were wrong; a stream for each thread."""
    where = module(device)
    backend = FullCudaGraphBackend(where)
    chains = [long_kernels(device, scale) for scale in (1.0, -1.0)]
    with torch.no_grad(), backend.capture_session():
        views = [backend.capture_one(key + 1, chain) for key, chain in enumerate(chains)]
    expected = []
    for key in (1, 2):
        expected.append(backend.replay(key).clone())
        where.synchronize()
    wrong: list[torch.Tensor] = []
    barrier = threading.Barrier(threads)

    def replay(key: int) -> torch.Tensor:
        if guarded:
            with backend.replay_session():
                return backend.replay(key) != expected[key - 1]
        backend.graph(key).replay()
        return views[key - 1] != expected[key - 1]

    def work(number: int) -> None:
        stream = where.Stream()
        try:
            with where.stream(stream):
                barrier.wait(60)
                bad = torch.zeros((), dtype=torch.int64, device=device)
                for _ in range(pairs // threads):
                    # half of the threads in the other order
                    first = replay(1 + number % 2).any()
                    bad += first | replay(2 - number % 2).any()
                wrong.append(bad)
            if device == "cuda":
                stream.synchronize()
        except BaseException:
            barrier.abort()
            raise

    try:
        in_threads([lambda k=k: work(k) for k in range(threads)])
    finally:
        where.synchronize()
        backend.cleanup()
    assert len(wrong) == threads
    return sum(int(w) for w in wrong)


# TH06
@device
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_a_thousand_pairs_of_replays_from_threads_on_their_own_streams_are_right(threads: int, device: str) -> None:
    assert pairs_of_replays(device, threads, 1000, guarded=True) == 0


# TH06
@device
def test_without_the_guard_the_same_replays_are_wrong(device: str) -> None:
    if device == "cpu":
        with pytest.raises((emulated.EmulatedRaceError, threading.BrokenBarrierError)) as raised:
            pairs_of_replays(device, 2, 1000, guarded=False)
        assert raised.type is emulated.EmulatedRaceError
    else:  # whether two of them meet is up to the machine
        assert any(pairs_of_replays(device, 2, pairs, guarded=False) > 0 for pairs in (200, *[1000] * 9))


# TH06
@device
@pytest.mark.parametrize("threads", [2, 8])
def test_two_compiled_models_called_from_threads_on_their_own_streams_are_right(threads: int, device: str) -> None:
    where = module(device)
    first, second = lin().to(device), lin().to(device)
    # Two functions, not two instances of one class: Dynamo moves what it finds under one code object to the front
    # while other threads search there, miss, and compile once more (plain torch does, too).
    models = [lambda x: second(ops.double(first(x))), lambda x: ops.double(first(x).relu()) + x]
    calls = [compiled(model, dynamic=False) for model in models]
    x = torch.randn(16, D, device=device)
    with torch.no_grad():
        for call in calls * 3:
            call(x)
    where.synchronize()

    def work(number: int) -> None:
        stream = where.Stream()
        with where.stream(stream), torch.no_grad():
            bad = torch.zeros((), dtype=torch.int64, device=device)
            mine = torch.randn(16, D, device=device)
            expected = [model(mine) for model in models]
            for _ in range((1000 if device == "cuda" else 200) // threads):
                for call, wanted in zip(calls, expected, strict=True):
                    bad += (call(mine) != wanted).any()
            assert int(bad) == 0

    before = total("replayed")
    in_threads([lambda k=k: work(k) for k in range(threads)])
    assert total("replayed") - before == 2 * ((1000 if device == "cuda" else 200) // threads) * threads


# TH06
@device
def test_captures_begun_at_the_same_time_wait_for_each_other(device: str) -> None:
    x = torch.randn(32, D, device=device)
    layers = [lin().to(device) for _ in range(6)]
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        layer = layers[number]
        barrier.wait(60)
        with torch.no_grad():
            for n in (32, 16, 8):
                backend = captured(device, lambda n=n: layer(x[:n]) + torch.rand_like(x[:n]) * 0, n)
                with backend.replay_session():
                    same(backend.replay(n), layer(x[:n]))
                assert not backend.counters.failures
                backend.cleanup()

    in_threads([lambda k=k: work(k) for k in range(6)])
    usable(device)
