"""What a runner's callable returns: which dimensions grow with the rows, and cutting them to a call's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .errors import CaptureError, OptionError
from .rows import Grown, cut_to, growth
from .static_output import StaticOutput
from .tree import flatten, hidden_tensors, unflatten

VIEWS_REMEMBERED = 64  # numbers of rows of a bucket whose views are kept
HOST_VALUES = (bool, int, float, complex, str, bytes, torch.Size)


class Results:
    """Learnt by running the callable at two sizes, and checked at each that is recorded.

    Args:
        name: whose errors these are.
        sizes: the two sizes.
        run: runs the callable at a size.

    Raises:
        OptionError: the structure differs between the sizes, a tensor's shape doesn't go with the rows, or a number
            does.
    """

    def __init__(self, name: str, sizes: tuple[int, int], run: Callable[[int], Any]) -> None:
        self.name, self.sizes = name, sizes
        self._hosts: dict[Hashable, dict[int, Any]] = {}  # of each variant the values that are no tensors
        hosts: dict[int, Any] = {}
        shapes = []
        for size in sizes:
            leaves, _ = flatten(run(size))
            shapes.append([tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in leaves])
            self._check_host_values(hosts, leaves, size)
        one, two = shapes
        if len(one) != len(two) or any((a is None) != (b is None) for a, b in zip(one, two, strict=True)):
            raise OptionError(
                f"{name}: the callable returned {len(one)} values for {sizes[0]} rows and others for {sizes[1]}; it "
                f"must return the same structure at every size"
            )
        self._shapes = one
        self.grown: list[Grown] = [
            () if a is None or b is None else growth(f"{name}: result {k}", a, sizes[0], b, sizes[1])
            for k, (a, b) in enumerate(zip(one, two, strict=True))
        ]

    def check(
        self, out: Any, size: int, variant: Hashable, inside: Callable[[torch.Tensor], bool]
    ) -> list[torch.Tensor]:
        """The tensors in what was recorded for ``size`` rows; ``inside``: whether one lies in the pool.

        Raises:
            CaptureError: one has another shape than the two sizes told, or lies in an object that can't be copied.
            OptionError: a number goes with the rows.
        """
        leaves, _ = flatten(out)
        self._check_host_values(self._hosts.setdefault(variant, {}), leaves, size)
        key = f"{size}" if variant is None else f"{size}/{variant}"
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if any(inside(tensor) for tensor in hidden_tensors(leaf)):
                    raise CaptureError(
                        f"{self.name}, key {key}: result {k} is a {type(leaf).__name__} that holds recorded tensors, "
                        f"which can't be cut to the rows of a call there; return tensors, tuples, lists, dicts or "
                        f"dataclasses, or register the class with torch.utils._pytree"
                    )
                continue
            known = self._shapes[k] if k < len(self._shapes) else None
            expected = list(known) if known is not None else None
            if expected is not None:
                for dim, rows in self.grown[k]:
                    expected[dim] = rows.length(size)
            if expected != list(leaf.shape):
                raise CaptureError(
                    f"{self.name}, key {key}: result {k} has shape {tuple(leaf.shape)}, expected {expected} from its "
                    f"shapes at {self.sizes[0]} and {self.sizes[1]} rows; it must grow with the rows alone"
                )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def cut(self, out: Any, size: int, n: int, *, clone: bool) -> Any:
        """What a replay of ``size`` rows returned, cut to n rows; ``clone``: in memory of its own.

        Tensor objects are the caller's: whoever gives one another shape in place must not reach the runner's buffers.
        """
        if type(out) is StaticOutput:
            views = out.views.get(n)
            if views is None:
                views = self._views(out, size, n)
            if type(views) is torch.Tensor:
                return views.clone() if clone else views.detach()
            if clone:
                return out.of([view.clone() if isinstance(view, torch.Tensor) else view for view in views])
            return out.of([view.detach() if isinstance(view, torch.Tensor) else view for view in views])
        if type(out) is torch.Tensor:
            leaf = out if n == size else cut_to(out, self.grown[0], n)
            return leaf.clone() if clone else leaf.detach()
        leaves, spec = flatten(out)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf = leaf if n == size else cut_to(leaf, self.grown[k], n)
                leaves[k] = leaf.clone() if clone else leaf.detach()
        return unflatten(leaves, spec)

    def _views(self, out: StaticOutput, size: int, n: int) -> Any:
        """The leaves, cut to n rows, or the tensor where it is one; kept for later calls of n rows."""
        with torch.inference_mode(False), torch.no_grad():  # they outlive the mode of this call
            views: Any = [
                cut_to(leaf, grown, n) if isinstance(leaf, torch.Tensor) and n != size else leaf
                for leaf, grown in zip(out.leaves, self.grown, strict=True)
            ]
        if out.is_tensor:
            views = views[0]
        while len(out.views) >= VIEWS_REMEMBERED:
            del out.views[next(iter(out.views))]
        out.views[n] = views
        return views

    def _check_host_values(self, known: dict[int, Any], leaves: Sequence[Any], size: int) -> None:
        """Refuse numbers and texts in the result that go with the rows: a recording has those of its bucket.

        Args:
            known: those of other sizes, by position; filled by the first.
        """
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, HOST_VALUES) and known.setdefault(k, leaf) != leaf and leaf == leaf:
                raise OptionError(
                    f"{self.name}: result {k} is {leaf!r} for {size} rows and {known[k]!r} for others, but a recording "
                    f"returns its bucket's, whatever the rows of a call are; leave it out, or return a tensor"
                )
