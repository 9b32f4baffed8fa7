"""Pinned host blocks, taken in turn, from which copies to the device are still on their way.

The host may fill a block again once its last copy is done. An event for every copy would cost more than the copy of a
few small inputs, so blocks come in two groups: an event is recorded when a group has been used up, and waited for when
its turn comes again.
"""

from __future__ import annotations

from typing import Any

import torch

from .device import Device

GROUP = 4  # copies at least that may be on their way while the host fills the next block


class PinnedRing:
    """Blocks of ``count`` bytes each, made as they are first taken.

    Whoever copies from one enqueues the copy behind earlier ones, on the current stream or on one that it waits for.
    """

    def __init__(self, device: Device, count: int) -> None:
        self.device, self.count = device, count
        self._blocks: list[torch.Tensor] = []
        self._done: list[Any] = [None, None]  # of each group an event behind its copies
        self._next = 0

    def take(self) -> tuple[int, torch.Tensor]:
        """The number of a block whose last copy is done, below 2 * `GROUP`, and its memory: [count] uint8."""
        number = self._next
        if number % GROUP == 0:
            self._turn(number // GROUP)
        if number == len(self._blocks):
            self._blocks.append(self.device.pinned(self.count))
        self._next = (number + 1) % (2 * GROUP)
        return number, self._blocks[number]

    def _turn(self, group: int) -> None:
        """Go over to a group: all copies so far were enqueued in front of now."""
        if not self._blocks:
            return
        left = 1 - group
        if self._done[left] is None:
            self._done[left] = self.device.new_event()
        self._done[left].record(self.device.current_stream())
        if self._done[group] is not None:
            self._done[group].synchronize()
