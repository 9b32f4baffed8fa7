"""The sizes and strides of a graph's values as functions of its symbols, and the real rows of a larger buffer.

A piece that runs at a bucket's size leaves its values in buffers of that size. Of each, a cut and the caller see the
real rows alone: the *prefix*, in every dimension the first elements. Where a dimension was merged of several (a batch
of sequences flattened), those of every *factor* (see prefix.py) are meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from .facts import example, free_unbacked
from .forms import expression
from .inputs import distinct_elements, has_overlap
from .nodes import leaf_name, leaves
from .symbols import code, function_of

SIZES_REMEMBERED = 16  # values of the symbols for which geometries are kept: a recording asks for the same ones often


class Geometry(NamedTuple):
    """A value's size, stride and storage offset in elements; ``factors``: the sizes of every dimension's factors, where
    some dimension has more than one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    factors: tuple[int, ...] | None


class Extents:
    """The geometry of values by name, for values of the symbols.

    Args:
        gm: Dynamo's graph.
        names: the values that are asked about.
        layouts: the factors of their dimensions; those missing have one each.
        symbols: in the order in which `at` takes their values.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        names: Collection[str],
        layouts: Mapping[str, tuple[tuple[Any, ...], ...]],
        symbols: Sequence[sympy.Symbol],
    ) -> None:
        rows: dict[str, str] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        known = set(symbols)
        for node in gm.graph.nodes:
            if node.op == "output" or example(node) is None:
                continue
            for path, value in leaves(node):
                name = leaf_name(node, path)
                if name not in names or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                    continue
                if not free_unbacked(value):
                    text = _row(value, layouts.get(name), known)
                    if text is not None:
                        rows[name] = text
                        self.dtypes[name] = value.dtype
        # Layers have values of the same geometry: each is computed, and kept by recordings, once.
        alike = {row: place for place, row in enumerate(dict.fromkeys(rows.values()))}
        self._places = {name: alike[row] for name, row in rows.items()}
        # One function for all of them: sympy takes some 50 µs to put a number in place of a symbol.
        self._made: dict[tuple[Any, ...], dict[str, Geometry]] = {}
        self._at = function_of(symbols, f"({''.join(f'{row}, ' for row in alike)})")

    def at(self, values: Sequence[Any]) -> dict[str, Geometry]:
        """Each value's geometry, given the symbols' values; shared by callers, so read only."""
        key = tuple(values)
        found = self._made.get(key)
        if found is None:
            made = [Geometry(*row) for row in self._at(*key)]
            found = {name: made[place] for name, place in self._places.items()}
            while len(self._made) >= SIZES_REMEMBERED:
                self._made.pop(next(iter(self._made)), None)
            self._made[key] = found
        return found


def _row(value: torch.Tensor, layout: tuple[tuple[Any, ...], ...] | None, known: set[sympy.Symbol]) -> str | None:
    factors = [f for dim in layout or () for f in dim] if layout and any(len(dim) > 1 for dim in layout) else None
    offset = sympy.sympify(expression(value.storage_offset()))
    # Where a call's tensor begins in its memory is a symbol of its own. Offsets are only compared between a value and
    # what it is a view of, which begin there both.
    offset = offset.xreplace({s: sympy.Integer(0) for s in offset.free_symbols - known})
    expressions = [expression(v) for v in (*value.shape, *value.stride(), offset, *(factors or ()))]
    if any(getattr(e, "free_symbols", set()) - known for e in expressions):
        return None
    rank = value.dim()
    text = [code(e) for e in expressions]
    if None in text:
        return None
    size, stride, offset = text[:rank], text[rank : 2 * rank], text[2 * rank]
    listed = "None" if factors is None else f"({''.join(f'{t}, ' for t in text[2 * rank + 1 :])})"
    return f"(({''.join(f'{t}, ' for t in size)}), ({''.join(f'{t}, ' for t in stride)}), {offset}, {listed})"


def lies_as(real: Geometry, bucket: Geometry) -> bool:
    """Whether the prefix of a bucket's buffer lies in memory as the value of real size does by itself."""
    return real.factors is None and all(
        n == 1 or a == b for n, a, b in zip(real.size, real.stride, bucket.stride, strict=True)
    )


def prefix(buffer: torch.Tensor, real: Geometry, bucket: Geometry) -> torch.Tensor:
    """The real rows of ``buffer``, a view; one dimension a factor where some dimension has several."""
    if bucket.factors is None or real.factors is None:
        # What a dimension of one row has for a stride doesn't matter, but ops hand it on to their results.
        strides = zip(real.size, real.stride, buffer.stride(), strict=True)
        return buffer.as_strided(real.size, [own if n == 1 else s for n, own, s in strides])
    split = buffer.view(bucket.factors)
    return split.as_strided(real.factors, split.stride())


def in_factors(exact: torch.Tensor, real: Geometry) -> torch.Tensor:
    """A tensor of real size, or of the bucket's with its geometry, in the dimensions that `prefix` has."""
    return exact if real.factors is None else exact.view(real.factors)


def buffer_for(bucket: Geometry, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a value; contiguous where its elements overlap, as in windows of the rows."""
    overlaps = has_overlap(bucket.size, bucket.stride)
    stride = torch.empty(bucket.size, device="meta").stride() if overlaps else bucket.stride
    return torch.empty_strided(bucket.size, stride, dtype=dtype, device=device)


def copy_elements(into: torch.Tensor, source: torch.Tensor) -> None:
    """``into.copy_(source)``, each element that ``into`` repeats (stride 0) once."""
    for dim, (n, s) in enumerate(zip(into.size(), into.stride(), strict=True)):
        if s == 0 and n > 1:
            into, source = into.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    into.copy_(source)


class Compact:
    """A cut's argument that lies differently among a bucket's rows: copied out for the cut, and back where it may have
    been written."""

    def __init__(self, buffer: torch.Tensor, real: Geometry, bucket: Geometry, *, written: bool) -> None:
        self._rows, self._real, self._written = prefix(buffer, real, bucket), real, written

    def fetch(self) -> torch.Tensor:
        real = self._real
        out = torch.empty_strided(real.size, real.stride, dtype=self._rows.dtype, device=self._rows.device)
        copy_elements(in_factors(out, real), self._rows)
        return out

    def store(self, value: torch.Tensor) -> None:
        if self._written:
            copy_elements(self._rows, in_factors(value, self._real))


def tails(
    buffer: torch.Tensor, real: Geometry, bucket: Geometry, *, first: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rows behind the real ones, the last real row) pairs of views, one a dimension that has any: copied in order they
    leave no element of ``buffer`` out. ``first``: the first real row instead."""
    if 0 in real.size:
        return []
    if real.factors is not None and bucket.factors is not None:
        buffer, size, wide = buffer.view(bucket.factors), real.factors, bucket.factors
    else:
        size, wide = real.size, bucket.size
    found = []
    for dim, (n, b) in enumerate(zip(size, wide, strict=True)):
        if n != b and buffer.stride(dim) != 0:
            # Dimensions in front are filled by now, those behind only as far as the real rows reach.
            seen = buffer.as_strided((*wide[: dim + 1], *size[dim + 1 :]), buffer.stride())
            behind, row = seen.narrow(dim, n, b - n), seen.narrow(dim, 0 if first else n - 1, 1)
            found.append((distinct_elements(behind), distinct_elements(row)))
    return found


def poison(buffer: torch.Tensor, real: Geometry, bucket: Geometry, value: Any) -> None:
    """Fill every element of ``buffer`` outside the real rows with ``value``."""
    if real.factors is not None and bucket.factors is not None:
        buffer, size, wide = buffer.view(bucket.factors), real.factors, bucket.factors
    else:
        size, wide = real.size, bucket.size
    for dim, (n, b) in enumerate(zip(size, wide, strict=True)):
        if n != b and buffer.stride(dim) != 0:
            distinct_elements(buffer.narrow(dim, n, b - n)).fill_(value)
