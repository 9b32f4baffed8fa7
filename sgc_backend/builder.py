"""Record every piece of a split graph for one key and bind the recordings into a plan.

Nothing is executed here. What a cut will return is known from the warm-up call of the same key, so the buffers behind
it can be made without calling it, and no state is written twice.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import record, unowned_like, with_bits
from .errors import CaptureError
from .extents import Compact, Extents, Geometry, copy_elements, in_factors, lies_as, prefix, tails
from .groups import PIECE, Group, HostRef, Ref, Split
from .inputs import NUMBER, STAGED, STATIC, Input, distinct_elements, has_overlap, is_dense, span_bytes
from .plan import (
    Binding,
    Frame,
    Plan,
    Real,
    cut_step,
    expect_alias,
    into_both,
    into_buffer,
    into_slot,
    no_cut,
    nothing,
    storage_span,
    tensor_span,
)
from .pool import GraphPool
from .symbols import Symbols
from .walk import CutResult


def build_plan(
    pool: GraphPool,
    split: Split,
    compiled: Sequence[Callable[..., Any]],
    inputs: Sequence[Input],
    symbols: Symbols,
    key_symbols: frozenset[Any],
    observed: Mapping[str, CutResult],
    args: Sequence[Any],
    *,
    detached: Collection[str],
    inference: Collection[str],
    clone: bool,
    name: str,
    key: str,
    bucket: Bucket | None = None,
) -> Plan:
    """Record for the key of ``args`` and return a plan ready to run.

    ``observed``, ``detached`` and ``inference`` come from the warm-up call: what its cuts returned, which outputs
    carried no gradient, and which were inference tensors. With a ``bucket`` it is recorded at the bucket's sizes, and
    the plan serves all smaller ones.

    Raises:
        CaptureError: an input can't be staged, or a piece can't be recorded. Nothing of it stays behind.
    """
    known = (observed, args, detached, inference)
    builder = _Builder(pool, split, compiled, inputs, symbols, key_symbols, *known, clone, name, key, bucket)
    try:
        return builder.build()
    except BaseException:
        builder.plan.release()
        raise


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


class _Builder:
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
        self.detached, self.inference, self.clone, self.name, self.key = detached, inference, clone, name, key
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
        self.held: dict[str, torch.Tensor] = {}  # what a view in env lies in, held as long as the view
        self.in_pool: set[str] = set()  # names in slots whose memory is the pool's
        self.slots: dict[str, int] = {}  # values that cuts hand on, by frame index
        self.last_use, self.read_by_piece = self._uses()

    def build(self) -> Plan:
        device = self.pool.device
        # The pool is held for the whole plan: another thread's replay or capture in between would find it half made.
        with self.pool.lock, device.use_stream(self.pool.stream), torch.no_grad():
            before = self.pool.reserved_bytes()
            self._bind_inputs()
            replay: Callable[[], None] = nothing
            for group, fn in zip(self.split.groups, self.compiled, strict=True):
                if group.kind == PIECE:
                    replay = self._record(group, fn)
                else:
                    self.plan.steps.append((replay, self._cut(group, fn)))
                    replay = nothing
                for name in self.last_use.get(group.index, ()):
                    self.env.pop(name, None)
                    self.held.pop(name, None)
            if replay is not nothing:
                self.plan.steps.append((replay, lambda real: no_cut))
            self._bind_outputs()
            self._book_buffers(self.pool.reserved_bytes() - before)
        self.plan.slots = len(self.slots)
        segments = device.pool_segments(self.pool.handle)
        self.plan.pool_spans = tuple((g["address"], g["address"] + g["total_size"]) for g in segments)
        return self.plan.seal()

    def _book_buffers(self, grown: int) -> None:
        """What the pool grew by for buffers, and not for what the pieces make, is booked with the first piece."""
        entries = [self.pool.ledger[id(graph)] for graph in self.plan.graphs]
        buffers = grown - sum(entry.added for entry in entries)
        if entries and buffers:
            first = dataclasses.replace(entries[0], added=entries[0].added + buffers)
            self.pool.ledger[id(self.plan.graphs[0])] = first

    def _uses(self) -> tuple[dict[int, list[str]], set[str]]:
        last: dict[str, int] = {}
        by_piece: set[str] = set()
        for group in self.split.groups:
            names = [ref.name for ref in group.inputs if isinstance(ref, Ref)]
            if group.kind == PIECE:
                by_piece.update(names)
            for name in (*names, *group.outputs):
                last[name] = group.index
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
        for name, index in last.items():
            if name not in kept:
                uses.setdefault(index, []).append(name)
        return uses, by_piece

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _bind_inputs(self) -> None:
        plan, device = self.plan, self.pool.device
        for spec in self.inputs.values():
            arg = self.args[spec.index]
            if spec.kind == STATIC:
                self._check_layout(spec, arg)
                # A recording must not keep a caller's weights alive: their address is checked at each replay instead.
                around = spec.name in self.split.reached_around
                self.env[spec.name] = unowned_like(device, arg, whole=around)
                nbytes = span_bytes(arg.size(), arg.stride(), arg.dtype)
                plan.static.append((spec.index, arg.data_ptr(), nbytes, spec.label))
                plan.storages.append(_weak_storage(arg))
                plan.static_tensors[spec.index] = weakref.ref(arg)
            elif spec.kind == STAGED:
                self._stage(spec, arg)
            elif spec.kind == NUMBER:
                self.env[spec.name] = arg.clone()  # its value is part of the key; the caller's tensor may die
            elif isinstance(arg, torch.Tensor) and device.owns(arg) and arg.layout is torch.strided:
                plan.passed.append(spec.index)
        plan.written = frozenset(i.index for i in self.inputs.values() if i.written)
        for spec in self.inputs.values():
            if spec.name in self.split.reached_around:
                plan.reached[spec.index] = storage_span(self.args[spec.index]) if spec.kind == STATIC else None

    def _check_layout(self, spec: Input, arg: torch.Tensor) -> None:
        if arg.layout is not torch.strided or not self.pool.device.owns(arg):
            raise CaptureError(
                f"{self.what}: input {spec.label} is a {arg.layout} tensor on {arg.device}; "
                f"pieces take strided tensors on {self.pool.device}"
            )

    def _stage(self, spec: Input, arg: torch.Tensor) -> None:
        self._check_layout(spec, arg)
        if has_overlap(arg.size(), arg.stride()):
            raise CaptureError(f"{self.what}: input {spec.label} overlaps itself in memory; pass a contiguous copy")
        wide = self._wide(spec.name, arg.size(), arg.stride(), self.given)
        size, stride = (arg.size(), arg.stride()) if wide is None else (wide.size, wide.stride)
        buffer = self._allocate(size, stride, arg.dtype)
        self.env[spec.name] = buffer
        unowned = unowned_like(self.pool.device, buffer)
        expanded = any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True))
        self.plan.staged.append(spec.index)
        if spec.written and expanded:
            raise CaptureError(f"{self.what}: input {spec.label} is written but expanded; pass a contiguous copy")

        def stage(real: Real, bound: Binding) -> None:
            rows = unowned if wide is None else prefix(unowned, real[spec.name], wide)
            if expanded:
                bound.expanded.append((distinct_elements(rows), spec.index))
            else:
                bound.buffers.append(rows)
                bound.plain.append(spec.index)
            if wide is not None:
                bound.pads.extend(_pads(unowned, real[spec.name], wide))
            if spec.written:
                bound.copy_back.append((rows, spec.index))

        self.plan.stagers.append(stage)

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

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        device = self.pool.device
        with self.pool.allocating(), torch.inference_mode(False):
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device.torch_device)

    # -- pieces and cuts ---------------------------------------------------------------------------------------------

    def _record(self, group: Group, fn: Callable[..., Any]) -> Callable[[], None]:
        given = [
            self.env[ref.name]
            if isinstance(ref, Ref)
            else self.symbols.evaluate(ref.expr, self.args, ref.kind, self.instead)
            for ref in group.inputs
        ]
        part = f"piece {group.index}"
        graph, results = record(self.pool, lambda: fn(*given), self.name, self.key, part, owner=self.plan)
        self.plan.graphs.append(graph)
        self.env.update(zip(group.outputs, results, strict=True))
        self._hold_views(group)
        return graph.replay

    def _hold_views(self, group: Group) -> None:
        """A piece's view of an unowned tensor must keep what that one lies in, as it does itself."""
        sources = {
            self.env[ref.name].untyped_storage().data_ptr(): self.held[ref.name]
            for ref in group.inputs
            if isinstance(ref, Ref) and ref.name in self.held and isinstance(self.env[ref.name], torch.Tensor)
        }
        for name in group.outputs if sources else ():
            value = self.env[name]
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
                held = sources.get(value.untyped_storage().data_ptr())
                if held is not None:
                    self.held[name] = held

    def _cut(self, group: Group, fn: Callable[..., Any]) -> Callable[[Real], Callable[[Frame], None]]:
        template: list[Any] = []
        holes: list[tuple[int, int]] = []
        computed: list[tuple[int, Callable[[Frame], Any]]] = []
        bound: list[tuple[int, str]] = []  # of tensors that have other sizes in the bucket
        for position, ref in enumerate(group.inputs):
            template.append(None)
            if isinstance(ref, HostRef):
                if _symbols_of(ref.expr) <= self.key_symbols - self.instead.keys():
                    template[position] = self.symbols.evaluate(ref.expr, self.args, ref.kind)
                else:
                    computed.append((position, self._number(ref)))
            elif ref.name in self.slots and ref.name not in self.env:
                holes.append((position, self.slots[ref.name]))
            elif ref.name in self.inputs and not self._is_bound(ref.name):
                holes.append((position, self.inputs[ref.name].index))
            else:
                around = ref.name in self.split.reached_around
                if around and group.reaches_around:
                    self._check_reach(ref.name)
                template[position] = unowned_like(self.pool.device, self.env[ref.name], whole=around)
                if self.bucket is not None and not self._is_static(ref.name):
                    bound.append((position, ref.name))
        self._make_result_buffers(group, template)
        sinks = [self._sink(group, name, template) for name in group.outputs]
        wide = {name: self._known(name) for _, name in bound}

        def bind(real: Real) -> Callable[[Frame], None]:
            given, compacted, pads = template.copy(), [], []
            for position, name in bound:
                if group.mutates:
                    pads.extend(_pads(template[position], real[name], wide[name]))
                if lies_as(real[name], wide[name]):
                    given[position] = prefix(template[position], real[name], wide[name])
                else:
                    compact = Compact(template[position], real[name], wide[name], written=group.mutates)
                    compacted.append((position, compact))
            return cut_step(fn, given, holes, computed, [sink(real) for sink in sinks], compacted, pads)

        return bind

    def _is_static(self, name: str) -> bool:
        return name in self.inputs and self.inputs[name].kind == STATIC

    def _known(self, name: str) -> Geometry:
        found = self.wide.get(name)
        if found is None:
            raise PaddingError(f"{self.what}: the size of {name} is not known for other calls than this one")
        return found

    def _check_reach(self, name: str) -> None:
        """A cut may reach around what lies in a static input or in a result of ours; not around a copy of an input."""
        copied = [r for r in self.split.roots.get(name, ()) if self.inputs[r].kind != STATIC]
        if copied:
            labels = ", ".join(sorted(self.inputs[r].label for r in copied))
            raise CaptureError(
                f"{self.what}: as_strided may reach around {labels}, of which the recordings have a copy; slice it "
                f"instead, or clone it first where as_strided stays within it"
            )

    def _is_bound(self, name: str) -> bool:
        """An input that cuts get as recordings see it, because what a cut makes of it must lie in the same memory:
        it is static, and may share its memory with another that is written; or it is staged and written, or returned,
        and a piece may have made the view that is returned."""
        spec = self.inputs[name]
        return spec.kind == STATIC or (spec.kind == STAGED and (spec.written or name in self.split.returned))

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
        # In a bucket the rows are copied anyway, so they may lie as the graph was traced with.
        return (seen.size, seen.stride, seen.dtype) if wide is None else (wide.size, wide.stride, seen.dtype)

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
            indices = _may_be_indices(self.observed[name].dtype) and wide.size != other.size
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
            buffer, wide = unowned_like(self.pool.device, self.env[name]), self.wide.get(name)
            # A view of the caller's own tensor must come back as one; its input is not written, or it were bound.
            keep = self._slot if self._alias_base(seen, template) is None else self._copied
            slot = keep(name) if seen.alias is not None and self._is_output(name) else None

            def sink(real: Real) -> Callable[[Any, Frame], None]:
                if real is None or wide is None:
                    land = into_buffer(buffer, name)
                else:
                    assert real[name].factors is None, f"{name}: a cut's result has several factors in a dimension"
                    land = into_buffer(prefix(buffer, real[name], wide), name, _pads(buffer, real[name], wide))
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

    def _slot(self, name: str) -> Callable[[Real], Callable[[Any, Frame], None]]:
        slot = self.slots[name] = len(self.args) + len(self.slots)
        sink = into_slot(slot)
        return lambda real: sink

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

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _bind_outputs(self) -> None:
        shared: dict[int, int] = {}  # storage address -> frame slot that holds this call's one copy of it
        for out in self.split.outputs:
            if not isinstance(out, (Ref, HostRef)):
                make: Callable[[Real], Callable[[Frame], Any]] = _always(self._structure(out))
            elif isinstance(out, HostRef):
                make = _always(self._number(out))
            else:
                make = self._tensor_output(out.name, shared)
            self.plan.makers.append(make)

    def _structure(self, out: Any) -> Callable[[Frame], Any]:
        symbols = self.symbols

        def make(frame: Frame) -> Any:
            return pytree.tree_map(
                lambda v: symbols.evaluate(v.expr, frame, v.kind) if isinstance(v, HostRef) else v,
                out,
                is_leaf=lambda v: isinstance(v, HostRef),
            )

        return make

    def _number(self, out: HostRef) -> Callable[[Frame], Any]:
        symbols = self.symbols  # and not self: a plan must not keep the call's arguments
        return lambda frame: symbols.evaluate(out.expr, frame, out.kind)

    def _tensor_output(self, name: str, shared: dict[int, int]) -> Callable[[Real], Callable[[Frame], Any]]:
        if name in self.inputs:
            return _always(_taker(self.inputs[name].index))
        if name in self.slots:
            slot = self.slots[name]
            if name not in self.in_pool:
                return _always(_taker(slot))
            copy = self.clone
            return _always(lambda frame: frame[slot].clone() if copy else _made_here(frame[slot]))
        value = self.env[name]
        if not isinstance(value, torch.Tensor):
            return _always(lambda frame: value)
        owner = self._input_under(value)
        if owner is not None:
            return self._view_of_argument(name, owner)
        unowned = unowned_like(self.pool.device, value)
        if self.bucket is not None:
            return self._prefix_output(name, unowned, shared)
        if not self.clone:
            return _always(_static_result(unowned))
        return _always(self._cloner(name, unowned, shared))

    def _view_of_argument(self, name: str, owner: Input) -> Callable[[Real], Callable[[Frame], Any]]:
        value, seen, detached = self.env[name], self.env[owner.name], name in self.detached
        # In inference mode view(dtype) gives an inference tensor, whatever it views.
        finish = _made_here if name in self.inference else _as_it_is
        bits = (value.is_conj(), value.is_neg())
        offset = value.data_ptr() - seen.data_ptr()
        if self.bucket is None or (self._is_static(owner.name) and name not in self.wide):
            shape = tuple(value.size()), tuple(value.stride())
            return _always(_view_of_argument(owner.index, *shape, value.dtype, offset, bits, detached, finish))
        wide, base = self._known(name), self._known(owner.name)
        itemsize = value.dtype.itemsize
        if (wide.offset - base.offset) * itemsize != offset or wide.factors is not None:
            raise PaddingError(f"{self.what}: output {name} lies at another place than the graph was traced with")

        def make(real: Real) -> Callable[[Frame], Any]:
            here = real[name]
            at = (here.offset - real[owner.name].offset) * itemsize
            return _view_of_argument(owner.index, here.size, here.stride, value.dtype, at, bits, detached, finish)

        return make

    def _prefix_output(
        self, name: str, unowned: torch.Tensor, shared: dict[int, int]
    ) -> Callable[[Real], Callable[[Frame], Any]]:
        """The real rows of an output, lying as the graph was traced with."""
        wide = self._known(name)
        siblings = self._outputs_over(self._storage_under(name))
        if len(siblings) > 1:
            return self._shared_prefix(name, unowned, siblings, shared)

        clone = self.clone

        def make(real: Real) -> Callable[[Frame], Any]:
            geometry = real[name]
            if not clone and lies_as(geometry, wide):
                return _static_result(prefix(unowned, geometry, wide))
            compact = Compact(unowned, geometry, wide, written=False)
            return lambda frame: compact.fetch()

        return make

    def _shared_prefix(
        self, name: str, unowned: torch.Tensor, siblings: Sequence[str], shared: dict[int, int]
    ) -> Callable[[Real], Callable[[Frame], Any]]:
        """Outputs over one storage share one copy of it, in which each lies as the graph was traced with."""
        wide = {n: self._known(n) for n in siblings}
        dtypes = {n: self.env[n].dtype for n in siblings}
        if any(self.env[n].is_conj() or self.env[n].is_neg() for n in siblings):
            raise PaddingError(f"{self.what}: outputs {', '.join(siblings)} share memory, of which one is conjugate")
        address = self._storage_under(name).data_ptr()
        first = address not in shared
        if first:
            shared[address] = len(self.args) + len(self.slots)
            self.slots[f"storage of {name}"] = shared[address]
        slot, dtype, device, clone = shared[address], dtypes[name], self.pool.device.torch_device, self.clone

        def make(real: Real) -> Callable[[Frame], Any]:
            geometry, rows = real[name], prefix(unowned, real[name], wide[name])
            if not clone and all(lies_as(real[n], wide[n]) for n in siblings):
                return _static_result(rows)
            ends = [
                real[n].offset * d.itemsize + span_bytes(real[n].size, real[n].stride, d) for n, d in dtypes.items()
            ]
            nbytes = max(ends)

            def fetch(frame: Frame) -> torch.Tensor:
                if first:
                    frame[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                out = torch.empty(0, dtype=dtype, device=device)
                out.set_(frame[slot].untyped_storage(), geometry.offset, geometry.size, geometry.stride)
                copy_elements(in_factors(out, geometry), rows)
                return out

            return fetch

        return make

    def _outputs_over(self, storage: torch.UntypedStorage) -> list[str]:
        """The names of the outputs whose memory lies in ``storage``, as often as they are returned."""
        names = [
            o.name for o in self.split.outputs if isinstance(o, Ref) and isinstance(self.env.get(o.name), torch.Tensor)
        ]
        return [n for n in names if self._storage_under(n).data_ptr() == storage.data_ptr()]

    def _input_under(self, value: torch.Tensor) -> Input | None:
        """The input whose memory ``value`` lies in: the caller must get a view of its own tensor."""
        at = value.data_ptr()
        if value.numel() == 0:
            return None
        seen = {n: self.env.get(n) for n in self.inputs}
        bytes_of = {n: t for n, t in seen.items() if isinstance(t, torch.Tensor) and t.numel()}
        # What reaches around an input may lie outside of it: then its storage tells.
        for span in (tensor_span, storage_span):
            for name, tensor in bytes_of.items():
                start, end = span(tensor)
                if start <= at < end:
                    return self.inputs[name]
        return None

    def _cloner(self, name: str, unowned: torch.Tensor, shared: dict[int, int]) -> Callable[[Frame], torch.Tensor]:
        """Copies an output out of the pool: outputs over one storage share one copy, strides stay as they are."""
        value = self.env[name]
        if not value.numel():  # it has no bytes, and so no place among those of others
            size, stride = tuple(value.size()), tuple(value.stride())
            return lambda frame: torch.empty_strided(size, stride, dtype=unowned.dtype, device=unowned.device)
        storage = self._storage_under(name)
        others = [o.name for o in self.split.outputs if isinstance(o, Ref) and o.name in self.env]
        alone = sum(self._storage_under(o).data_ptr() == storage.data_ptr() for o in others) == 1
        bits = (value.is_conj(), value.is_neg())
        if alone and is_dense(value.size(), value.stride()):
            if not any(bits):
                return lambda frame: unowned.clone()
            plain = self.pool.device.unowned(value.data_ptr(), value.size(), value.stride(), value.dtype)
            return lambda frame: with_bits(plain.clone(), *bits)
        whole = self.pool.device.unowned(storage.data_ptr(), (storage.nbytes(),), (1,), torch.uint8)
        size, stride, dtype = tuple(value.size()), tuple(value.stride()), value.dtype
        offset = (value.data_ptr() - storage.data_ptr()) // dtype.itemsize
        first = storage.data_ptr() not in shared
        if first:
            shared[storage.data_ptr()] = len(self.args) + len(self.slots)
            self.slots[f"storage of {name}"] = shared[storage.data_ptr()]
        slot = shared[storage.data_ptr()]

        def make(frame: Frame) -> torch.Tensor:
            if first:
                frame[slot] = whole.clone()
            out = torch.empty(0, dtype=dtype, device=whole.device)
            return with_bits(out.set_(frame[slot].untyped_storage(), offset, size, stride), *bits)

        return make

    def _storage_under(self, name: str) -> torch.UntypedStorage:
        """The storage that a value lies in: an unowned view's is that of the tensor which it was made over."""
        return self.held.get(name, self.env[name]).untyped_storage()


def _ignore(value: Any, frame: Frame) -> None:
    """The sink of a result that lies in its argument anyway and has no bytes to check."""


def _made_here(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as this moment's mode would have made it: an inference tensor in inference mode.

    Such a one may not be written outside of inference mode, nor saved for a backward pass, as it may not when it comes
    from eager code; and a static result's bytes wouldn't last until then.
    """
    if tensor.is_inference() or not torch.is_inference_mode_enabled():
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return with_bits(made, tensor.is_conj(), tensor.is_neg())


def _static_result(unowned: torch.Tensor) -> Callable[[Frame], torch.Tensor]:
    with torch.inference_mode():
        inference = _made_here(unowned)
    # A new object each time: a caller may change its shape in place.
    return lambda frame: (inference if torch.is_inference_mode_enabled() else unowned).detach()


def _taker(index: int) -> Callable[[Frame], Any]:
    return lambda frame: frame[index]


def _pads(buffer: torch.Tensor, real: Geometry, wide: Geometry) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What to copy at each replay into the rows behind the real ones. They may hold anything, but in what may be an
    index: that must stay in its table, so it repeats a real row."""
    return tails(buffer, real, wide) if _may_be_indices(buffer.dtype) else []


def _may_be_indices(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _always(make: Callable[[Frame], Any]) -> Callable[[Real], Callable[[Frame], Any]]:
    """An output's maker that is the same for all real sizes."""
    return lambda real: make


def _view_of_argument(
    index: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int,
    bits: tuple[bool, bool],
    detached: bool,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Frame], torch.Tensor]:
    """The view of argument ``index`` that begins ``offset`` bytes behind its first element."""

    def make(frame: Frame) -> torch.Tensor:
        arg = frame[index].detach() if detached else frame[index]
        base = arg if arg.dtype == dtype else arg.view(dtype)
        view = base.as_strided(size, stride, base.storage_offset() + offset // dtype.itemsize)
        return finish(with_bits(view, *bits))

    return make


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _strides_alike(one: Geometry, other: Geometry) -> bool:
    """Whether two sizes of a value lie in memory with the same strides."""
    rows = zip(one.size, one.stride, other.size, other.stride, strict=True)
    return all(a == b for n, a, m, b in rows if n != 1 or m != 1)


def _symbols_of(expr: Any) -> frozenset[Any]:
    return frozenset(getattr(expr, "free_symbols", ()))


def _weak_storage(tensor: torch.Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
