"""The pool: per device one handle, one capture stream, one keeper and one replay guard. The only mutable module state.

Note [Why one stream]
    The caching allocator reuses a block only on the stream that it was allocated on. A handle shared by captures on
    different streams saves nearly nothing (measured on an H200: 306 MB with a stream each, 218 MB with one, 338 MB
    with a pool each). So the accessor owns the stream as well as the handle.

Note [Keeper]
    An allocator pool without a live graph can't be captured into again while a tensor in it lives. The keeper is a
    tiny recording that is made with the pool and dies only in reset(), so a handle outlives whatever was recorded.

Note [Replay guard]
    Recordings of one pool overwrite each other's memory, so two of them must never run at once. In front of a replay
    the current raw stream id is compared with the last one that replayed; only when it differs is an event recorded on
    the previous stream and waited for on this one. Threads take the pool's lock for the length of a replay.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .device import Device, device_of
from .errors import CaptureNestedError, NestedReplayError, StalePoolError


class GraphPool:
    """What captures and replays on one device share.

    Attributes:
        handle: the allocator's pool id, passed to every capture.
        stream: the capture stream.
        generation: counts resets; a recording remembers the one that it was made in.
        session_depth: > 0 while a capture session is open.
        lock: taken for the length of a capture or a replay.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.generation = 0
        self.session_depth = 0
        self._replaying = False
        self._capturing = False
        self._last_raw: int | None = None
        self._last_stream: Any = None
        self.handle = device.new_pool_handle()
        self.stream = device.new_stream()
        self._recorded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._keeper = self._make_keeper()

    def _make_keeper(self) -> Any:
        device = self.device
        keeper = device.new_graph()
        device.synchronize()
        with device.use_stream(self.stream), torch.inference_mode(False), torch.no_grad():
            seed = torch.zeros(1, device=device.torch_device)
            device.capture_begin(keeper, self.handle)
            try:
                seed + 1
            finally:
                device.capture_end(keeper)
        return keeper

    # -- capture -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold the pool for one capture on this thread.

        Raises:
            CaptureNestedError: this thread is already capturing into, or replaying from, the pool.
        """
        with self.lock:
            if self._capturing or self._replaying:
                doing = "capturing into" if self._capturing else "replaying from"
                raise CaptureNestedError(
                    f"capture begun while already {doing} the pool of {self.device}; finish that first"
                )
            self._capturing = True
            try:
                yield
            finally:
                self._capturing = False

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """An open capture session: memory is settled once at its start and end, not at every recording."""
        with self.lock:
            if self.session_depth == 0:
                self.device.synchronize()
                self.device.empty_cache()
            self.session_depth += 1
        try:
            yield
        finally:
            with self.lock:
                self.session_depth -= 1
                if self.session_depth == 0:
                    self.device.synchronize()
                    self.device.empty_cache()

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay_begin(self, generation: int) -> None:
        """Take the pool for a replay on the current stream; see Note [Replay guard]. Pair with `replay_end`.

        Raises:
            NestedReplayError: this thread is inside a replay or a capture of the same pool.
            StalePoolError: the recording is of a generation before the last reset().
        """
        self.lock.acquire()
        if self._replaying or self._capturing or generation != self.generation:
            try:
                self._refuse(generation)
            finally:
                self.lock.release()
        raw = self.device.current_raw_stream()
        if raw != self._last_raw:
            try:
                self._change_stream(raw)
            except BaseException:
                self.lock.release()
                raise
        self._replaying = True

    def replay_end(self) -> None:
        self._replaying = False
        self.lock.release()

    def _refuse(self, generation: int) -> None:
        if generation != self.generation:
            raise StalePoolError(
                f"this recording was made before the pool of {self.device} was reset "
                f"(generation {generation}, now {self.generation}); record it again"
            )
        what = "capture" if self._capturing else "replay"
        raise NestedReplayError(
            f"replay begun inside a {what} of the same pool on {self.device}: it would overwrite the memory of the "
            f"one in progress. Run the inner call outside, or uncaptured"
        )

    def _change_stream(self, raw: int) -> None:
        stream = self.device.current_stream()
        if self._last_stream is not None:
            event = self.device.new_event()
            event.record(self._last_stream)
            stream.wait_event(event)
        self._last_raw, self._last_stream = raw, stream

    # -- memory ------------------------------------------------------------------------------------------------------

    def reserved_bytes(self) -> int:
        """Bytes that the pool holds from the device."""
        return self.device.reserved_bytes(self.handle)

    def add(self, graph: Any) -> None:
        """Count ``graph`` among the recordings whose memory must stay."""
        self._recorded.add(graph)

    def drop(self, graph: Any) -> None:
        """Release one recording; the others stay right. Idempotent."""
        self._recorded.discard(graph)
        graph.reset()

    def trim(self) -> None:
        """Give free memory back where no recording is left that could be using it; otherwise do nothing.

        To the allocator, memory that only a graph writes is free, so none of it can be given back while one lives.
        """
        with self.lock:
            if self._recorded or self._capturing or self._replaying:
                return
            if any(s["active_size"] for s in self.device.pool_segments(self.handle)):
                return  # Note [Keeper]: a tensor lives, so the pool would be lost to captures
            self.device.synchronize()
            self._keeper.reset()
            self.device.empty_cache()
            self._keeper = self._make_keeper()

    def close(self) -> None:
        """Give the pool's memory back for good; its recordings refuse to replay from now on.

        Raises:
            CaptureNestedError: a capture or a replay of the pool is in progress on this thread.
        """
        with self.lock:
            if self._capturing or self._replaying:
                raise CaptureNestedError(f"reset() inside a capture or a replay on {self.device}")
            self.device.synchronize()
            self._keeper.reset()
            self.generation += 1
            self.device.empty_cache()


_pools: dict[tuple[str, int], GraphPool] = {}
_pools_lock = threading.Lock()
_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


def pool_of(device: Device) -> GraphPool:
    """The process's pool on ``device``, made on first use."""
    key = (device.name, device.index)
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = GraphPool(device)
    return pool


def get_or_create_global_graph_memory_pool(device_module: Any) -> Any:
    """The pool handle that every capture on ``device_module``'s current device draws from, made on first use.

    Args:
        device_module: ``torch.cuda`` or ``sgc_backend.emulated``.

    Returns:
        What ``device_module.graph_pool_handle()`` returns: pass it as ``pool=`` to a capture of your own. Capture on
        `get_or_create_global_capture_stream` too, or little is shared (Note [Why one stream]). Never None. The same
        until ``sgc_backend.reset()``.

    Raises:
        OptionError: ``device_module`` is not a supported device module.
    """
    return pool_of(device_of(device_module)).handle


def get_or_create_global_capture_stream(device_module: Any) -> Any:
    """The stream that every capture on ``device_module``'s current device runs on; see Note [Why one stream]."""
    return pool_of(device_of(device_module)).stream


def pools() -> list[GraphPool]:
    """Every pool made so far."""
    with _pools_lock:
        return list(_pools.values())


def enroll(recorder: Any) -> None:
    """Remember ``recorder``, which has release(), weakly: whatever may hold recordings."""
    with _pools_lock:
        _recorders.add(recorder)


def recorders() -> list[Any]:
    """What is alive of all that was enrolled."""
    with _pools_lock:
        return list(_recorders)


def release_everything() -> None:
    """Release every recording and every pool's memory; handles change, later captures start afresh. Idempotent."""
    for recorder in recorders():
        recorder.release()
    with _pools_lock:
        doomed = list(_pools.values())
        _pools.clear()
    for pool in doomed:
        pool.close()
