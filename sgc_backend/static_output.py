"""A recording's result: new containers and tensor objects at every replay, over the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .capture import unowned_like
from .pool import GraphPool
from .tree import flatten, unflatten


class StaticOutput:
    """A callable's result as every replay hands it out: new containers and tensor objects over the same bytes.

    Attributes:
        leaves: its leaves: unowned tensors of the pool, and values that are handed out as they are.
        ours: of each leaf whether it is such a tensor.
        is_tensor: it is a tensor of the pool.
        views: for whoever cuts it to the rows of calls: what was made for a number of rows.
    """

    def __init__(self, pool: GraphPool, out: Any) -> None:
        inside = pool.contains()
        leaves, self._spec = flatten(out)
        self.ours = [isinstance(leaf, torch.Tensor) and inside(leaf) for leaf in leaves]
        self.leaves = [
            unowned_like(pool.device, leaf) if ours else leaf for leaf, ours in zip(leaves, self.ours, strict=True)
        ]
        self.views: dict[int, Any] = {}
        self.is_tensor = isinstance(out, torch.Tensor) and self.ours[0]
        self._made = _plainly_made(out, self.leaves)

    def __call__(self) -> Any:
        if self.is_tensor:
            return self.leaves[0].detach()
        return self.of([leaf.detach() if ours else leaf for leaf, ours in zip(self.leaves, self.ours, strict=True)])

    def of(self, leaves: list[Any]) -> Any:
        """The result with these leaves in the places of its own."""
        return unflatten(leaves, self._spec) if self._made is None else self._made(leaves)


def _plainly_made(out: Any, leaves: list[Any]) -> Callable[[list[Any]], Any] | None:
    """What makes ``out`` of its leaves where it is a tensor, or a plain container of leaves; None: `unflatten` must."""
    kind = type(out)
    if kind is torch.Tensor:
        return lambda made: made[0]
    if kind not in (tuple, list, dict) or len(out) != len(leaves):
        return None
    held = out.values() if kind is dict else out
    if any(type(value) is not torch.Tensor and value is not None and type(value) not in (int, str) for value in held):
        return None
    if kind is dict:
        keys = list(out)
        return lambda made: dict(zip(keys, made, strict=True))
    return kind
