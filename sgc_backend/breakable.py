"""BreakableCudaGraphBackend: a callable recorded without torch.compile, broken at functions that the user marked.

A recording is a list of segments, graphs and breaks in turn, each with replay().
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .breaks import Observed, Observer, flatten, map_tensors, matched, results, tensors_of, unflatten, watching
from .capture import Capture, unowned_like, unowned_tree, with_bits
from .errors import CaptureError, NotCapturedError, ReplayError, StrictError
from .inputs import has_overlap
from .pool import GraphPool
from .shape_key import ShapeKey
from .walk import CutResult
from .wrapper import CudaGraphBackend, Forward


@dataclass
class BreakSegment:
    """One break, bound to what it gets and to where its results go.

    Attributes:
        name: what errors call it.
        fn: the body; called with ``args`` and ``kwargs``, whose tensors lie where the segments before left them.
        spec: structure that its result must have.
        landings: for each leaf a function that takes it, or None for host values.
        frozen: the host values among the leaves as they were captured.
        strict: refuse a host value that changed.
    """

    name: str
    fn: Callable[..., Any]
    args: Any
    kwargs: Any
    spec: Any
    landings: list[Callable[[Any], None] | None]
    frozen: tuple[Any, ...]
    strict: bool
    changed: bool = False

    def replay(self) -> None:
        """Call the body and put its results where the next segments read them.

        Raises:
            ReplayError: the result has another structure, shape or dtype than when it was captured.
            StrictError: strict, and a host value that was frozen changed.
            Exception: what the body raises.
        """
        with watching(None):
            leaves, spec = flatten(self.fn(*self.args, **self.kwargs))
        if spec != self.spec:
            raise ReplayError(f"break {self.name} returned {spec}, when it was captured it returned {self.spec}")
        for leaf, landing, frozen in zip(leaves, self.landings, self.frozen, strict=True):
            if landing is not None:
                landing(leaf)
            elif not self.changed and not _same(leaf, frozen):
                self._host_value_changed(leaf, frozen)

    def _host_value_changed(self, now: Any, then: Any) -> None:
        text = (
            f"break {self.name} returned the host value {now!r}; the recording goes on with {then!r}, as when it was "
            f"captured. Return a tensor, or record one variant for each value"
        )
        if self.strict:
            raise StrictError(text)
        self.changed = True  # said once
        warnings.warn(text, stacklevel=2)


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # whatever can't be compared is taken to be the object that it was
        return False


@dataclass(frozen=True)
class Recording:
    """Segments in order, the static output, and the pool generation that they belong to."""

    segments: tuple[Any, ...]
    out: Any
    pool: GraphPool
    generation: int

    def graphs(self) -> list[Any]:
        """The graphs among the segments."""
        return [s for s in self.segments if not isinstance(s, BreakSegment)]


class BreakableCudaGraphBackend(CudaGraphBackend):
    """Records a callable in graph segments, with breaks run eagerly in between.

    Outputs lie in the pool and are valid until the next replay from it; copy what must live longer.

    Args:
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
        strict: bool = False,
        one_break: bool = False,
    ) -> None:
        super().__init__(device_module, lane=lane, name=name)
        self.strict, self.one_break = strict, one_break
        self._recordings: dict[ShapeKey, Recording] = {}

    def capture_one(
        self, key: ShapeKey | int, forward_fn: Forward, *, post_warmup_hook: Callable[[], None] | None = None
    ) -> Any:
        key = ShapeKey.of(key)
        pool = self._session_pool(key, forward_fn, post_warmup_hook)
        self._warm_up(pool, forward_fn, 1)
        observer = Observer()
        with watching(observer):
            self._warm_up(pool, forward_fn, 1)
        if post_warmup_hook is not None:
            post_warmup_hook()
        self.device.synchronize()  # warm-up work on side streams must not own memory that the capture reuses
        try:
            recording = self._record(pool, key, forward_fn, observer.seen)
        except Exception as error:
            self.counters.failures[f"{type(error).__name__}: {error}"] += 1
            raise
        old = self._recordings.get(key)
        self._recordings[key] = recording
        if old is not None:
            self._drop(old)
        self.counters.captured[key] += 1
        return recording.out

    def _record(self, pool: GraphPool, key: ShapeKey, forward_fn: Forward, observed: list[Observed]) -> Recording:
        if self.one_break:
            whole = _Whole(forward_fn)
            leaves, spec = flatten(None)
            nowhere = [None] * len(leaves)
            segment = BreakSegment("the whole callable", whole, (), {}, spec, nowhere, tuple(leaves), False)
            return Recording((segment,), whole, pool, pool.generation)
        with Capture(pool, self.name, str(key), owner=self) as capture:
            breaker = _Breaker(capture, observed, self.strict)
            with watching(breaker):
                out = forward_fn()
            breaker.finish()
        if not observed:
            text = f"{self.name}, key {key}: the callable broke nowhere; mark functions with eager_on_graph, or use "
            text += "FullCudaGraphBackend"
            if self.strict:
                for graph in capture.graphs:
                    pool.drop(graph)
                raise StrictError(text)
            warnings.warn(text, stacklevel=4)
        return Recording(tuple(breaker.segments), unowned_tree(pool, out), pool, pool.generation)

    def can_run(self, key: ShapeKey | int) -> bool:
        return ShapeKey.of(key) in self._recordings

    def replay(self, key: ShapeKey | int) -> Any:
        key = ShapeKey.of(key)
        recording = self._recordings.get(key)
        if recording is None:
            have = ", ".join(map(str, self._recordings)) or "none"
            raise NotCapturedError(
                f"{self.name}: nothing is recorded under key {key}; recorded: {have}. Use can_run() to ask first"
            )
        pool = recording.pool
        pool.replay_begin(recording.generation)
        try:
            for segment in recording.segments:
                segment.replay()
        finally:
            pool.replay_end()
        self.counters.replayed[key] += 1
        return recording.out.result if isinstance(recording.out, _Whole) else recording.out

    def release(self) -> None:
        recordings, self._recordings = self._recordings, {}
        for recording in recordings.values():
            self._drop(recording)

    def _drop(self, recording: Recording) -> None:
        for graph in recording.graphs():
            recording.pool.drop(graph)


class _Whole:
    """The whole callable as the body of one break; keeps its result."""

    def __init__(self, fn: Forward) -> None:
        self.fn, self.result = fn, None

    def __call__(self) -> None:
        with torch.no_grad():
            self.result = self.fn()


class _Breaker:
    """Splits a capture at the breaks that it meets."""

    def __init__(self, capture: Capture, observed: list[Observed], strict: bool) -> None:
        self.capture, self.observed, self.strict = capture, observed, strict
        self.pool = capture.pool
        self.segments: list[Any] = []
        self.breaks = 0
        self._begin()

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = f"{self.capture.name}, key {self.capture.key}"
        seen = matched(self.observed, self.breaks, fn, what)
        self._end()
        self.breaks += 1
        name = f"{self.breaks - 1} ({getattr(fn, '__qualname__', fn)})"
        given = tensors_of((args, kwargs))
        leaves: list[Any] = list(seen.leaves)
        landings: list[Any] = [None] * len(leaves)
        for k, result in results(seen):
            leaves[k], landings[k] = self._result(result, given, leaves, name)
        # A break's arguments stay where they are while the segments before it are replayed: what lies in the pool has
        # just been written when it runs, and is not held; what lies elsewhere is the caller's, and is.
        inside = self.pool.contains()
        args, kwargs = map_tensors(lambda t: unowned_like(self.pool.device, t) if inside(t) else t, (args, kwargs))
        segment = BreakSegment(name, fn.body, args, kwargs, seen.spec, landings, seen.leaves, self.strict)  # type: ignore[attr-defined]
        self.segments.append(segment)
        self._begin()
        return unflatten(leaves, seen.spec)

    def finish(self) -> None:
        """End the last segment.

        Raises:
            CaptureError: breaks of the warm-up run did not come.
        """
        self._end()
        if self.breaks != len(self.observed):
            raise CaptureError(
                f"{self.capture.name}, key {self.capture.key}: {self.breaks} breaks were captured, the warm-up run had "
                f"{len(self.observed)}; the callable must break at the same places every time"
            )

    def _begin(self) -> None:
        self.capture.begin(f"segment {len(self.segments)}")

    def _end(self) -> None:
        graph = self.capture.end(drop_empty=True)
        if graph is not None:
            self.segments.append(graph)

    def _result(
        self, seen: CutResult, given: list[torch.Tensor], leaves: list[Any], name: str
    ) -> tuple[torch.Tensor, Callable[[Any], None]]:
        """A tensor that stands for a result while the capture goes on, and what to do with the real one at replay."""
        device = self.pool.device
        if seen.size is None:
            raise CaptureError(f"break {name} returns a tensor that is not strided; return a dense one")
        if seen.alias is not None:
            base = given[seen.alias[0]]
            if _is_whole(base, seen):
                pointer = base.data_ptr()
                return base, lambda value: _expect(value, pointer, name)
            at = base.data_ptr() + seen.alias[1]
            view = with_bits(device.unowned(at, seen.size, seen.stride, seen.dtype), *seen.bits)
            view_pointer = view.data_ptr()
            return view, lambda value: _expect(value, view_pointer, name)
        stride = seen.stride
        if has_overlap(seen.size, stride) or 0 in stride:
            stride = torch.empty(seen.size, device="meta").stride()
        with self.pool.allocating(), torch.inference_mode(False):
            buffer = torch.empty_strided(seen.size, stride, dtype=seen.dtype, device=device.torch_device)
        landing = unowned_like(device, buffer)
        return buffer, lambda value: _land(value, landing, name)


def _is_whole(base: torch.Tensor, seen: CutResult) -> bool:
    return seen.alias[1] == 0 and tuple(base.size()) == seen.size and tuple(base.stride()) == seen.stride


def _expect(value: Any, pointer: int, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.data_ptr() != pointer:
        raise ReplayError(
            f"break {name} returned a view of its argument when it was captured and does not any more; return the same "
            f"kind of result every time"
        )


def _land(value: Any, buffer: torch.Tensor, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
        got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ReplayError(
            f"break {name} returned {got}, when it was captured it returned {tuple(buffer.shape)} {buffer.dtype}"
        )
    buffer.copy_(value)
