"""The device that needs no device: torch.cuda's graph API over CPU tensors, with what makes CUDA graphs hard.

The module itself is a device module: pass `sgc_backend.emulated` where `torch.cuda` would be passed.

- A capture executes nothing. What it recorded is replayed on the same addresses; Python doesn't run again.
- Tensors born in a capture live in the pool's arena, which reuses blocks per stream (`_arena.py`).
- What a real capture forbids raises `EmulatedCaptureError`, and leaves behind what a real one leaves behind.
- Work that a real device could run at the same time, and that would then corrupt a pool, raises
  `EmulatedRaceError`. Here everything runs in the order of the calls, so order is kept account of with a
  vector clock per stream: what a stream has launched, and what it has waited for.

Every CPU tensor is a device tensor here: a sync on a tensor that would live on the host is refused as well.
What escapes the dispatcher (numpy(), tolist(), printing, data_ptr() readers) can't be seen and is not refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import _streams
from ._arena import BLOCK_ROUND, SEGMENT_GRANULE, EmulatedCaptureError, Handle
from ._recorder import PoolMode, Recorder, outside
from ._streams import (
    Event,
    Stats,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)

__all__ = [
    "BLOCK_ROUND",
    "SEGMENT_GRANULE",
    "CUDAGraph",
    "EmulatedCaptureError",
    "EmulatedRaceError",
    "Event",
    "Graph",
    "Stats",
    "Stream",
    "allocate_to_pool",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "end_allocate_to_pool",
    "graph_pool_handle",
    "in_pool",
    "is_available",
    "is_current_stream_capturing",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "opaque",
    "random_usable",
    "recover_generator",
    "release_pool",
    "reset_emulation",
    "set_stream",
    "stats",
    "stream",
    "synchronize",
    "treat_as_opaque",
]


class EmulatedRaceError(RuntimeError):
    """Two replays from one pool with nothing that orders them: a real device could run them at once."""


def reset_emulation() -> None:
    """Forget all pools, streams, poison and counters. For tests; end captures first.

    Graphs and tensors made before stay readable, but belong to the forgotten device. A capture that this
    thread left open is abandoned.
    """
    old = _streams.state()
    for mode in reversed(getattr(old.thread, "modes", [])[:]):
        old.exit(mode)
    _streams.renew()


def stats() -> Stats:
    """The live counters."""
    return _streams.state().stats


# -- the device ----------------------------------------------------------------------------------------


def is_available() -> bool:
    """True: it needs no device."""
    return True


def device_count() -> int:
    """One."""
    return 1


def current_device() -> int:
    """Zero."""
    return 0


# -- graphs --------------------------------------------------------------------------------------------


def graph_pool_handle() -> Handle:
    """A new handle ``(0, n)``; the pool itself appears with the first capture into it."""
    return (0, next(_streams.state().numbers))


def is_current_stream_capturing() -> bool:
    """Whether the current stream takes part in a capture, valid or not."""
    return _streams.state().current() in _streams.state().captures


class CUDAGraph:
    """A recording. All launches of a replay are executed when `replay` returns.

    Attributes:
        num_nodes: launches recorded, 0 before a successful capture.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.num_nodes = 0
        self._clear()

    def _clear(self) -> None:
        self._state: _streams.EmulatedState | None = None
        self._recorder: Recorder | None = None
        self._ready = False
        self._handle: Handle | None = None
        self._release: weakref.finalize | None = None
        self.num_nodes = 0

    def capture_begin(self, pool: Handle | None = None, capture_error_mode: str = "global") -> None:
        """Record, instead of execute, this thread's ops on the current stream until `capture_end`.

        Args:
            pool: where new tensors live; a pool of its own by default.
            capture_error_mode: "global", "thread_local" or "relaxed"; whether another thread's `synchronize`
                invalidates this capture ("global") or doesn't.

        Raises:
            EmulatedCaptureError: this thread or stream is capturing already (that capture is invalidated),
                the stream is the default one, the pool is being recorded to, or the pool has lost all its
                graphs. As on a real device, the random generator is then stuck until `recover_generator`.
            RuntimeError: this graph holds a recording already.
            ValueError: an unknown capture_error_mode.
        """
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"capture_error_mode: global, thread_local or relaxed, not {capture_error_mode!r}")
        state = _streams.state()
        if self._ready:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph; make a new one.")
        with state.lock:
            mode = state.mode()
            around = mode if isinstance(mode, Recorder) else state.captures.get(state.current())
            if around is not None:
                raise around.forbid("capture_begin", "a capture can't be begun inside of a capture")
            if mode is not None:
                raise EmulatedCaptureError("a capture can't be begun inside of allocate_to_pool")
            stuck, state.generator_stuck = state.generator_stuck, True
            if state.current() == 0:
                raise EmulatedCaptureError("CUDA graphs must be captured on a non-default stream")
            handle = (next(state.numbers), 0) if pool is None else tuple(pool)
            state.arena.begin(handle)
            state.generator_stuck = stuck
            recorder = Recorder(
                state.arena,
                handle,
                state.current,
                state.usable,
                state.opaque_ops,
                error_mode=capture_error_mode,
            )
            state.captures[recorder.origin] = recorder
            self._state, self._recorder, self._handle = state, recorder, handle
        state.enter(recorder)

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            EmulatedCaptureError: the capture was invalidated, or a stream that joined it wasn't waited for.
                The graph is empty then, the pool stays in its recording state until `end_allocate_to_pool`
                and `release_pool`, and the random generator is stuck until `recover_generator`.
            RuntimeError: no capture of this graph is open, or it began on another stream or thread.
        """
        recorder, state, handle = self._recorder, self._state, self._handle
        if recorder is None or state is None or handle is None:
            raise RuntimeError("capture_end() without a capture_begin()")
        if recorder.thread != threading.get_ident():
            raise RuntimeError("Capture must end on the same thread it began on.")
        if state.current() != recorder.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if recorder in getattr(state.thread, "modes", ()):
            state.exit(recorder)
        self._recorder = None
        with state.lock:
            known = state.clock(recorder.origin)
            unjoined = [
                stream_id
                for stream_id in sorted(recorder.streams)
                if known.get(stream_id, 0) < state.clock(stream_id).get(stream_id, 0)
            ]
            for stream_id in recorder.streams:
                state.captures.pop(stream_id, None)
            if unjoined:
                recorder.error = recorder.error or (
                    f"capture contains unjoined work: stream(s) {unjoined} joined the capture, and the "
                    f"capturing stream {recorder.origin} didn't wait for them"
                )
            if recorder.error is not None:
                state.generator_stuck = True
                raise EmulatedCaptureError(f"the capture was invalidated: {recorder.error}")
            state.arena.end(handle)
            # The epilogue of a capture that succeeds puts the generator right, even after another one failed.
            state.generator_stuck = False
            state.stats.captures += 1
            self._launches = recorder.launches
            self.num_nodes = len(recorder.launches)
            self._random = any(launch.random for launch in recorder.launches)
            self._ready = True
            self._release = weakref.finalize(self, state.arena.release_later, handle)
            self._release.atexit = False

    @property
    def captured_nodes(self) -> int:
        """Launches recorded so far by the capture in progress, or by the recording."""
        return self.num_nodes if self._recorder is None else len(self._recorder.launches)

    def instantiate(self) -> None:
        """Nothing to do. Raises RuntimeError before a successful capture."""
        self._require("instantiate")

    def replay(self) -> None:
        """Run the recorded launches in order on the current stream.

        Raises:
            EmulatedRaceError: nothing orders this replay after the last one from the same pool, which ran on
                another stream. Nothing is executed.
            EmulatedCaptureError: the current stream is capturing (that capture is invalidated), or the random
                generator is needed and stuck.
            RuntimeError: there is no recording.
        """
        state, handle = self._require("replay")
        with state.lock:
            here = state.current()
            capture = state.captures.get(here)
            if capture is not None:
                raise capture.forbid("graph.replay", "a graph can't be launched inside of a capture")
            if self._random and state.generator_stuck:
                raise EmulatedCaptureError(
                    "Offset increment outside graph capture: an earlier capture failed and left the random "
                    "generator in its capture state; recover_generator() cures it"
                )
            last, tick = state.last_replay.get(handle, (here, 0))
            if state.clock(here).get(last, 0) < tick:
                raise EmulatedRaceError(
                    f"overlapping replays from one pool: pool {handle} was last replayed from on stream {last}, "
                    f"and nothing makes stream {here} wait for it; on a real device they would corrupt each other"
                )
            state.last_replay[handle] = (here, state.tick(here))
            state.stats.replays += 1
            # What was recorded is what runs: no autocast, mode or gradient of the caller may change it. The
            # lock is held because a real stream runs one replay after the other, from whatever threads.
            with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
                for launch in self._launches:
                    launch.run()
                    state.stats.launches += 1

    def reset(self) -> None:
        """Drop the recording and its claim on the pool. Raises RuntimeError inside of the graph's own capture."""
        if self._recorder is not None:
            raise RuntimeError("reset() inside of the graph's own capture")
        if self._release is not None and self._state is not None and self._handle is not None:
            if self._release.detach() is not None:
                self._state.arena.release(self._handle)
            self._launches = []
        self._clear()

    def pool(self) -> Handle:
        """The handle of the pool. Raises RuntimeError before a successful capture."""
        return self._require("pool")[1]

    def _require(self, what: str) -> tuple[_streams.EmulatedState, Handle]:
        if not self._ready:
            raise RuntimeError(f"Called CUDAGraph.{what} without a preceding successful capture.")
        assert self._state is not None and self._handle is not None
        return self._state, self._handle


Graph = CUDAGraph


def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` one launch of a recording: it is called again at every replay, with its recorded arguments.

    For callables that can't be looked into, such as code that inductor compiled. `fn` takes tensors and plain
    values, in lists too, and returns tensors, plain values and None in any nesting. Plain values are frozen
    at capture.

    Under capture `fn` is called once on copies of its arguments (zeros for those in a pool), to learn what it
    returns: an output that aliases an argument comes back as that view of the real argument, others get memory
    from the pool, sharing storage as they did. The random generator is put back. Without a capture `fn` is
    simply called; inside of `allocate_to_pool` its new tensors are then moved to the pool.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        state = _streams.state()
        mode = state.mode()
        if mode is None or not mode.applies():
            return fn(*args, **kwargs)
        with outside(mode):
            return mode.opaque(fn, args, kwargs)

    if hasattr(fn, "__name__"):
        functools.update_wrapper(call, fn, updated=())
    if getattr(fn, "_boxed_call", False):
        call._boxed_call = True  # type: ignore[attr-defined]
    return call


def treat_as_opaque(name: str) -> None:
    """Record the op `name` ("ns::op" or "ns::op.overload") as one launch, without looking into its body.

    An op whose body launches nothing through torch is recognised without this, but only by running the body
    once, on whatever bytes the pool holds; name it here when that may crash.
    """
    _streams.state().opaque_ops.add(name)


# -- memory --------------------------------------------------------------------------------------------


def memory_reserved(device: Any = None) -> int:
    """Bytes of all segments of all pools."""
    return _streams.state().arena.reserved()


def memory_allocated(device: Any = None) -> int:
    """Bytes of all blocks that a living tensor holds."""
    return sum(segment["allocated_size"] for segment in _streams.state().arena.snapshot())


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of all pools by address, in the format of `torch.cuda.memory_snapshot`, sizes in bytes."""
    return _streams.state().arena.snapshot()


def empty_cache() -> None:
    """Give back the free segments of pools that no graph uses."""
    _streams.state().arena.trim()


def in_pool(tensor: torch.Tensor) -> Handle | None:
    """The pool whose memory `tensor` lies in, or None; None for a tensor without bytes."""
    segment = _streams.state().arena.segment_of(tensor.untyped_storage().data_ptr())
    return None if segment is None else segment.pool


@contextlib.contextmanager
def allocate_to_pool(pool: Handle) -> Iterator[None]:
    """Execute this thread's ops as usual, but let what they make live in `pool`, on the current stream.

    A user of the pool while open, like torch's begin, end and release in one.

    Raises:
        EmulatedCaptureError: this thread is capturing, or is inside of another `allocate_to_pool`; the pool
            is being recorded to or has lost its graphs; or, from an op, the random generator is stuck.
    """
    state, handle = _streams.state(), tuple(pool)
    if state.mode() is not None:
        raise EmulatedCaptureError("allocate_to_pool inside of a capture or of another allocate_to_pool")
    state.arena.begin(handle)
    mode = PoolMode(state.arena, handle, state.current, state.usable, state.opaque_ops)
    state.enter(mode)
    try:
        yield
    finally:
        state.exit(mode)
        state.arena.end(handle)
        state.arena.release(handle)


def set_expandable_segments(on: bool) -> bool:
    """Whether new segments can grow in place, as with the CUDA allocator's setting of that name; what it was."""
    arena = _streams.state().arena
    was, arena.expandable = arena.expandable, on
    return was


def begin_allocate_to_pool(device: Any, pool: Handle) -> None:
    """Add a use of `pool` and route this device's captures to it until `end_allocate_to_pool`."""
    _streams.state().arena.begin(tuple(pool))


def end_allocate_to_pool(device: Any, pool: Handle) -> None:
    """End the recording state that a failed capture left `pool` in."""
    _streams.state().arena.end(tuple(pool))


def release_pool(device: Any, pool: Handle) -> None:
    """Drop one use of `pool`, such as a failed capture leaves behind; unused, it is given back as it empties."""
    _streams.state().arena.release(tuple(pool), give_back=True)


def random_usable() -> bool:
    """Whether random ops may run: not after a failed capture, until recovered or until one succeeds."""
    return _streams.state().usable()


def recover_generator() -> None:
    """Put the random generator right after a failed capture."""
    _streams.state().generator_stuck = False
