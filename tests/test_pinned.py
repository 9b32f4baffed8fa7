"""PinnedRing: blocks in turn, and none before its last copy is done."""

from __future__ import annotations

from typing import Any

import torch

from sgc_backend import emulated
from sgc_backend.devices import device_of
from sgc_backend.pinned import GROUP, PinnedRing


class Events:
    """Stands for a device: says which copies an event that was waited for lies behind."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0
        self.events = 0

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def current_stream(self) -> None:
        return None

    def new_event(self) -> Any:
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Events) -> None:
        self.device, self.behind = device, 0

    def record(self, stream: Any) -> None:
        self.behind = self.device.enqueued

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.behind)


def test_a_block_is_filled_again_only_when_its_last_copy_is_done() -> None:
    device, last = Events(), {}
    ring = PinnedRing(device, 8)
    for step in range(1, 10 * GROUP):
        number, _ = ring.take()
        assert device.done >= last.get(number, 0)
        assert device.enqueued - device.done >= min(GROUP, device.enqueued)  # nor is anything waited for that is new
        device.enqueued = last[number] = step
    assert device.events == 2


def test_blocks_come_in_turn_and_lie_apart() -> None:
    ring = PinnedRing(device_of(emulated), 16)
    taken = [ring.take() for _ in range(4 * GROUP)]
    assert [number for number, _ in taken] == [k % (2 * GROUP) for k in range(4 * GROUP)]
    addresses = [memory.data_ptr() for _, memory in taken]
    assert len(set(addresses)) == 2 * GROUP
    assert addresses[: 2 * GROUP] == addresses[2 * GROUP :]
    assert all(memory.shape == (16,) and memory.dtype is torch.uint8 for _, memory in taken)
