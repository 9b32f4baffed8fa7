"""Static inputs as recordings see them: bound once, and again where the caller's tensor is another or lies elsewhere.

A recording must not keep a caller's weights alive, so it sees an unowned tensor at their address, which every replay
checks. The recordings of a graph mostly find the same hundreds of weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .capture import unowned_like
from .device import Device
from .inputs import span_bytes


@dataclass(frozen=True)
class BoundStatic:
    """One static input.

    Attributes:
        tensor, storage: weak references to the caller's tensor and to its storage, which expires with the memory.
        place: as `Plan.static` has it.
        unowned: what recordings see.
    """

    tensor: weakref.ref[torch.Tensor]
    storage: Any
    place: tuple[int, int, int, str]
    unowned: torch.Tensor


class StaticInputs:
    """The static inputs of one graph; of each the last one is remembered."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: dict[int, BoundStatic] = {}
        self._storages: tuple[Any, ...] = ()

    def known(self, index: int, arg: torch.Tensor) -> BoundStatic | None:
        """Argument ``index`` of a call where it was bound before: in the same memory and of the same shape, which a
        piece may have changed in place in what it saw."""
        last = self._last.get(index)
        if last is None or last.tensor() is not arg or last.place[1] != arg.data_ptr():
            return None
        seen = last.unowned
        still = seen.size() == arg.size() and seen.stride() == arg.stride() and seen.dtype is arg.dtype
        return last if still and last.storage.cdata == arg.untyped_storage()._cdata else None

    def bound(self, index: int, arg: torch.Tensor, label: str, *, whole: bool) -> BoundStatic:
        """Argument ``index`` of a call, bound anew; ``label``: what users call it; ``whole``: see `unowned_like`."""
        from torch.multiprocessing.reductions import StorageWeakRef

        found = self._last[index] = BoundStatic(
            weakref.ref(arg),
            StorageWeakRef(arg.untyped_storage()),
            (index, arg.data_ptr(), span_bytes(arg.size(), arg.stride(), arg.dtype), label),
            unowned_like(self._device, arg, whole=whole),
        )
        return found

    def as_one(self, storages: Sequence[Any]) -> tuple[Any, ...]:
        """A recording's storages as a tuple, the same as the last one's where that holds the same."""
        last = self._storages
        if len(last) != len(storages) or any(a is not b for a, b in zip(last, storages, strict=True)):
            last = self._storages = tuple(storages)
        return last  # what is remembered may have been cleared by another thread

    def clear(self) -> None:
        self._last.clear()
        self._storages = ()
