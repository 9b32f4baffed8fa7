"""Where cuts' results land: in buffers that recordings read, in the memory of their arguments, or with the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .capture import with_bits
from .errors import CaptureError
from .extents import Geometry, copy_elements, prefix
from .groups import Group, Ref
from .inputs import has_overlap, span_bytes
from .plan import Real
from .recording import PaddingError, Recording, may_be_indices, pad_copies
from .spans import storage_span
from .steps import Frame, expect_alias, into_both, into_buffer
from .walk import CutResult


class CutResults(Recording):
    """Makes the buffers and sinks of cuts' results."""

    def _make_result_buffers(self, group: Group, template: list[Any]) -> None:
        """Buffers for fresh results that a piece reads; results over one storage lie in one buffer, as they did."""
        families: dict[int, list[tuple[int, int]]] = {}  # first result of a storage -> (result, byte offset to it)
        for k, name in enumerate(group.outputs):
            seen = self.observed[name]
            fresh = self._stays_in(group, name, template) is None and name not in group.sized_by_data
            if fresh and seen.size is not None:
                root, offset = seen.sibling or (k, 0)
                families.setdefault(root, []).append((k, offset))
        for members in families.values():
            names = [group.outputs[k] for k, _ in members]
            if not any(name in self.read_by_piece for name in names):
                continue
            shapes = [self._shape_of_result(name) for name in names]
            around = any(name in self.split.reached_around for name in names)
            if around and not any(self.observed[name].fills for name in names):
                raise CaptureError(
                    f"{self.what}: as_strided may reach around cut result {names[0]}, which is only a part of its "
                    f"memory; return a copy of it from the cut"
                )
            if len(members) == 1:
                self.env[names[0]] = self._result_buffer(*shapes[0])
                continue
            offsets = [
                self._offset(group.outputs[members[0][0]], n, o) for n, (_, o) in zip(names, members, strict=True)
            ]
            spans = [(o, span_bytes(*shape)) for o, shape in zip(offsets, shapes, strict=True)]
            start = min(offset for offset, _ in spans)
            whole = self._allocate((max(o + n for o, n in spans) - start,), (1,), torch.uint8)
            memory = storage_span(whole) if around else None
            for name, (offset, _), shape in zip(names, spans, shapes, strict=True):
                at = whole.data_ptr() + offset - start
                self.env[name] = self.pool.device.unowned(at, *shape, memory)
                self.held[name] = whole

    def _shape_of_result(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Size, stride and dtype of a cut result as recordings read it."""
        seen = self.observed[name]
        wide = self._wide(name, seen.size)
        # In a bucket the rows are copied anyway, so they may lie as the graph was traced with; what has no more rows
        # there lies as it came, for what pieces make of it follows its strides.
        if wide is None or (wide.size == seen.size == self.other[name].size and wide.factors is None):
            return seen.size, seen.stride, seen.dtype
        return wide.size, wide.stride, seen.dtype

    def _offset(self, base: str, name: str, seen: int) -> int:
        """Bytes from one value's first element to another's over the same storage: ``seen`` at the real sizes."""
        if self.bucket is None or base == name:
            return seen
        itemsize = self.observed[name].dtype.itemsize
        if base not in self.seen or (self.seen[name].offset - self.seen[base].offset) * itemsize != seen:
            raise PaddingError(f"{self.what}: {name} lies at another place in {base} than the graph was traced with")
        return (self.wide[name].offset - self.wide[base].offset) * itemsize

    def _alias_base(self, seen: CutResult, template: list[Any]) -> torch.Tensor | None:
        """The bound argument that a result is a view of; None where it is fresh or a view of the caller's own."""
        base = template[seen.alias[0]] if seen.alias is not None else None
        return base if isinstance(base, torch.Tensor) else None

    def _stays_in(self, group: Group, name: str, template: list[Any]) -> torch.Tensor | None:
        """The bound argument that a result is a view of, at a place that is the same for all sizes.

        In a bucket a view that moves with the size (the last row) is copied to where the recordings read it, and for
        the caller.

        Raises:
            PaddingError: it moves, and something may write through it, or the caller gets what lies in the same memory.
        """
        base = self._alias_base(self.observed[name], template)
        if base is None or self.bucket is None or name in group.sized_by_data:
            return base
        source = group.inputs[self.observed[name].alias[0]].name
        if all(n in self.wide for n in (name, source)):
            wide, other = self.wide[name], self.other[name]
            base_wide, base_other = self.wide[source], self.other[source]
            at, there = wide.offset - base_wide.offset, other.offset - base_other.offset
            # Integers may be indices, which a cut's view would leave as they are behind the real rows.
            indices = may_be_indices(self.observed[name].dtype) and wide.size != other.size
            stays = at == there and base_wide.factors is None and not indices
            if stays and _strides_alike(wide, other) and _strides_alike(base_wide, base_other):
                return base
        later = (g for g in self.split.groups if g.index >= group.index)
        memory = self.split.storages.get(name) or frozenset()
        others = (o.name for o in self.split.outputs if isinstance(o, Ref) and o.name != name)
        shared = self.split.roots.get(name) or any(memory & self.split.storages.get(o, frozenset()) for o in others)
        if any(g.mutates for g in later) or (self._is_output(name) and (shared or name not in self.wide)):
            raise PaddingError(f"{self.what}: {name} is a view that lies elsewhere in {source} at other sizes")
        return None

    def _is_output(self, name: str) -> bool:
        return any(isinstance(o, Ref) and o.name == name for o in self.split.outputs)

    def _sink(self, group: Group, name: str, template: list[Any]) -> Callable[[Real], Callable[[Any, Frame], None]]:
        seen = self.observed[name]
        base = self._stays_in(group, name, template)
        if name in group.sized_by_data:
            if base is not None:
                self.in_pool.add(name)
            return self._slot(name)
        if base is not None:
            return self._alias_sink(group, name, base)
        if name in self.env:
            buffer, wide = self._unowned(name), self.wide.get(name)
            # A view of the caller's own tensor must come back as one; its input is not written, or it were bound.
            keep = self._slot if self._alias_base(seen, template) is None else self._copied
            slot = keep(name) if seen.alias is not None and self._is_output(name) else None

            def sink(real: Real) -> Callable[[Any, Frame], None]:
                if real is None or wide is None:
                    land = into_buffer(buffer, name)
                else:
                    assert real[name].factors is None, f"{name}: a cut's result has several factors in a dimension"
                    land = into_buffer(prefix(buffer, real[name], wide), name, pad_copies(buffer, real[name], wide))
                return land if slot is None else into_both(land, slot(real))

            return sink
        if name in self.read_by_piece:
            raise CaptureError(f"{self.what}: cut result {name} is no strided tensor, but a piece reads it")
        if base is None and self._alias_base(seen, template) is not None and self._is_output(name):
            return self._copied(name)
        return self._slot(name)

    def _alias_sink(
        self, group: Group, name: str, base: torch.Tensor
    ) -> Callable[[Real], Callable[[Any, Frame], None]]:
        """The sink of a result that is a view of the cut's argument ``base``."""
        seen, source, device = self.observed[name], group.inputs[self.observed[name].alias[0]].name, self.pool.device
        wide = self._wide(name, seen.size, seen.stride)
        at = base.data_ptr() + self._offset(source, name, seen.alias[1])
        size, stride = (seen.size, seen.stride) if wide is None else (wide.size, wide.stride)
        memory = storage_span(base) if name in self.split.reached_around else None
        self.env[name] = view = with_bits(device.unowned(at, size, stride, seen.dtype, memory), *seen.bits)
        self.held[name] = self.held.get(source, self.env.get(source))
        if wide is None:
            expected = expect_alias(view, name) if view.numel() else _ignore
            return lambda real: expected
        offset = at - base.data_ptr()

        def sink(real: Real) -> Callable[[Any, Frame], None]:
            here = device.unowned(base.data_ptr() + offset, real[name].size, real[name].stride, seen.dtype)
            return expect_alias(with_bits(here, *seen.bits), name) if here.numel() else _ignore

        return sink

    def _copied(self, name: str) -> Callable[[Real], Callable[[Any, Frame], None]]:
        """As `_slot`, for a view of memory of the pool's that later pieces may take: copied at once."""
        slot = self.slots[name] = len(self.args) + len(self.slots)

        def make(real: Real) -> Callable[[Any, Frame], None]:
            size, stride = real[name].size, real[name].stride

            def sink(value: torch.Tensor, frame: Frame) -> None:
                out = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
                copy_elements(out, value)
                frame[slot] = out

            return sink

        return make

    def _result_buffer(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if has_overlap(size, stride) or 0 in stride:
            stride = torch.empty(tuple(size), device="meta").stride()
        return self._allocate(size, stride, dtype)


def _ignore(value: Any, frame: Frame) -> None:
    """The sink of a result that lies in its argument anyway and has no bytes to check."""


def _strides_alike(one: Geometry, other: Geometry) -> bool:
    """Whether two sizes of a value lie in memory with the same strides."""
    rows = zip(one.size, one.stride, other.size, other.stride, strict=True)
    return all(a == b for n, a, m, b in rows if n != 1 or m != 1)
