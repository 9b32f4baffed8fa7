"""What a pool holds of the device's memory, where it lies, and what each recording added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .device import Device


@dataclass(frozen=True)
class Entry:
    """One recording in the books.

    Attributes:
        owner: name of the compiled graph or wrapper.
        key: the key that it was recorded for, as text.
        part: "piece 3", or empty where the recording is whole.
        added: bytes that the pool grew by for it; of a key whose recordings weren't looked at one by one, the first
            has what all of them added.
        outside: bytes of device memory that it took outside of the allocator (the instantiated graph).
    """

    owner: str
    key: str
    part: str
    added: int
    outside: int


class PoolMemory:
    """The books of one pool.

    Attributes:
        device, handle: whose memory it is; the handle may change.
        ledger: what each live recording added, by id of its graph; see `Entry`.
        grew: whether it grew for the last capture; True before the first.
    """

    device: Device
    handle: Any

    def __init__(self) -> None:
        self.ledger: dict[int, Entry] = {}
        self.grew = True
        # the allocator's mark, and the spans and their bytes then
        self._seen: tuple[Any, tuple[tuple[int, int], ...], int] = (None, (), 0)

    def contains(self) -> Callable[[torch.Tensor], bool]:
        """A test for whether a tensor's first byte lies in the pool as it is now."""
        spans = self.spans()

        def inside(tensor: torch.Tensor) -> bool:
            if not self.device.owns(tensor) or tensor.layout is not torch.strided or not tensor.numel():
                return False
            return any(a <= tensor.data_ptr() < b for a, b in spans)

        return inside

    def reserved_bytes(self) -> int:
        """Bytes that the pool holds from the device."""
        return self._looked()[2]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first address, address behind the last) of each of the pool's segments as they are now."""
        return self._looked()[1]

    def _looked(self) -> tuple[Any, tuple[tuple[int, int], ...], int]:
        # A look at every segment takes longer than recording a small graph, and few recordings need new memory.
        mark = (self.handle, self.device.allocator_mark())
        seen = self._seen
        if mark != seen[0]:
            segments = self.device.pool_segments(self.handle)
            spans = tuple((s["address"], s["address"] + s["total_size"]) for s in segments)
            seen = self._seen = (mark, spans, sum(end - start for start, end in spans))
        return seen
