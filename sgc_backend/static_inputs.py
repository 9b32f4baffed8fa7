"""Static inputs as recordings see them: bound once, and again where the caller's tensor is another or lies elsewhere.

A recording must not keep a caller's weights alive, so it sees an unowned tensor at their address, which every replay
checks. The recordings of a graph mostly find the same hundreds of weights.

Nor does anything here refer to the caller's tensor weakly: `torch.utils.swap_tensors`, and with it what modules do
under `torch.__future__.set_swap_module_params_on_conversion`, refuses a tensor that has weak references. Its storage
may have some.
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
        memory, storage: weak references to the storage of the caller's tensor: to the object, for who waits for its
            end, and one of torch's, which knows it by its address.
        place: as `Plan.static` has it.
        unowned: what recordings see.
    """

    memory: weakref.ref[torch.UntypedStorage]
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
        """Argument ``index`` of a call where it is what was bound: the same elements in the same memory; a piece may
        have reshaped what it saw of it in place."""
        last = self._last.get(index)
        if last is None or last.place[1] != arg.data_ptr() or last.storage.cdata != arg.untyped_storage()._cdata:
            return None
        seen = last.unowned
        still = seen.size() == arg.size() and seen.stride() == arg.stride() and seen.dtype is arg.dtype
        return last if still and (seen.is_conj(), seen.is_neg()) == (arg.is_conj(), arg.is_neg()) else None

    def bound(self, index: int, arg: torch.Tensor, label: str, *, whole: bool) -> BoundStatic:
        """Argument ``index`` of a call, bound anew; ``label``: what users call it; ``whole``: see `unowned_like`."""
        from torch.multiprocessing.reductions import StorageWeakRef

        found = self._last[index] = BoundStatic(
            weakref.ref(arg.untyped_storage()),
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
