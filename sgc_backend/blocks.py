"""Memory in the layouts of a runner's buckets: on the device, and pinned on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .input_spec import InputSpec

SLICES_REMEMBERED = 512  # numbers of rows whose views are kept

Step = Callable[[Sequence[torch.Tensor]], None]  # stages inputs


class Block:
    """Memory in the layouts of the buckets.

    Args:
        memory: uint8.
        specs: in the order in which they lie.
    """

    def __init__(self, memory: torch.Tensor, specs: Sequence[InputSpec]) -> None:
        self.memory, self.specs = memory, specs
        self._views: dict[int, list[torch.Tensor]] = {}
        self._slices: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor | None]]] = {}

    def views(self, size: int) -> list[torch.Tensor]:
        """The inputs for ``size`` rows; the same objects every time.

        Each has a storage of its own over its bytes: to a compiler it is a tensor, not a view into a larger one whose
        offset would be one more dynamic size.
        """
        found = self._views.get(size)
        if found is None:
            storage, start, found = self.memory.untyped_storage(), 0, []
            for spec in self.specs:
                count = spec.bytes(size)
                part = storage[start : start + count]
                with torch.inference_mode(False):
                    empty = torch.empty(0, dtype=spec.dtype, device=self.memory.device)
                    found.append(empty.set_(part, 0, spec.size(size)))
                start += count
            self._views[size] = found
        return found

    def slices(self, size: int, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """For each input the part that n rows fill, and the part behind it; None where there is nothing behind."""
        found = self._slices.get((size, n))
        if found is None:
            heads, tails = [], []
            for spec, view in zip(self.specs, self.views(size), strict=True):
                dim = spec.dim
                if dim is None or n == size:
                    heads.append(view)
                    tails.append(None)
                    continue
                split = spec.size(n)[dim]
                heads.append(view.narrow(dim, 0, split))
                tails.append(view.narrow(dim, split, view.shape[dim] - split))
            found = heads, tails
            remember(self._slices, (size, n), found)
        return found


class HostBlock:
    """A pinned block, and how inputs of the host are staged through it.

    Attributes:
        padded: holds the layout and the rows whose padding the block is known to hold, or None. A list, because the
            steps change it and must not keep the block that they are kept in.
        steps: by size of the bucket, rows, and which inputs lie on the host.
    """

    def __init__(self, memory: torch.Tensor, specs: Sequence[InputSpec]) -> None:
        self.block = Block(memory, specs)
        self.padded: list[tuple[int, int] | None] = [None]
        self.steps: dict[tuple[int, int, tuple[int, ...]], Step] = {}


def remember(found: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep ``value`` in place of what was kept the longest, where there is much; returns it."""
    while len(found) >= SLICES_REMEMBERED:
        del found[next(iter(found))]
    found[key] = value
    return value
