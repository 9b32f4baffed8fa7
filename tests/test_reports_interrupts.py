"""What went wrong in public for others who capture graphs: Ctrl-C, reset(), and errors where none is expected."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import CUTS, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same
from test_reports import a_clean_model_works, in_threads

import sgc_backend
from sgc_backend import (
    ROWS,
    BreakableCudaGraphBackend,
    DecodeRunner,
    FullCudaGraphBackend,
    InputSpec,
    TcPiecewiseCudaGraphBackend,
    eager_on_graph,
)
from sgc_backend.devices import device_of
from sgc_backend.pools import pool_of, pools

__all__ = ["only_graphs_of_this_test"]

PACKAGE = os.path.dirname(sgc_backend.__file__)
X = torch.arange(8.0)


@eager_on_graph
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def interrupted(run: Callable[[], Any], at: int) -> bool:
    """Run with a KeyboardInterrupt at the ``at``-th place in the package where Python looks for one: as it enters a
    function of ours, or behind a call of C. Whether there are so many."""
    seen = 0

    def look(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        if event not in ("call", "c_return") or os.path.dirname(frame.f_code.co_filename) != PACKAGE:
            return
        if getattr(arg, "__name__", None) == "acquire":  # Python itself can't close the gap behind it
            return
        seen += 1
        if seen == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run()
    finally:
        sys.setprofile(None)
    return seen >= at


def free_for_others() -> bool:
    """Whether another thread gets each pool, and none is in a capture, a replay or a session."""
    got: list[bool] = []

    def take() -> None:
        for pool in pools():
            got.append(pool.lock.acquire(timeout=5))
            if got[-1]:
                pool.lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return all(got) and not any(pool._capturing or pool.replaying or pool.session_depth for pool in pools())


def _full() -> tuple[Callable[[], Any], Any]:
    backend = FullCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: X * 2)
    return lambda: backend.replay(8), X * 2


def _breakable() -> tuple[Callable[[], Any], Any]:
    backend = BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: tripled(X * 2) + 1)
    return lambda: backend.replay(8), X * 6 + 1


def _piecewise() -> tuple[Callable[[], Any], Any]:
    model, x = Model(lambda m, x: ops.double(m.a(x)) + 1, a=lin()), torch.randn(9, 16)
    backend = TcPiecewiseCudaGraphBackend(model, capture_sizes=[8], options={"inner": "eager", "cut_ops": CUTS})
    with backend.capture_session():
        backend._run_compile_pass(lambda n: (x[:n],))
    with torch.no_grad():
        return lambda: backend.replay(8), model(x[:8])


def _runner() -> tuple[Callable[[], Any], Any]:
    runner = DecodeRunner(lambda x: x * 2, [InputSpec("x", (ROWS,), torch.float32)], sizes=[4, 8])
    runner.capture()
    return lambda: runner(x=X[:7]), X[:7] * 2


@pytest.mark.parametrize("make", [_full, _breakable, _piecewise, _runner])
def test_an_interrupt_anywhere_in_a_replay_leaves_the_pool_to_others(make: Any) -> None:
    run, expected = make()
    at = 1
    while interrupted(run, at):
        assert free_for_others(), at
        assert torch.is_grad_enabled(), at
        assert torch.equal(run(), expected), at
        at += 1
    assert at > 10


class InterruptedExit:
    """A lock whose release in a ``with`` is interrupted, once."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.left = lock, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)
        if self.left:
            self.left = 0
            raise KeyboardInterrupt


def test_an_interrupt_as_a_session_opens_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FullCudaGraphBackend()
    pool = pool_of(backend.device)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "lock", InterruptedExit(pool.lock))
        with backend.capture_session():
            pass
    assert free_for_others()
    sgc_backend.reset()  # it refuses inside a session


@contextlib.contextmanager
def failing(owner: Any, name: str, error: type[BaseException], *, behind: bool, at: int = 1) -> Iterator[None]:
    """While open, the ``at``-th call of a method raises, in front of what it does or behind that."""
    real, seen = getattr(owner, name), 0

    def call(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == at and not behind:
            raise error("injected")
        out = real(*args)
        if seen == at:
            raise error("injected")
        return out

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def _recorded(kind: str) -> None:
    backend = FullCudaGraphBackend() if kind == "full" else BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: tripled(X * 2) + 1)


@pytest.mark.parametrize("kind", ["full", "breakable"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("step", ["capture_begin", "capture_end", "fill_if_empty"])
def test_an_interrupt_around_the_begin_or_end_of_a_capture_leaves_none_open(step: str, behind: bool, kind: str) -> None:
    pool = pool_of(device_of(sgc_backend.emulated))
    device = pool.device
    reserved = pool.reserved_bytes()
    with pytest.raises(KeyboardInterrupt), failing(pool.device, step, KeyboardInterrupt, behind=behind):
        _recorded(kind)
    assert free_for_others()
    with device.use_stream(pool.stream):
        assert not device.is_capturing()
    assert pool.reserved_bytes() <= reserved
    a_clean_model_works("cpu")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["spans", "allocator_bytes", "free_bytes"])
def test_a_look_at_memory_that_fails_as_a_capture_begins_leaves_the_pool_usable(
    step: str, error: type[BaseException]
) -> None:
    pool = pool_of(device_of(sgc_backend.emulated))
    owner = pool if step == "spans" else pool.device
    with pytest.raises(error, match="injected") as caught, failing(owner, step, error, behind=False):
        _recorded("full")
    assert free_for_others()
    assert pool.device.current_stream() != pool.stream
    del caught  # it kept the frames of the capture until now
    a_clean_model_works("cpu")


# -- reset() while others call -----------------------------------------------------------------------------------------


def test_a_recording_that_reset_came_too_early_for_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(lambda m, x: ops.double(m.a(x)) + 1, a=lin()), torch.randn(5, 16)
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            same(call(x), model(x))
        (graph,) = graphs()
        with monkeypatch.context() as patch:
            patch.setattr(graph, "release", lambda: None)  # as where another thread records between this and the rest
            sgc_backend.reset()
        for _ in range(3):
            same(call(x), model(x))
    assert sum(graph.counters.captured.values()) == 2
    assert not graph.counters.failures


def test_a_recording_is_let_go_of_without_waiting_for_a_replay_of_another_thread() -> None:
    model, x = Model(lambda m, x: m.a(x) + 1, a=lin()), torch.randn(5, 16)
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            call(x)
    pool = pool_of(device_of(sgc_backend.emulated))
    (plans,) = graphs()[0].plans.values()
    other = threading.Thread(target=lambda: [plan.release() for plan in plans], daemon=True)
    with pool.lock:
        other.start()
        other.join(10)
        assert not other.is_alive()
        assert pool.doomed
    pool.settle()
    assert not pool.doomed
    with torch.no_grad():
        same(call(x), model(x))


def test_compiled_models_are_called_while_another_thread_resets() -> None:
    model, x = Model(lambda m, x: m.a(x) + 1, a=lin()), torch.randn(100, 16)
    call = compiled(model)
    done = threading.Event()

    def calls(seed: int) -> None:
        sizes = itertools.cycle((100, 100, 30 + seed, 30 + seed, 60))
        with torch.no_grad():
            while not done.is_set():
                n = next(sizes)
                same(call(x[:n]), model(x[:n]))

    def resets() -> None:
        try:
            for _ in range(30):
                sgc_backend.reset()
        finally:
            done.set()

    with torch.no_grad():
        call(x)
        call(x[:50])
    in_threads([lambda: calls(0), lambda: calls(1), resets])
    with torch.no_grad():
        same(call(x), model(x))
