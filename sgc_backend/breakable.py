"""BreakableCudaGraphBackend: a callable recorded without torch.compile, broken at functions that the user marked.

A recording is a list of segments, graphs and breaks in turn, each with replay().
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .below_autograd import prepare
from .breaker import Breaker
from .breaks import Observed, Observer, captured, watching
from .capture import Capture
from .config import check_bool
from .errors import StrictError
from .pool import GraphPool
from .reached import Reached
from .segments import Ambient, BreakSegment
from .shape_key import ShapeKey
from .static_output import StaticOutput
from .tree import flatten
from .wrapper import CudaGraphBackend, Forward


@dataclass(frozen=True)
class Recording:
    """Segments in order, the static output, the pool generation that they belong to, and what the callable reaches."""

    segments: tuple[Any, ...]
    out: Any
    pool: GraphPool
    generation: int
    ambient: Ambient
    reached: Reached
    key: ShapeKey

    def __post_init__(self) -> None:
        steps = [s.step() if isinstance(s, BreakSegment) else s.replay for s in self.segments]
        object.__setattr__(self, "steps", tuple(steps))  # bound once

    def graphs(self) -> list[Any]:
        """The graphs among the segments."""
        return [s for s in self.segments if not isinstance(s, BreakSegment)]


class BreakableCudaGraphBackend(CudaGraphBackend):
    """Records a callable in graph segments, with breaks run eagerly in between.

    Outputs lie in the pool and are valid until the next replay from it; copy what must live longer.

    Args:
        device_module, lane, name, check_addresses: see `CudaGraphBackend`.
        strict: raise where a callable breaks nowhere, and where a break's host value changes at replay.
        one_break: for debugging: run the whole callable as one break, eagerly, through the same replay path.
    """

    kind = "breakable"

    def __init__(
        self,
        device_module: Any = None,
        *,
        lane: str | None = None,
        name: str | None = None,
        check_addresses: bool = True,
        strict: bool = False,
        one_break: bool = False,
    ) -> None:
        for what, given in (("strict", strict), ("one_break", one_break)):
            check_bool(f"{self.kind if name is None else name}: {what}", given)  # before it is enrolled
        super().__init__(device_module, lane=lane, name=name, check_addresses=check_addresses)
        self.strict, self.one_break = strict, one_break

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "strict": self.strict, "one_break": self.one_break}

    def capture_one(
        self, key: ShapeKey | int, forward_fn: Forward, *, post_warmup_hook: Callable[[], None] | None = None
    ) -> Any:
        key = ShapeKey.of(key)
        pool = self._session_pool(key, forward_fn, post_warmup_hook)
        first = Observer()
        observer = Observer(first)
        for watcher in (first, observer):
            with watching(watcher):
                self._warm_up(pool, forward_fn, 1)
        if post_warmup_hook is not None:
            post_warmup_hook()
        with pool.lock:  # no other thread may be capturing meanwhile
            self.device.synchronize()  # warm-up work on side streams must not own memory that the capture reuses
        recording = None
        try:
            observed = observer.settled()
            prepare(seen.fn.body for seen in observed)  # type: ignore[attr-defined]
            recording = self._record(pool, key, forward_fn, observed, self)
            shadow = pool.shadow(self.name)
            if shadow is not None:
                self._record(shadow, key, forward_fn, observed, None)
            old = self._recordings.get(key.plain)
            self._recordings[key.plain] = recording
        except BaseException as error:
            if recording is not None:
                self._drop(recording)
            if isinstance(error, Exception):
                self.counters.failures[f"{type(error).__name__}: {error}"] += 1
            raise
        if old is not None:
            self._drop(old)
        self.counters.captured[key.plain] += 1
        return recording.out()

    def _record(
        self, pool: GraphPool, key: ShapeKey, forward_fn: Forward, observed: list[Observed], owner: Any
    ) -> Recording:
        if self.one_break:
            whole = _Whole(forward_fn)
            leaves, spec = flatten(None)
            segment = BreakSegment(
                "the whole callable",
                whole,
                ((), {}),
                None,
                spec,
                [None] * len(leaves),
                tuple(leaves),
                False,
            )
            return Recording(
                (segment,),
                whole.taken,
                pool,
                pool.generation,
                Ambient(self.device.type),
                self._reached(_nothing),
                key,
            )
        reached = self._reached(forward_fn)
        with Capture(pool, self.name, str(key), owner=owner) as capture:
            breaker = Breaker(capture, observed, self.strict)
            with watching(breaker), captured(f"{self.name}, key {key}", pool.contains):
                out = forward_fn()
            breaker.finish()
            # Still inside: what raises here (a warning may, too) drops the graphs.
            if not observed:
                text = (
                    f"{self.name}, key {key}: the callable broke nowhere; mark functions with eager_on_graph, or use "
                )
                text += "FullCudaGraphBackend"
                if self.strict:
                    raise StrictError(text)
                warnings.warn(text, stacklevel=3)
            self._settle(reached, f"{self.name}, key {key}")
            return Recording(
                tuple(breaker.segments),
                StaticOutput(pool, out),
                pool,
                pool.generation,
                breaker.shared_ambient(),
                reached,
                key,
            )

    def replay(self, key: ShapeKey | int) -> Any:
        recording = self.hold(key)
        try:
            self._check_in_place(recording)
            with watching(None):
                recording.pool.replay_held(partial(recording.ambient.run, recording.steps))
        finally:
            recording.pool.let_go()
            if recording.pool.doomed:
                recording.pool.settle()
        self.counters.replayed[recording.key.plain] += 1
        return recording.out()

    def release(self) -> None:
        recordings, self._recordings = self._recordings, {}
        for recording in recordings.values():
            self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        for graph in recording.graphs():
            recording.pool.drop(graph)


def _nothing() -> None:
    """What a callable reaches that runs at every replay."""


class _Whole:
    """The whole callable as the body of one break; keeps its result."""

    def __init__(self, fn: Forward) -> None:
        self.fn, self.result = fn, None

    def __call__(self) -> None:
        self.result = self.fn()

    def taken(self) -> Any:
        """The last run's result."""
        return self.result
