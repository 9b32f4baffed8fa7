"""Host memory that behaves like the CUDA caching allocator's private pools.

A pool owns segments, a segment is split into blocks, and a block is handed out again only on the stream that
it was allocated on. That is what makes two recordings of one pool share bytes, and what makes sharing them
dangerous, so it is reproduced rather than approximated. Two things differ on purpose: a segment is rounded up
to `SEGMENT_GRANULE` instead of 2 or 20 MiB, so that small tests can compare reserved bytes, and there is no
split between a small and a large pool.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import threading
import weakref
from typing import Any

import torch

BLOCK_ROUND = 512
"""Bytes that a block's size and address are multiples of, as in the CUDA caching allocator."""

SEGMENT_GRANULE = 64 * 1024
"""Bytes that a segment's size is a multiple of."""

EXPANDABLE_CAPACITY = 1 << 30
"""Bytes of address space that an expandable segment may grow to; the host only backs what was touched."""

Handle = tuple[int, int]


class EmulatedCaptureError(RuntimeError):
    """A capture did something that a real device refuses, or was refused because of the state it found."""


class _Span(ctypes.c_ubyte * (1 << 46)):
    """Bytes at an address, owned by nobody.

    One type serves every size (`torch.frombuffer` takes a count): ctypes keeps each array type that it makes
    for good. Being a subclass, it can be weakly referenced, which is how the death of a storage over it is
    seen.
    """


class Block:
    """`size` bytes at `address`; neighbours are linked so that a freed block can merge with them."""

    __slots__ = ("address", "live", "next", "prev", "requested", "segment", "size")

    def __init__(self, segment: Segment, address: int, size: int) -> None:
        self.segment, self.address, self.size = segment, address, size
        self.live, self.requested = False, 0
        self.prev: Block | None = None
        self.next: Block | None = None


class Segment:
    """One buffer that blocks are cut from. Whoever holds a segment keeps its bytes readable."""

    __slots__ = ("address", "capacity", "first", "pool", "size", "storage", "stream")

    def __init__(self, pool: Handle, stream: int, size: int, capacity: int | None = None) -> None:
        self.capacity = size if capacity is None else capacity
        # The default device and inference mode of whoever happens to allocate must not leak into the arena.
        with torch.inference_mode(False):
            buffer = torch.empty(self.capacity + BLOCK_ROUND, dtype=torch.uint8, device="cpu")
        self.storage = buffer.untyped_storage()
        self.address = -(-self.storage.data_ptr() // BLOCK_ROUND) * BLOCK_ROUND
        self.pool, self.stream, self.size = pool, stream, size
        self.first = Block(self, self.address, size)

    def blocks(self) -> list[Block]:
        found, block = [], self.first
        while block is not None:
            found.append(block)
            block = block.next
        return found


class _Pool:
    def __init__(self) -> None:
        self.users = 0
        self.released = False
        self.segments: list[Segment] = []
        self.free: dict[int, list[Block]] = collections.defaultdict(list)


class Arena:
    """All pools of the emulated device. Every method may be called from any thread."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.expandable = False
        self._pools: dict[Handle, _Pool] = {}
        self._recording: set[Handle] = set()
        self._starts: list[int] = []
        self._segments: dict[int, Segment] = {}
        # A storage can die inside a garbage collection that interrupts this very class, so a finalizer only
        # leaves a note here, and the next call acts on it.
        self._dead: collections.deque[Block | Handle] = collections.deque()

    # -- the life of a pool ----------------------------------------------------------------------------

    def begin(self, handle: Handle) -> None:
        """Add a user to a pool, making it on first use, and route allocations to it until `end`.

        Raises EmulatedCaptureError when the pool is already being recorded to, or when all its users have
        gone while it still exists (a real allocator dies in an assertion there; `trim` forgets such a pool
        once it is empty).
        """
        with self._lock:
            self._drain()
            if handle in self._recording:
                raise EmulatedCaptureError(f"beginAllocateToPool: already recording to mempool_id {handle}")
            pool = self._pools.get(handle)
            if pool is None:
                pool = self._pools[handle] = _Pool()
            elif pool.users == 0:
                raise EmulatedCaptureError(
                    f"INTERNAL ASSERT FAILED: use_count > 0: every graph of pool {handle} is gone, but the pool still "
                    "exists. Keep one graph alive for as long as the pool is used, or free its tensors and call "
                    "empty_cache()"
                )
            pool.users += 1
            pool.released = False
            self._recording.add(handle)

    def end(self, handle: Handle) -> None:
        """Stop routing allocations to a pool; nothing happens when none were."""
        with self._lock:
            self._recording.discard(handle)

    def release(self, handle: Handle, *, give_back: bool = False) -> None:
        """Drop one user. With `give_back`, an unused pool returns its memory as its last blocks die."""
        with self._lock:
            self._drain()
            self._release(handle, give_back)

    def release_later(self, handle: Handle) -> None:
        """`release` from a finalizer: safe at any point of any thread, effective at the next call."""
        self._dead.append(handle)

    def trim(self) -> None:
        """Return the free segments of pools that nobody uses, and forget those pools that are then empty."""
        with self._lock:
            self._drain()
            for handle in [handle for handle, pool in self._pools.items() if pool.users == 0]:
                self._trim(handle)

    # -- memory ----------------------------------------------------------------------------------------

    def storage(self, handle: Handle, stream: int, nbytes: int) -> torch.UntypedStorage:
        """Allocate `nbytes` bytes on `stream`; they are free again when the last tensor over them dies."""
        if nbytes == 0:
            return torch.UntypedStorage(0)
        with self._lock:
            self._drain()
            block = self._allocate(handle, stream, -(-nbytes // BLOCK_ROUND) * BLOCK_ROUND)
            block.requested = nbytes
            address = block.address
        span = _Span.from_address(address)
        # The note holds the block and thereby the segment, so the bytes outlive the storage over them.
        weakref.finalize(span, self._dead.append, block).atexit = False
        return torch.frombuffer(span, dtype=torch.uint8, count=nbytes).untyped_storage()

    def unowned(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage over bytes of a segment that claims no block: they may be handed out while it lives."""
        span = _Span.from_address(address)
        span.segment = self.segment_of(address)  # keeps the bytes readable
        return torch.frombuffer(span, dtype=torch.uint8, count=nbytes).untyped_storage()

    def segment_of(self, address: int) -> Segment | None:
        """The segment whose bytes include `address`, or None for memory that isn't the arena's."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            segment = self._segments[self._starts[at]]
            return segment if address < segment.address + segment.size else None

    def reserved(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            self._drain()
            return sum(segment.size for segment in self._segments.values())

    def snapshot(self) -> list[dict[str, Any]]:
        """Segments and blocks by address, in the format of `torch.cuda.memory_snapshot`."""
        with self._lock:
            self._drain()
            return [self._describe(self._segments[start]) for start in self._starts]

    @staticmethod
    def _describe(segment: Segment) -> dict[str, Any]:
        blocks = segment.blocks()
        live = sum(block.size for block in blocks if block.live)
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": live,
            "active_size": live,
            "requested_size": sum(block.requested for block in blocks),
            "stream": segment.stream,
            "segment_type": "large",
            "segment_pool_id": segment.pool,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "active_allocated" if block.live else "inactive",
                }
                for block in blocks
            ],
        }

    # -- the caller holds the lock from here on --------------------------------------------------------

    def _new_segment(self, handle: Handle, stream: int, size: int) -> Segment:
        size = -(-size // SEGMENT_GRANULE) * SEGMENT_GRANULE
        segment = Segment(handle, stream, size, max(size, EXPANDABLE_CAPACITY) if self.expandable else None)
        self._pools[handle].segments.append(segment)
        bisect.insort(self._starts, segment.address)
        self._segments[segment.address] = segment
        return segment

    def _grown(self, pool: _Pool, stream: int, size: int) -> Block | None:
        """A block of at least `size` bytes at the end of a segment that can grow to hold it, or None."""
        for segment in pool.segments:
            last = segment.blocks()[-1]
            missing = size - (0 if last.live else last.size)
            growth = -(-missing // SEGMENT_GRANULE) * SEGMENT_GRANULE
            if segment.stream != stream or segment.size + growth > segment.capacity:
                continue
            if last.live:
                block = Block(segment, segment.address + segment.size, growth)
                block.prev, last.next = last, block
            else:
                block = last
                pool.free[stream].remove(block)
                block.size += growth
            segment.size += growth
            return block
        return None

    def _allocate(self, handle: Handle, stream: int, size: int) -> Block:
        pool = self._pools[handle]
        fitting = [block for block in pool.free[stream] if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.address))
            pool.free[stream].remove(block)
        else:
            block = self._grown(pool, stream, size) if self.expandable else None
            if block is None:
                block = self._new_segment(handle, stream, size).first
        if block.size > size:
            rest = Block(block.segment, block.address + size, block.size - size)
            rest.prev, rest.next, block.next, block.size = block, block.next, rest, size
            if rest.next is not None:
                rest.next.prev = rest
            pool.free[stream].append(rest)
        block.live = True
        return block

    def _free(self, block: Block) -> None:
        segment = block.segment
        pool = self._pools[segment.pool]
        free = pool.free[segment.stream]
        block.live, block.requested = False, 0
        if block.next is not None and not block.next.live:
            free.remove(block.next)
            self._absorb_next(block)
        if block.prev is not None and not block.prev.live:
            block = block.prev
            self._absorb_next(block)
        else:
            free.append(block)
        if pool.released and pool.users == 0:
            self._trim(segment.pool)

    @staticmethod
    def _absorb_next(block: Block) -> None:
        gone = block.next
        assert gone is not None
        block.size += gone.size
        block.next = gone.next
        if block.next is not None:
            block.next.prev = block

    def _release(self, handle: Handle, give_back: bool) -> None:
        pool = self._pools.get(handle)
        if pool is None or pool.users == 0:
            return
        pool.users -= 1
        pool.released = give_back
        if give_back and pool.users == 0:
            self._trim(handle)

    def _trim(self, handle: Handle) -> None:
        pool = self._pools[handle]
        for segment in list(pool.segments):
            if segment.first.next is None and not segment.first.live:
                pool.segments.remove(segment)
                pool.free[segment.stream].remove(segment.first)
                self._starts.remove(segment.address)
                del self._segments[segment.address]
        if not pool.segments:
            del self._pools[handle]

    def _drain(self) -> None:
        while self._dead:
            gone = self._dead.popleft()
            if isinstance(gone, Block):
                self._free(gone)
            else:
                self._release(gone, give_back=False)
