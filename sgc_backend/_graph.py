"""The emulated device's CUDAGraph: captures executing nothing, and replays what it recorded."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import _streams
from ._arena import EmulatedCaptureError, Handle
from ._recorder import Recorder


class EmulatedRaceError(RuntimeError):
    """Two replays from one pool with nothing that orders them: a real device could run them at once."""


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
        recorder.check_seed()
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
