"""FullCudaGraphBackend: a whole callable as one graph per shape key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .capture import record
from .pool import GraphPool
from .reached import Reached
from .shape_key import ShapeKey
from .static_output import StaticOutput
from .wrapper import CudaGraphBackend, Forward

WARM_UP_RUNS = 2  # the first run compiles and autotunes, the second shows what settled


@dataclass(frozen=True)
class Recording:
    """One graph, its static output, the pool generation that it belongs to, and what its callable reaches."""

    graph: Any
    out: StaticOutput
    pool: GraphPool
    generation: int
    reached: Reached
    key: ShapeKey


class FullCudaGraphBackend(CudaGraphBackend):
    """Records a callable whole, for decode steps. The arguments are those of `CudaGraphBackend`.

    Outputs lie in the pool and are valid until the next replay from it; copy what must live longer.
    """

    kind = "full"

    def capture_one(
        self, key: ShapeKey | int, forward_fn: Forward, *, post_warmup_hook: Callable[[], None] | None = None
    ) -> Any:
        key = ShapeKey.of(key)
        pool = self._session_pool(key, forward_fn, post_warmup_hook)
        self._warm_up(pool, forward_fn, WARM_UP_RUNS)
        if post_warmup_hook is not None:
            post_warmup_hook()
        with pool.lock:  # no other thread may be capturing meanwhile
            self.device.synchronize()  # warm-up work on side streams must not own memory that the capture reuses
        reached = self._reached(forward_fn)
        graph = None
        try:
            graph, out = record(pool, forward_fn, self.name, str(key), owner=self)
            shadow = pool.shadow(self.name)
            if shadow is not None:
                record(shadow, forward_fn, self.name, str(key))
            self._settle(reached, f"{self.name}, key {key}")
            recording = Recording(graph, StaticOutput(pool, out), pool, pool.generation, reached, key)
            old = self._recordings.get(key.plain)
            self._recordings[key.plain] = recording
        except BaseException as error:
            if graph is not None:
                pool.drop(graph)
            if isinstance(error, Exception):
                self.counters.failures[f"{type(error).__name__}: {error}"] += 1
            raise
        if old is not None:
            old.pool.drop(old.graph)
        self.counters.captured[key.plain] += 1
        return recording.out()

    def replay(self, key: ShapeKey | int) -> Any:
        recording = self.hold(key)
        try:
            self.replay_held(recording)
        finally:
            recording.pool.let_go()
            if recording.pool.doomed:
                recording.pool.settle()
        return recording.out()

    def replay_held(self, recording: Recording) -> StaticOutput:
        reached = recording.reached
        if reached.looks or reached.lost:
            self._check_in_place(recording)
        recording.pool.replay_held(recording.graph.replay)
        self.counters.replayed[recording.key.plain] += 1
        return recording.out

    def graph(self, key: ShapeKey | int) -> Any:
        """The device's graph under ``key``, for tools; replaying it by hand goes around the replay guard.

        Raises:
            NotCapturedError: nothing is recorded under ``key``.
        """
        return self._found(ShapeKey.of(key)).graph

    def release(self) -> None:
        recordings, self._recordings = self._recordings, {}
        for recording in recordings.values():
            recording.pool.drop(recording.graph)
