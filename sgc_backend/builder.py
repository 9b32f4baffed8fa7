"""Record every piece of a split graph for one key and bind the recordings into a plan.

Nothing is executed here. What a cut will return is known from the warm-up call of the same key, so the buffers behind
it can be made without calling it, and no state is written twice.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import record, unowned_like, with_bits
from .errors import CaptureError
from .groups import PIECE, Group, HostRef, Ref, Split
from .inputs import NUMBER, STAGED, STATIC, Input, distinct_elements, has_overlap, is_dense, span_bytes
from .plan import Frame, Plan, cut_step, expect_alias, into_both, into_buffer, into_slot, no_cut, nothing
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
    clone: bool,
    name: str,
    key: str,
) -> Plan:
    """Record for the key of ``args`` and return a plan ready to run.

    ``observed`` and ``detached`` come from the warm-up call: what its cuts returned, and which outputs carried no
    gradient.

    Raises:
        CaptureError: an input can't be staged, or a piece can't be recorded. Nothing of it stays behind.
    """
    builder = _Builder(pool, split, compiled, inputs, symbols, key_symbols, observed, args, detached, clone, name, key)
    try:
        return builder.build()
    except BaseException:
        builder.plan.release()
        raise


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
        clone: bool,
        name: str,
        key: str,
    ) -> None:
        self.pool, self.split, self.compiled, self.args = pool, split, compiled, args
        self.inputs = {i.name: i for i in inputs}
        self.symbols, self.key_symbols, self.observed = symbols, key_symbols, observed
        self.detached, self.clone, self.name, self.key = detached, clone, name, key
        self.what = f"{name}, key {key}"
        self.plan = Plan(pool, pool.generation, len(args))
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
                    self.plan.segments.append((replay, self._cut(group, fn)))
                    replay = nothing
                for name in self.last_use.get(group.index, ()):
                    self.env.pop(name, None)
                    self.held.pop(name, None)
            if replay is not nothing:
                self.plan.segments.append((replay, no_cut))
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
                self.env[spec.name] = seen = unowned_like(device, arg)
                nbytes = seen.untyped_storage().nbytes() if seen.numel() else 0
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
        buffer = self._allocate(arg.size(), arg.stride(), arg.dtype)
        self.env[spec.name] = buffer
        unowned = unowned_like(self.pool.device, buffer)
        expanded = any(n > 1 and s == 0 for n, s in zip(arg.size(), arg.stride(), strict=True))
        self.plan.staging.append((distinct_elements(unowned), spec.index, expanded))
        if spec.written:
            if expanded:
                raise CaptureError(f"{self.what}: input {spec.label} is written but expanded; pass a contiguous copy")
            self.plan.copy_back.append((unowned, spec.index))

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        device = self.pool.device
        with self.pool.allocating(), torch.inference_mode(False):
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device.torch_device)

    # -- pieces and cuts ---------------------------------------------------------------------------------------------

    def _record(self, group: Group, fn: Callable[..., Any]) -> Callable[[], None]:
        given = [
            self.env[ref.name] if isinstance(ref, Ref) else self.symbols.evaluate(ref.expr, self.args, ref.kind)
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

    def _cut(self, group: Group, fn: Callable[..., Any]) -> Callable[[Frame], None]:
        template: list[Any] = []
        holes: list[tuple[int, int]] = []
        computed: list[tuple[int, Callable[[Frame], Any]]] = []
        for position, ref in enumerate(group.inputs):
            template.append(None)
            if isinstance(ref, HostRef):
                if _symbols_of(ref.expr) <= self.key_symbols:
                    template[position] = self.symbols.evaluate(ref.expr, self.args, ref.kind)
                else:
                    computed.append((position, self._number(ref)))
            elif ref.name in self.slots and ref.name not in self.env:
                holes.append((position, self.slots[ref.name]))
            elif ref.name in self.inputs and not self._is_bound(ref.name):
                holes.append((position, self.inputs[ref.name].index))
            else:
                template[position] = unowned_like(self.pool.device, self.env[ref.name])
        self._make_result_buffers(group, template)
        sinks = [self._sink(group, name, template) for name in group.outputs]
        return cut_step(fn, template, holes, computed, sinks)

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
            fresh = self._alias_base(seen, template) is None and name not in group.sized_by_data
            if fresh and seen.size is not None:
                root, offset = seen.sibling or (k, 0)
                families.setdefault(root, []).append((k, offset))
        for members in families.values():
            names = [group.outputs[k] for k, _ in members]
            if not any(name in self.read_by_piece for name in names):
                continue
            if len(members) == 1:
                self.env[names[0]] = self._result_buffer(self.observed[names[0]])
                continue
            spans = [
                (offset, span_bytes(self.observed[n].size, self.observed[n].stride, self.observed[n].dtype))
                for n, (_, offset) in zip(names, members, strict=True)
            ]
            start = min(offset for offset, _ in spans)
            whole = self._allocate((max(o + n for o, n in spans) - start,), (1,), torch.uint8)
            for name, (offset, _) in zip(names, spans, strict=True):
                seen = self.observed[name]
                at = whole.data_ptr() + offset - start
                self.env[name] = self.pool.device.unowned(at, seen.size, seen.stride, seen.dtype)
                self.held[name] = whole

    def _alias_base(self, seen: CutResult, template: list[Any]) -> torch.Tensor | None:
        """The bound argument that a result is a view of; None where it is fresh or a view of the caller's own."""
        base = template[seen.alias[0]] if seen.alias is not None else None
        return base if isinstance(base, torch.Tensor) else None

    def _sink(self, group: Group, name: str, template: list[Any]) -> Callable[[Any, Frame], None]:
        seen = self.observed[name]
        base = self._alias_base(seen, template)
        if name in group.sized_by_data:
            if base is not None:
                self.in_pool.add(name)
            return self._slot(name)
        if base is not None:
            at = base.data_ptr() + seen.alias[1]
            view = with_bits(self.pool.device.unowned(at, seen.size, seen.stride, seen.dtype), *seen.bits)
            self.env[name] = view
            source = group.inputs[seen.alias[0]].name
            self.held[name] = self.held.get(source, self.env.get(source))
            return expect_alias(view, name) if view.numel() else _ignore
        if name in self.env:
            sink = into_buffer(unowned_like(self.pool.device, self.env[name]), name)
            # A view of the caller's own tensor must come back as one; its input is not written, or it were bound.
            returned = any(isinstance(o, Ref) and o.name == name for o in self.split.outputs)
            return into_both(sink, self._slot(name)) if seen.alias is not None and returned else sink
        if name in self.read_by_piece:
            raise CaptureError(f"{self.what}: cut result {name} is no strided tensor, but a piece reads it")
        return self._slot(name)

    def _slot(self, name: str) -> Callable[[Any, Frame], None]:
        slot = self.slots[name] = len(self.args) + len(self.slots)
        return into_slot(slot)

    def _result_buffer(self, seen: CutResult) -> torch.Tensor:
        stride = seen.stride
        if has_overlap(seen.size, stride) or 0 in stride:
            stride = torch.empty(seen.size, device="meta").stride()
        return self._allocate(seen.size, stride, seen.dtype)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _bind_outputs(self) -> None:
        shared: dict[int, int] = {}  # storage address -> frame slot that holds this call's one copy of it
        for out in self.split.outputs:
            if not isinstance(out, (Ref, HostRef)):
                self.plan.outputs.append(self._structure(out))
            elif isinstance(out, HostRef):
                self.plan.outputs.append(self._number(out))
            else:
                self.plan.outputs.append(self._tensor_output(out.name, shared))

    def _structure(self, out: Any) -> Callable[[Frame], Any]:
        def make(frame: Frame) -> Any:
            return pytree.tree_map(
                lambda v: self.symbols.evaluate(v.expr, frame, v.kind) if isinstance(v, HostRef) else v,
                out,
                is_leaf=lambda v: isinstance(v, HostRef),
            )

        return make

    def _number(self, out: HostRef) -> Callable[[Frame], Any]:
        return lambda frame: self.symbols.evaluate(out.expr, frame, out.kind)

    def _tensor_output(self, name: str, shared: dict[int, int]) -> Callable[[Frame], Any]:
        if name in self.inputs:
            return _taker(self.inputs[name].index)
        if name in self.slots:
            slot = self.slots[name]
            return (lambda frame: frame[slot].clone()) if name in self.in_pool and self.clone else _taker(slot)
        value = self.env[name]
        if not isinstance(value, torch.Tensor):
            return lambda frame: value
        owner = self._input_under(value)
        if owner is not None:
            return _view_of_argument(owner, value, self.env[owner.name], name in self.detached)
        unowned = unowned_like(self.pool.device, value)
        if not self.clone:
            return lambda frame: unowned.detach()  # a new object each time: a caller may change its shape in place
        return self._cloner(name, unowned, shared)

    def _input_under(self, value: torch.Tensor) -> Input | None:
        """The input whose memory ``value`` lies in: the caller must get a view of its own tensor."""
        at = value.data_ptr()
        if value.numel() == 0:
            return None
        for spec in self.inputs.values():
            seen = self.env.get(spec.name)
            if isinstance(seen, torch.Tensor) and seen.numel():
                start = seen.untyped_storage().data_ptr()
                if start <= at < start + seen.untyped_storage().nbytes():
                    return spec
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


def _taker(index: int) -> Callable[[Frame], Any]:
    return lambda frame: frame[index]


def _view_of_argument(
    spec: Input, value: torch.Tensor, seen: torch.Tensor, detached: bool
) -> Callable[[Frame], torch.Tensor]:
    size, stride, dtype = tuple(value.size()), tuple(value.stride()), value.dtype
    offset = value.data_ptr() - seen.data_ptr()
    index, bits = spec.index, (value.is_conj(), value.is_neg())

    def make(frame: Frame) -> torch.Tensor:
        arg = frame[index].detach() if detached else frame[index]
        base = arg if arg.dtype == dtype else arg.view(dtype)
        view = base.as_strided(size, stride, base.storage_offset() + offset // dtype.itemsize)
        return with_bits(view, *bits)

    return make


def _symbols_of(expr: Any) -> frozenset[Any]:
    return frozenset(getattr(expr, "free_symbols", ()))


def _weak_storage(tensor: torch.Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
