"""Segments that grow in place, turned on and off for the captures of one device.

Note [Growing in place]
    Segment by segment, a pool fragments when sizes don't come largest first: a larger recording finds no free run that
    is long enough (measured on an H200, 4 layers of hidden 2048: 364 MB ascending against 278 MB descending). Where the
    order is not the caller's to choose (lazy captures, and sessions that say so) new segments are expandable while a
    recording is made: the pool is one span that grows at its end, 266 MB in every order. The price is CUDA's: such a
    pool can't be emptied and kept, so when it falls idle it is given up, and the next capture has a new handle.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .device import Device

_lock = threading.RLock()
_growing: dict[tuple[str, int], int] = {}  # captures in progress that let segments grow, by device


@contextlib.contextmanager
def growing_in_place(device: Device) -> Iterator[None]:
    """While open, the allocator's new segments on ``device`` can grow."""
    key = (device.name, device.index)
    with _lock:  # lanes may grow at once: the first one turns it on, the last one off
        _growing[key] = _growing.get(key, 0) + 1
        if _growing[key] == 1:
            device.grow_in_place(True)
    try:
        yield
    finally:
        with _lock:
            _growing[key] -= 1
            if _growing[key] == 0:
                device.grow_in_place(False)
