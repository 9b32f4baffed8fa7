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
        address: of the first element.
        nbytes: from there to behind the last element.
        unowned: what recordings see.
    """

    tensor: weakref.ref[torch.Tensor]
    storage: Any
    address: int
    nbytes: int
    unowned: torch.Tensor


class StaticInputs:
    """The static inputs of one graph; of each the last one is remembered."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: dict[int, BoundStatic] = {}
        self._storages: tuple[Any, ...] = ()

    def bound(self, index: int, arg: torch.Tensor, *, whole: bool) -> BoundStatic:
        """Argument ``index`` of a call; ``whole``: see `unowned_like`."""
        last = self._last.get(index)
        if last is None or not _is_still(last, arg):
            from torch.multiprocessing.reductions import StorageWeakRef

            last = self._last[index] = BoundStatic(
                weakref.ref(arg),
                StorageWeakRef(arg.untyped_storage()),
                arg.data_ptr(),
                span_bytes(arg.size(), arg.stride(), arg.dtype),
                unowned_like(self._device, arg, whole=whole),
            )
        return last

    def as_one(self, storages: Sequence[Any]) -> tuple[Any, ...]:
        """A recording's storages as a tuple, the same as the last one's where that holds the same."""
        last = self._storages
        if len(last) != len(storages) or any(a is not b for a, b in zip(last, storages, strict=True)):
            last = self._storages = tuple(storages)
        return last  # what is remembered may have been cleared by another thread

    def clear(self) -> None:
        self._last.clear()
        self._storages = ()


def _is_still(last: BoundStatic, arg: torch.Tensor) -> bool:
    """Whether ``arg`` is what was bound, in the same memory and of the same shape; a piece may have reshaped what it
    saw of it in place."""
    seen = last.unowned
    return (
        last.tensor() is arg
        and last.address == arg.data_ptr()
        and last.storage.cdata == arg.untyped_storage()._cdata
        and seen.size() == arg.size()
        and seen.stride() == arg.stride()
        and seen.dtype is arg.dtype
    )
