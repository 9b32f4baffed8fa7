"""Record every piece of a split graph for one key and bind the recordings into a plan.

Nothing is executed here. What a cut will return is known from the warm-up call of the same key, so the buffers behind
it can be made without calling it, and no state is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import record, unowned_like, with_bits
from .errors import CaptureError
from .inputs import NUMBER, STAGED, STATIC, Input, distinct_elements, has_overlap, is_dense
from .plan import Frame, Plan, cut_step, expect_alias, into_buffer, into_slot, no_cut, nothing
from .pool import GraphPool
from .split import PIECE, Group, HostRef, Ref, Split
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
    clone: bool,
    what: str,
) -> Plan:
    """Record for the key of ``args`` and return a plan ready to run.

    Raises:
        CaptureError: an input can't be staged, or a piece can't be recorded. Nothing of it stays behind.
    """
    builder = _Builder(pool, split, compiled, inputs, symbols, key_symbols, observed, args, clone, what)
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
        clone: bool,
        what: str,
    ) -> None:
        self.pool, self.split, self.compiled, self.args = pool, split, compiled, args
        self.inputs = {i.name: i for i in inputs}
        self.symbols, self.key_symbols, self.observed = symbols, key_symbols, observed
        self.clone, self.what = clone, what
        self.plan = Plan(pool, pool.generation, arguments=len(args))
        self.env: dict[str, Any] = {}  # tensors that recordings see, held until their last reader is recorded
        self.held: dict[str, Any] = {}  # what a view in env lies in, held as long as the view
        self.slots: dict[str, int] = {}  # values that cuts hand on, by frame index
        self.last_use, self.read_by_piece = self._uses()

    def build(self) -> Plan:
        device = self.pool.device
        with device.use_stream(self.pool.stream), torch.no_grad():
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
        self.plan.slots = len(self.slots)
        return self.plan.seal()

    def _uses(self) -> tuple[dict[int, list[str]], set[str]]:
        last: dict[str, int] = {}
        by_piece: set[str] = set()
        for group in self.split.groups:
            names = [ref.name for ref in group.inputs if isinstance(ref, Ref)]
            if group.kind == PIECE:
                by_piece.update(names)
            for name in (*names, *group.outputs):
                last[name] = group.index
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
        written = set()
        for spec in self.inputs.values():
            arg = self.args[spec.index]
            if spec.kind == STATIC:
                self._check_layout(spec, arg)
                # A recording must not keep a caller's weights alive: their address is checked at each replay instead.
                self.env[spec.name] = unowned_like(device, arg)
                plan.static.append((spec.index, arg.data_ptr(), spec.label))
                plan.storages.append(_weak_storage(arg))
            elif spec.kind == STAGED:
                self._stage(spec, arg)
            elif spec.kind == NUMBER:
                self.env[spec.name] = arg.clone()  # its value is part of the key; the caller's tensor may die
            if spec.written and isinstance(arg, torch.Tensor):
                written.add(arg.untyped_storage().data_ptr())
        staged = [i for i in self.inputs.values() if i.kind == STAGED]
        plan.written_staged = tuple(i.index for i in staged if i.written)
        plan.written_storages = frozenset(written) - {
            self.args[i].untyped_storage().data_ptr() for i in plan.written_staged
        }
        if plan.written_staged:
            plan.tensors = tuple(
                i.index
                for i in self.inputs.values()
                if isinstance(self.args[i.index], torch.Tensor) and device.owns(self.args[i.index])
            )

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
        graph, results = record(
            self.pool, lambda: fn(*given), f"{self.what}, piece {group.index}", owner=self.plan
        )
        self.plan.graphs.append(graph)
        self.env.update(zip(group.outputs, results, strict=True))
        return graph.replay

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
            elif ref.name in self.slots:
                holes.append((position, self.slots[ref.name]))
            elif ref.name in self.inputs and not self._is_bound(ref.name):
                holes.append((position, self.inputs[ref.name].index))
            else:
                template[position] = unowned_like(self.pool.device, self.env[ref.name])
        self._make_result_buffers(group, template)
        sinks = [self._sink(group, name, template) for name in group.outputs]
        return cut_step(fn, template, holes, computed, sinks)

    def _is_bound(self, name: str) -> bool:
        """An input that is written, where recordings see it: whatever a cut makes of it must be what they write to."""
        spec = self.inputs[name]
        return spec.kind in (STAGED, STATIC) and spec.written

    def _make_result_buffers(self, group: Group, template: list[Any]) -> None:
        """Buffers for fresh results that a piece reads; results over one storage lie in one buffer, as they did."""
        families: dict[int, list[tuple[int, int]]] = {}  # first result of a storage -> (result, byte offset to it)
        for k, name in enumerate(group.outputs):
            seen = self.observed[name]
            if self._alias_base(seen, template) is None and seen.size is not None:
                root, offset = seen.sibling or (k, 0)
                families.setdefault(root, []).append((k, offset))
        for members in families.values():
            names = [group.outputs[k] for k, _ in members]
            if not any(name in self.read_by_piece for name in names):
                continue
            if len(members) == 1:
                self.env[names[0]] = self._result_buffer(self.observed[names[0]])
                continue
            spans = [(offset, _span_bytes(self.observed[n])) for n, (_, offset) in zip(names, members, strict=True)]
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
        if base is not None:
            at = base.data_ptr() + seen.alias[1]
            view = with_bits(self.pool.device.unowned(at, seen.size, seen.stride, seen.dtype), *seen.bits)
            self.env[name] = view
            source = group.inputs[seen.alias[0]].name
            self.held[name] = (self.env.get(source), self.held.get(source))
            return expect_alias(view.data_ptr(), name) if view.numel() else _ignore
        if name in self.env:
            return into_buffer(unowned_like(self.pool.device, self.env[name]), name)
        if name in self.read_by_piece:
            raise CaptureError(f"{self.what}: cut result {name} is no strided tensor, but a piece reads it")
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
            return _taker(self.slots[name])
        value = self.env[name]
        if not isinstance(value, torch.Tensor):
            return lambda frame: value
        owner = self._input_under(value)
        if owner is not None:
            return _view_of_argument(owner, value, self.env[owner.name])
        unowned = unowned_like(self.pool.device, value)
        if not self.clone:
            return lambda frame: unowned
        return self._cloner(value, unowned, shared)

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

    def _cloner(
        self, value: torch.Tensor, unowned: torch.Tensor, shared: dict[int, int]
    ) -> Callable[[Frame], torch.Tensor]:
        """Copies an output out of the pool: outputs over one storage share one copy, strides stay as they are."""
        storage = value.untyped_storage().data_ptr()
        alone = sum(_storage_of(self.env.get(o.name)) == storage for o in self.split.outputs if isinstance(o, Ref)) == 1
        if alone and is_dense(value.size(), value.stride()):
            return lambda frame: unowned.clone()
        nbytes = value.untyped_storage().nbytes()
        whole = self.pool.device.unowned(storage, (nbytes,), (1,), torch.uint8)
        size, stride, dtype = tuple(value.size()), tuple(value.stride()), value.dtype
        offset, bits = value.storage_offset(), (value.is_conj(), value.is_neg())
        first = storage not in shared
        if first:
            shared[storage] = len(self.args) + len(self.slots)
            self.slots[f"storage of {storage}"] = shared[storage]
        slot = shared[storage]

        def make(frame: Frame) -> torch.Tensor:
            if first:
                frame[slot] = whole.clone()
            out = torch.empty(0, dtype=dtype, device=whole.device)
            return with_bits(out.set_(frame[slot].untyped_storage(), offset, size, stride), *bits)

        return make


def _span_bytes(seen: CutResult) -> int:
    if 0 in seen.size:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(seen.size, seen.stride, strict=True))) * seen.dtype.itemsize


def _ignore(value: Any, frame: Frame) -> None:
    """The sink of a result that lies in its argument anyway and has no bytes to check."""


def _taker(index: int) -> Callable[[Frame], Any]:
    return lambda frame: frame[index]


def _view_of_argument(spec: Input, value: torch.Tensor, seen: torch.Tensor) -> Callable[[Frame], torch.Tensor]:
    size, stride, dtype = tuple(value.size()), tuple(value.stride()), value.dtype
    offset = value.data_ptr() - seen.data_ptr()
    index, bits = spec.index, (value.is_conj(), value.is_neg())

    def make(frame: Frame) -> torch.Tensor:
        arg = frame[index]
        base = arg if arg.dtype == dtype else arg.view(dtype)
        view = base.as_strided(size, stride, base.storage_offset() + offset // dtype.itemsize)
        return with_bits(view, *bits)

    return make


def _symbols_of(expr: Any) -> frozenset[Any]:
    return frozenset(getattr(expr, "free_symbols", ()))


def _storage_of(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _weak_storage(tensor: torch.Tensor) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
