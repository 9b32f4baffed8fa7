"""The pool: per device and lane one handle, one capture stream and one keeper, and the guard of its replays.

Note [Why one stream]
    The caching allocator reuses a block only on the stream that it was allocated on. A handle shared by captures on
    different streams saves nearly nothing (measured on an H200: 306 MB with a stream each, 218 MB with one, 338 MB
    with a pool each). So the accessor owns the stream as well as the handle.

Note [Keeper]
    An allocator pool without a live graph can't be captured into again while a tensor in it lives. The keeper is a
    tiny recording that is made with the pool and dies only with it, so a handle outlives whatever was recorded.

Note [Library scratch]
    cuBLAS keeps a workspace per thread and stream and bakes its address into what it records; anyone in the process may
    have all workspaces freed (torch's own CUDA graph trees do), and replays would then write into other people's
    memory (seen on an H200). So the workspaces of the capture stream are made in an allocator pool of their own, whose
    memory nobody else is ever given.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .device import Device
from .errors import CaptureNestedError, StalePoolError
from .growing import growing_in_place
from .held_graphs import HeldGraphs, captures_here, owned_by, this_thread_captures
from .pool_memory import PoolMemory
from .replay_guard import ReplayGuard, writes


class GraphPool(ReplayGuard, PoolMemory):
    """What captures and replays of one device and lane share.

    Attributes:
        handle: the allocator's pool id, passed to every capture.
        stream: the capture stream.
        lane: the lane's name; None for the one that is shared by default.
        kept: whatever a measuring session holds until its end.
        alone: bytes that each owner's recordings took in a pool of their own, where a session measured it.
        session_depth: > 0 while a capture session is open.
        executables: what lets graphs share executables; None where the device has none.
    """

    def __init__(self, device: Device, lane: str | None = None) -> None:
        self._graphs = HeldGraphs()
        ReplayGuard.__init__(self, device, self._graphs.doomed)
        PoolMemory.__init__(self)
        self.lane = lane
        self.session_depth = 0
        self.alone: dict[str, int] = {}
        self.kept: list[Any] = []
        self._any_order = self._grown = False
        self._cache_owed = False  # somebody wants the allocator's cached memory given back
        self._shadows: dict[str, GraphPool] | None = None
        self._thread = threading.local()
        device.prepare()
        self.executables = device.executables()
        self.handle = device.new_pool_handle()
        self.stream = device.new_stream()
        self._scratch_handle = device.new_pool_handle()
        device.synchronize()
        self._keeper = self._keep(self.handle)
        self._scratch_keeper = self._keep(self._scratch_handle)

    def _keep(self, handle: Any) -> Any:
        device = self.device
        keeper = device.new_graph()
        with device.use_stream(self.stream), torch.inference_mode(False), torch.no_grad(), this_thread_captures():
            seed = torch.zeros(1, device=device.torch_device)
            device.capture_begin(keeper, handle)
            try:
                seed + 1
            finally:
                device.capture_end(keeper)
        return keeper

    # -- capture -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold the pool for one capture on this thread, with the capture stream current.

        Raises:
            CaptureNestedError: this thread is already capturing into, or replaying from, the pool, or the pool's
                device is capturing something else on the current stream.
        """
        with self.lock:
            self.check_free()
            self.settle()
            try:
                self._capturing = True
                self.written = next(writes)
                with self.device.use_stream(self.stream):
                    self.prepare_thread()
                    with self._growing(), this_thread_captures():
                        yield
            finally:
                self._capturing = False
                self.settle()
                self._give_cache()

    def _growing(self) -> contextlib.AbstractContextManager[None]:
        """Let segments grow in place where recordings may come in any order; Note [Growing in place] in growing.py."""
        if self.session_depth and not self._any_order:
            return contextlib.nullcontext()
        self._grown = True
        return growing_in_place(self.device)

    def _check_open(self) -> None:
        if self.generation:
            raise StalePoolError(f"the pool of {self} was reset; open a new capture session")

    def check_free(self) -> None:
        """Raises CaptureNestedError where this thread is inside a capture, or inside a replay from the pool."""
        with self.lock:
            self._check_open()
            if self._capturing or self.replaying:
                doing = "capturing into" if self._capturing else "replaying from"
                raise CaptureNestedError(f"capture begun while already {doing} the pool of {self}; finish that first")
            if self.device.is_capturing():
                raise CaptureNestedError(f"capture begun inside another capture on {self.device}; finish that first")

    def prepare_thread(self) -> None:
        """Once a thread, with the capture stream current: let libraries make what they keep; Note [Library scratch]."""
        if not getattr(self._thread, "prepared", False):
            self._thread.prepared = True
            with self.device.allocating_to(self._scratch_handle):
                self.device.prewarm()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the capture stream, ordered after and before the current one."""
        device = self.device
        with self.lock:  # another thread's capture on this stream would record what runs here
            current = device.current_stream()
            self.stream.wait_stream(current)
            try:
                with device.use_stream(self.stream):
                    self.prepare_thread()
                    yield
            finally:
                current.wait_stream(self.stream)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """While open, the capture stream is current and this thread's new tensors on it lie in the pool."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lock)
            self._check_open()
            stack.enter_context(self.device.use_stream(self.stream))
            stack.enter_context(self._growing())
            stack.enter_context(this_thread_captures())  # nothing may be given back in between
            stack.enter_context(self.device.allocating_to(self.handle))
            yield

    @contextlib.contextmanager
    def session(self, *, any_order: bool = False, measure: bool = False) -> Iterator[None]:
        """An open capture session: memory is settled once at its start and end, not at every recording.

        Args:
            any_order: sizes may come in any order; see Note [Growing in place] in growing.py.
            measure: record everything a second time, each owner in a pool of its own, to fill `alone`.
        """
        opened = 0
        try:
            with self.lock:
                self._check_open()
                if self.session_depth == 0:
                    self.device.synchronize()
                    self.device.empty_cache()
                    self._any_order = any_order
                    self._shadows = {} if measure else None
                self.session_depth += 1
                opened = 1
            yield
        finally:
            with self.lock:
                self.session_depth -= opened
                if opened and self.session_depth == 0:
                    shadows, self._shadows = self._shadows or {}, None
                    for owner, shadow in shadows.items():
                        # Of an owner that recorded outside of this session too, a part is no answer.
                        if self._recorded_by(owner) == shadow._recorded_by(owner):
                            self.alone[owner] = shadow.reserved_bytes()
                        else:
                            self.alone.pop(owner, None)
                        shadow.close()
                    self.device.synchronize()
                    self.device.empty_cache()

    def shadow(self, owner: str) -> GraphPool | None:
        """A pool of ``owner``'s own to record into as well, where the open session measures; None elsewhere."""
        if self._shadows is None:
            self.alone.pop(owner, None)  # what was measured is not all of its recordings any more
            return None
        if owner not in self._shadows:
            shadow = self._shadows[owner] = GraphPool(self.device, self.lane)
            shadow.session_depth, shadow._any_order = 1, self._any_order
        return self._shadows[owner]

    def _recorded_by(self, owner: str) -> int:
        return sum(entry.owner == owner for entry in list(self.ledger.values()))

    # -- the life of recordings --------------------------------------------------------------------------------------

    def owned_by(self, owner: Any) -> list[Any] | None:
        """A list for `add`, whose graphs are dropped when ``owner`` dies; None where nobody owns them."""
        return None if owner is None else owned_by(owner, self.drop)

    def add(self, graph: Any, owned: list[Any] | None = None) -> None:
        """Hold ``graph`` until `drop`, or until the owner of ``owned`` dies; see Note [Graphs die here] in
        held_graphs.py."""
        self._graphs.add(graph, owned)

    def drop(self, graph: Any, *, trim: bool = True) -> None:
        """Release one recording, at once or as soon as no capture is open; the others stay right. Idempotent.

        Without ``trim`` an idle pool keeps its memory for the time being: a static result may still be read in it.
        """
        if self._graphs.doom(graph):
            self.ledger.pop(id(graph), None)
            self.settle(trim=trim)

    def settle(self, *, trim: bool = True) -> None:
        """Destroy what was dropped, unless a capture or a replay is in progress; an idle pool gives its memory back."""
        if not self.doomed or captures_here() or not self.lock.acquire(blocking=False):
            return
        try:
            if self._capturing or self.replaying or self.device.is_capturing():
                return
            self._graphs.destroy_doomed()
            if trim:
                self.trim()
        finally:
            self.lock.release()

    def trim(self) -> None:
        """Give free memory back where no recording is left that could be using it; otherwise do nothing.

        To the allocator, memory that only a graph writes is free, so none of it can be given back while one lives.
        """
        with self.lock:
            if self._graphs or self.doomed or self._capturing or self.replaying or self.generation:
                return
            if any(s["active_size"] for s in self.device.pool_segments(self.handle)):
                return  # a tensor lives, so the allocator would lose the pool to captures; Note [Keeper]
            self.device.synchronize()
            if self._grown and self.device.grows_for_good:
                self._keeper.reset()
                self.device.empty_cache()
                self.handle = self.device.new_pool_handle()
                self._keeper = self._keep(self.handle)
            else:
                self.device.renew_pool(self.handle)
            self._grown = False

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for tensors to come. That waits for the device, so where a capture is in
        progress it is done at the capture's end; it never waits for another thread, which may be waiting for this one.
        """
        self._cache_owed = True
        held = self.lock.acquire(blocking=False)
        try:
            self._give_cache()
        finally:
            if held:
                self.lock.release()

    def _give_cache(self) -> None:
        if self._cache_owed and not self._capturing:
            self._cache_owed = False
            self.device.empty_cache()

    def check_closable(self) -> None:
        """Raises CaptureNestedError while a session is open, or this thread captures into or replays from the pool."""
        with self.lock:
            if self._capturing or self.replaying or self.session_depth:
                raise CaptureNestedError(f"reset() inside a capture session, a capture or a replay on {self}")

    def close(self) -> None:
        """Give the pool's memory back for good; its recordings refuse to replay from now on. See `check_closable`."""
        with self.lock:
            self.device.synchronize()
            self.generation = 1
            self._graphs.destroy_all()
            for keeper in (self._keeper, self._scratch_keeper):
                keeper.reset()
            self.ledger.clear()
            self.device.empty_cache()

    def __str__(self) -> str:
        return str(self.device) if self.lane is None else f"{self.device}, lane {self.lane!r}"
