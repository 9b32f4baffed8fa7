"""BreakableCudaGraphBackend: a callable recorded without torch.compile, broken at functions that the user marked.

A recording is a list of segments, graphs and breaks in turn, each with replay().
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .breaks import External, Observed, Observer, matched, watching
from .capture import Capture, StaticOutput, unowned_like, with_bits
from .errors import CaptureError, ReplayError, StrictError
from .inputs import has_overlap, span_bytes
from .pool import GraphPool
from .reached import Reached
from .shape_key import ShapeKey
from .tree import flatten, hidden_tensors, tensors_of, unflatten
from .walk import CutResult
from .wrapper import CudaGraphBackend, Forward


@dataclass
class BreakSegment:
    """One break, bound to what it gets and to where its results go.

    Attributes:
        name: what errors call it.
        fn: the body.
        given: its (args, kwargs), or what makes them: tensors of the pool lie where the segments before left them; what
            holds none of those is the caller's own object, as it is at replay.
        ambient: the modes that were on around it, where they differ from the recording's.
        spec: structure that its result must have.
        landings: for each leaf a function that takes it, or None for host values.
        frozen: the host values among the leaves as they were captured.
        strict: refuse a host value that changed.
    """

    name: str
    fn: Callable[..., Any]
    given: Callable[[], tuple[Any, Any]] | tuple[Any, Any]
    ambient: Ambient | None
    spec: Any
    landings: list[Callable[[Any], None] | None]
    frozen: tuple[Any, ...]
    strict: bool
    changed: bool = False

    def __post_init__(self) -> None:
        self.plain = self.spec.is_leaf()  # the result is no container
        self.silent = self.plain and self.landings == [None] and self.frozen == (None,)  # it is None

    def replay(self) -> None:
        """Call the body and put its results where the next segments read them.

        Raises:
            ReplayError: the result has another structure, shape or dtype than when it was captured.
            StrictError: strict, and a host value that was frozen changed.
            Exception: what the body raises.
        """
        given = self.given
        args, kwargs = given() if callable(given) else given
        if self.ambient is None:
            result = self.fn(*args, **kwargs)
        else:
            with self.ambient.entered():
                result = self.fn(*args, **kwargs)
        if torch.is_grad_enabled():  # the body switched it on
            torch.set_grad_enabled(False)
        if result is not None or not self.silent:
            self._take(result)

    def _take(self, result: Any) -> None:
        if self.plain and (result is None or type(result) is torch.Tensor):
            leaves: Sequence[Any] = (result,)
        else:
            leaves, spec = flatten(result)
            if spec != self.spec:
                raise ReplayError(f"break {self.name} returned {spec}, when it was captured it returned {self.spec}")
        for leaf, landing, frozen in zip(leaves, self.landings, self.frozen, strict=True):
            if landing is not None:
                landing(leaf)
            elif not self.changed and not _same(leaf, frozen):
                self._host_value_changed(leaf, frozen)

    def _host_value_changed(self, now: Any, then: Any) -> None:
        text = (
            f"break {self.name} returned the host value {now!r:.200}; the recording goes on with {then!r:.200}, as "
            f"when it was captured. Return a tensor, or record one variant for each value"
        )
        if self.strict:
            raise StrictError(text)
        self.changed = True  # said once
        warnings.warn(text, stacklevel=2)


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b) or (a != a and b != b)  # NaN is not equal to itself
    except Exception:  # whatever can't be compared is taken to be the object that it was
        return False


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
        object.__setattr__(self, "steps", tuple(segment.replay for segment in self.segments))  # bound once

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
        self.device.synchronize()  # warm-up work on side streams must not own memory that the capture reuses
        recording = None
        try:
            observed = observer.settled()
            recording = self._record(pool, key, forward_fn, observed, self)
            shadow = pool.shadow(self.name)
            if shadow is not None:
                self._record(shadow, key, forward_fn, observed, None)
            old = self._recordings.get(key)
            self._recordings[key] = recording
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
            breaker = _Breaker(capture, observed, self.strict)
            with watching(breaker):
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
                warnings.warn(text, stacklevel=4)
            reached.settle()
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
        recording = self._replay_begin(key)
        try:
            self._check_in_place(recording)
            with watching(None):
                recording.ambient.run(recording.steps)
        finally:
            recording.pool.replay_end()
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


class _Breaker:
    """Splits a capture at the breaks that it meets."""

    def __init__(self, capture: Capture, observed: list[Observed], strict: bool) -> None:
        self.capture, self.observed, self.strict = capture, observed, strict
        self.pool = capture.pool
        self.segments: list[Any] = []
        self.breaks = 0
        self.error: BaseException | None = None
        self._begin()

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._break(fn, args, kwargs)
        except BaseException as error:
            self.error = error  # the callable may swallow it, but the recording is broken
            raise

    def _break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.error is not None:
            raise self.error
        what = f"{self.capture.name}, key {self.capture.key}"
        name = f"{self.breaks} ({getattr(fn, '__qualname__', fn)})"
        if self.pool.device.current_stream() != self.pool.stream:
            raise CaptureError(f"{what}: break {name} is on another stream than the capture; join that one first")
        given = tensors_of((args, kwargs))
        seen = matched(self.observed, self.breaks, fn, len(given), what)
        self._end()
        self.breaks += 1
        tensors, landings = self._results(seen, given, name)
        leaves = [tensors.get(k, leaf) for k, leaf in enumerate(seen.leaves)]
        segment = BreakSegment(
            name,
            fn.body,  # type: ignore[attr-defined]
            self._bound(args, kwargs, name),
            Ambient(self.pool.device.type),
            seen.spec,
            [landings.get(k) for k in range(len(leaves))],
            seen.leaves,
            self.strict,
        )
        self.segments.append(segment)
        self._begin()
        return unflatten(leaves, seen.spec)

    def shared_ambient(self) -> Ambient:
        """The modes to replay under: the first break's. Breaks under the same ones need not switch."""
        breaks = [s for s in self.segments if isinstance(s, BreakSegment)]
        shared = breaks[0].ambient if breaks else None
        if shared is None:
            return Ambient(self.pool.device.type)
        for segment in breaks:
            if segment.ambient == shared:
                segment.ambient = None
        return shared

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Callable[[], tuple[Any, Any]] | tuple[Any, Any]:
        """A break's arguments at replay, or what makes them where a container must be new each time.

        What lies in the pool has just been written when the break runs, so it is not held; what lies elsewhere is the
        caller's, and is.

        Raises:
            CaptureError: an argument hides tensors of the pool in an object that is no pytree.
        """
        inside = self.pool.contains()

        containers = False

        def binder(value: Any) -> Callable[[], Any]:
            nonlocal containers
            leaves, spec = flatten(value)
            for leaf in leaves:
                if any(inside(t) for t in hidden_tensors(leaf)):
                    raise CaptureError(
                        f"{self.capture.name}, key {self.capture.key}: break {name} is given a "
                        f"{type(leaf).__name__}, whose tensors can't be followed, and one of them was made by the "
                        f"segments before: a replay would find whatever was put there last. Pass the tensor itself, "
                        f"or a dataclass, or register the class with torch.utils._pytree"
                    )
            if not any(isinstance(v, torch.Tensor) and inside(v) for v in leaves):
                return lambda: value
            leaves = [
                unowned_like(self.pool.device, v) if isinstance(v, torch.Tensor) and inside(v) else v for v in leaves
            ]
            if spec.is_leaf():
                return lambda: leaves[0]
            containers = True
            return lambda: unflatten(list(leaves), spec)

        positional = [binder(v) for v in args]
        named = {k: binder(v) for k, v in kwargs.items()}
        if not containers:
            return tuple(make() for make in positional), {k: make() for k, make in named.items()}
        return lambda: ([make() for make in positional], {k: make() for k, make in named.items()})

    def finish(self) -> None:
        """End the last segment.

        Raises:
            CaptureError: breaks of the warm-up run did not come.
            BaseException: what a break raised and the callable swallowed.
        """
        if self.error is not None:
            raise self.error
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

    def _results(
        self, seen: Observed, given: list[torch.Tensor], name: str
    ) -> tuple[dict[int, torch.Tensor], dict[int, Callable[[Any], None]]]:
        """By leaf: tensors that stand for the results while the capture goes on, and what to do with the real ones."""
        positions = [k for k, leaf in enumerate(seen.leaves) if isinstance(leaf, (CutResult, External))]
        tensors: dict[int, torch.Tensor] = {}
        landings: dict[int, Callable[[Any], None]] = {}
        buffers = self._buffers([seen.leaves[k] for k in positions], name)
        for index, k in enumerate(positions):
            leaf = seen.leaves[k]
            if isinstance(leaf, External):
                tensors[k] = leaf.tensor
            elif leaf.alias is not None:
                tensors[k] = _view(given[leaf.alias[0]], leaf.alias[1], leaf)
            else:
                tensors[k] = buffers[index]
                landings[k] = _lander(unowned_like(self.pool.device, buffers[index]), name)
                continue
            kept = "memory that it keeps" if isinstance(leaf, External) else "a view of its argument"
            landings[k] = _expecter(tensors[k], name, kept)
        return tensors, landings

    def _buffers(self, leaves: list[Any], name: str) -> dict[int, torch.Tensor]:
        """Stable memory for fresh results: those over one storage lie in one buffer, as they did."""
        families: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, External) or leaf.alias is not None:
                continue
            if leaf.size is None:
                raise CaptureError(f"break {name} returns a tensor that is not strided; return a dense one")
            families.setdefault(leaf.sibling[0] if leaf.sibling else index, []).append(index)
        made: dict[int, torch.Tensor] = {}
        for members in families.values():
            if len(members) == 1:
                (index,) = members
                seen = leaves[index]
                stride = seen.stride
                if has_overlap(seen.size, stride) or 0 in stride:
                    stride = torch.empty(seen.size, device="meta").stride()
                made[index] = self._allocate(seen.size, stride, seen.dtype)
                continue
            offsets = {i: leaves[i].sibling[1] if leaves[i].sibling else 0 for i in members}
            start = min(offsets.values())
            end = max(offsets[i] + span_bytes(leaves[i].size, leaves[i].stride, leaves[i].dtype) for i in members)
            whole = self._allocate((end - start,), (1,), torch.uint8)
            for index in members:
                same = [i for i in members if i in made and offsets[i] == offsets[index] and leaves[i] == leaves[index]]
                made[index] = made[same[0]] if same else _view(whole, offsets[index] - start, leaves[index])
        return made

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with self.pool.allocating(), torch.inference_mode(False):
            return torch.empty_strided(size, stride, dtype=dtype, device=self.pool.device.torch_device)


def _view(base: torch.Tensor, offset: int, seen: CutResult) -> torch.Tensor:
    """The view of ``base`` at a byte offset that ``seen`` describes; ``base`` itself where it is just that."""
    bits = (base.is_conj(), base.is_neg())
    like = (tuple(base.size()), tuple(base.stride()), base.dtype, bits)
    if offset == 0 and like == (seen.size, seen.stride, seen.dtype, seen.bits):
        return base
    at = base.storage_offset() * base.element_size() + offset
    # Over the same storage, so that the view keeps the memory from being used again while it lives.
    view = torch.empty(0, dtype=seen.dtype, device=base.device)
    view = view.set_(base.untyped_storage(), at // seen.dtype.itemsize, seen.size, seen.stride)
    return with_bits(view, *seen.bits)


def _expecter(expected: torch.Tensor, name: str, what: str) -> Callable[[Any], None]:
    """A check that a result, which was ``what``, lies where it lay, read in the same way."""
    like = _likeness(expected)

    def expect(value: Any) -> None:
        if not isinstance(value, torch.Tensor) or _likeness(value) != like:
            raise ReplayError(
                f"break {name} returned {what} when it was captured and does not any more, or another part of it; "
                f"return the same every time, or a copy (.clone())"
            )

    return expect


def _likeness(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.size(), t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _lander(buffer: torch.Tensor, name: str) -> Callable[[Any], None]:
    """Copies a result to where the next segments read it."""

    def land(value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ReplayError(
                f"break {name} returned {got}, when it was captured it returned {tuple(buffer.shape)} {buffer.dtype}"
            )
        buffer.copy_(value)

    return land


class Ambient:
    """The modes around breaks when they were captured; entered where the replay's caller has others."""

    def __init__(self, device_type: str) -> None:
        self._types = sorted({device_type, "cpu"})
        self._modes = self._now()

    def _now(self) -> tuple[Any, ...]:
        autocast = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self._types]
        # Which dtype an autocast that is off would use is no matter.
        return torch.is_inference_mode_enabled(), *((on, dtype if on else None) for on, dtype in autocast)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ambient) and self._modes == other._modes

    __hash__ = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have these modes on, and no gradients, as in the capture."""
        inference, *autocast = self._modes
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            for kind, (enabled, dtype) in zip(self._types, autocast, strict=True):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.no_grad())
            yield

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run ``steps`` under these modes; where they are on already, at the price of a comparison."""
        if self._now() != self._modes:
            with self.entered():
                for step in steps:
                    step()
            return
        gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, without an object for it
        try:
            for step in steps:
                step()
        finally:
            torch._C._set_grad_enabled(gradients)
