"""What a recording in the making knows: the values that its pieces see, and how those lie at other sizes.

Note [Sizes of a bucket]
    A recording for a bucket is made at the bucket's sizes, while the call that it is made with, and the call that its
    cuts were observed in, have smaller ones. So a value has several geometries: *wide* in the bucket, *seen* when its
    cut was observed, *given* in the call at hand. What a cut returned is known at the observed size alone; at the
    bucket's it is taken from the graph's symbolic sizes, if those agree with what was observed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .capture import unowned_like
from .device import outside_inference_mode
from .errors import CaptureError
from .extents import Extents, Geometry, tails
from .groups import HostRef, Ref, Split
from .inputs import STATIC, Input
from .plan import Plan, Real
from .pool import GraphPool
from .steps import Frame, into_slot
from .symbols import Symbols
from .walk import CutResult


class PaddingError(CaptureError):
    """The recording can't be made for other sizes than the call's."""


@dataclass(frozen=True)
class Bucket:
    """The sizes that a padded recording is made for.

    Attributes:
        extents: geometry of the graph's values.
        symbols, sizes: the key's symbols, and their values in the bucket.
        observed: their values in the call that was warmed up with.
        given: their values in the call that is recorded with.
        dynamic: those whose real value may be another than the bucket's.
    """

    extents: Extents
    symbols: tuple[Any, ...]
    sizes: tuple[Any, ...]
    observed: tuple[Any, ...]
    given: tuple[Any, ...]
    dynamic: frozenset[Any]


class Recording:
    """The state of one recording; `CutResults` and `Outputs` add what each is about."""

    def __init__(
        self,
        pool: GraphPool,
        split: Split,
        compiled: Sequence[Callable[..., Any]],
        inputs: Sequence[Input],
        symbols: Symbols,
        key_symbols: frozenset[Any],
        observed: Mapping[str, CutResult],
        args: Sequence[Any],
        detached: Collection[str],
        inference: Collection[str],
        itself: Mapping[str, int],
        clone: bool,
        name: str,
        key: str,
        bucket: Bucket | None,
    ) -> None:
        self.bucket = bucket
        self.wide: dict[str, Geometry] = {}  # in a bucket, each value's geometry there, when observed, and now
        self.seen: dict[str, Geometry] = {}
        self.given: dict[str, Geometry] = {}
        self.other: dict[str, Geometry] = {}  # and at sizes that are none of these
        self.instead: dict[Any, int] = {}
        self.pool, self.split, self.compiled, self.args = pool, split, compiled, args
        self.inputs = {i.name: i for i in inputs}
        self.symbols, self.key_symbols, self.observed = symbols, key_symbols, observed
        self.detached, self.inference, self.itself = detached, inference, itself
        self.clone, self.name, self.key = clone, name, key
        self.what = f"{name}, key {key}"
        self.plan = Plan(pool, pool.generation, len(args))
        if bucket is not None:
            self.wide, self.seen = bucket.extents.at(bucket.sizes), bucket.extents.at(bucket.observed)
            self.given = bucket.extents.at(bucket.given)
            self.other = bucket.extents.at(
                [2 * n + 3 if s in bucket.dynamic else n for s, n in zip(bucket.symbols, bucket.sizes, strict=True)]
            )
            self.instead = {s: n for s, n in zip(bucket.symbols, bucket.sizes, strict=True) if s in bucket.dynamic}
            self.plan.geometry = bucket.extents.at
        self.env: dict[str, Any] = {}  # tensors that recordings see, held until their last reader is recorded
        self._made_unowned: dict[Any, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}  # what a view in env lies in, held as long as the view
        self.in_pool: set[str] = set()  # names in slots whose memory is the pool's
        self.slots: dict[str, int] = {}  # values that cuts hand on, by frame index
        self.last_use, self.read_by_piece = self._uses()
        made = {name for g in split.pieces for name in g.outputs}
        taken = {name for g in split.cuts for name in g.taken}
        # Inputs of which a piece hands a view to a cut.
        self.viewed = frozenset().union(*(split.roots.get(name, frozenset()) for name in made & taken))

    def _uses(self) -> tuple[dict[int, list[str]], set[str]]:
        by_piece = set(self.split.taken_by_pieces)
        for group in reversed(self.split.cuts):
            # What a piece writes through a cut's view of another cut's result must be written to that result.
            for name in by_piece.intersection(group.outputs):
                alias = self.observed[name].alias
                source = group.inputs[alias[0]] if alias is not None else None
                if isinstance(source, Ref) and getattr(self.observed.get(source.name), "size", None) is not None:
                    by_piece.add(source.name)
        # Outputs and written buffers are read when the last segment is done; nothing recorded may reuse them.
        kept = {out.name for out in self.split.outputs if isinstance(out, Ref)}
        kept |= {i.name for i in self.inputs.values() if i.written} | self.split.returned
        uses: dict[int, list[str]] = {}
        for name, index in self.split.last_uses.items():
            if name not in kept:
                uses.setdefault(index, []).append(name)
        return uses, by_piece

    def _wide(
        self,
        name: str,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        expected: Mapping[str, Geometry] | None = None,
    ) -> Geometry | None:
        """A value's geometry in the bucket; None where there is no bucket.

        Raises:
            CaptureError: at the real size it isn't what the graph was traced with, so nothing is known of the bucket's.
        """
        if self.bucket is None:
            return None
        seen = (self.seen if expected is None else expected).get(name)
        if seen is None:
            raise PaddingError(f"{self.what}: the size of {name} is not known for other calls than this one")
        same = stride is None or all(n == 1 or a == b for n, a, b in zip(seen.size, seen.stride, stride, strict=True))
        if seen.size != tuple(size) or not (same or 0 in seen.size):
            raise PaddingError(
                f"{self.what}: {name} was traced with size {seen.size} and stride {seen.stride}, "
                f"and came with {tuple(size)} and {tuple(stride or ())}"
            )
        return self.wide[name]

    def _is_static(self, name: str) -> bool:
        return name in self.inputs and self.inputs[name].kind == STATIC

    def _known(self, name: str) -> Geometry:
        found = self.wide.get(name)
        if found is None:
            raise PaddingError(f"{self.what}: the size of {name} is not known for other calls than this one")
        return found

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        device = self.pool.device
        with self.pool.allocating(), outside_inference_mode():
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device.torch_device)

    def _unowned(self, name: str, *, whole: bool = False) -> torch.Tensor:
        """See `unowned_like`. Layers leave their values in the same memory by turns: one tensor serves all that lie
        alike, for they are as many as the recordings and nobody but cuts is given them."""
        tensor = self.env[name]
        if whole:
            return unowned_like(self.pool.device, tensor, whole=True)
        key = (tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        found = self._made_unowned.get(key)
        if found is None:
            found = self._made_unowned[key] = unowned_like(self.pool.device, tensor)
        return found

    def _storage_under(self, name: str) -> torch.UntypedStorage:
        """The storage that a value lies in: an unowned view's is that of the tensor which it was made over."""
        return self.held.get(name, self.env[name]).untyped_storage()

    def _number(self, out: HostRef) -> Callable[[Frame], Any]:
        symbols = self.symbols  # and not self: a plan must not keep the call's arguments
        if symbols_of(out.expr) <= self.key_symbols - self.instead.keys():
            value = symbols.evaluate(out.expr, self.args, out.kind)
            return lambda frame: value
        return lambda frame: symbols.evaluate(out.expr, frame, out.kind)

    def _slot(self, name: str) -> Callable[[Real], Callable[[Any, Frame], None]]:
        slot = self.slots[name] = len(self.args) + len(self.slots)
        sink = into_slot(slot)
        return lambda real: sink


def pad_copies(buffer: torch.Tensor, real: Geometry, wide: Geometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What to copy at each replay into the rows behind the real ones. They may hold anything, but in what may be an
    index: that must stay in its table, so it repeats a real row."""
    return tails(buffer, real, wide) if may_be_indices(buffer.dtype) else []


def may_be_indices(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def symbols_of(expr: Any) -> frozenset[Any]:
    return frozenset(getattr(expr, "free_symbols", ()))
