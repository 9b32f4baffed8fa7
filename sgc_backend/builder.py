"""Record every piece of a split graph for one key and bind the recordings into a plan.

Nothing is executed here. What a cut will return is known from the warm-up call of the same key, so the buffers behind
it can be made without calling it, and no state is written twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from .below_autograd import Exclusion, exclusion, is_differentiable
from .capture import Capture, unowned_like
from .cut_results import CutResults
from .cut_steps import CutSteps
from .errors import CaptureError
from .extents import prefix
from .groups import PIECE, Group, HostRef, Ref, Split
from .inputs import NUMBER, STAGED, STATIC, Input, distinct_elements, has_overlap
from .outputs import Outputs
from .plan import Binding, Plan, Real, nothing
from .pool import GraphPool
from .recording import Bucket, pad_copies, symbols_of
from .spans import storage_span
from .static_inputs import StaticInputs
from .steps import Frame, no_cut
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
    statics: StaticInputs,
    *,
    detached: Collection[str],
    inference: Collection[str],
    itself: Mapping[str, int],
    clone: bool,
    share: bool,
    name: str,
    key: str,
    bucket: Bucket | None = None,
) -> Plan:
    """Record for the key of ``args`` and return a plan ready to run.

    ``statics`` are those of the graph, of whatever keys. ``observed``, ``detached``, ``inference`` and ``itself`` come
    from the warm-up call: what its cuts returned, which outputs carried no gradient, which were inference tensors, and
    which were the argument of that index itself. ``share``: let the keys of a piece share executables. With a
    ``bucket`` it is recorded at the bucket's sizes, and the plan serves all smaller ones.

    Raises:
        CaptureError: an input can't be staged, or a piece can't be recorded. Nothing of it stays behind.
    """
    known = (observed, args, detached, inference, itself)
    builder = _Builder(pool, split, compiled, inputs, symbols, key_symbols, *known, clone, name, key, bucket)
    builder.statics, builder.share = statics, share
    try:
        return builder.build()
    except BaseException:
        builder.plan.release()
        raise


class _Builder(CutResults, Outputs):
    """Records, group by group."""

    statics: StaticInputs
    share: bool

    def build(self) -> Plan:
        device = self.pool.device
        self._exclusions: dict[Any, Exclusion | None] = {}
        # The pool is held for the whole plan: another thread's replay or capture in between would find it half made.
        with self.pool.lock, device.use_stream(self.pool.stream), torch.no_grad():
            before = self.pool.reserved_bytes()
            self._bind_inputs()
            with Capture(self.pool, self.name, self.key, owner=self.plan) as self.capture:
                self._record_all()
            self._bind_outputs()
            self._book_buffers(self.pool.reserved_bytes() - before)
        self.plan.slots = len(self.slots)
        self.plan.pool_spans = self.pool.spans()
        return self.plan.seal()

    def _record_all(self) -> None:
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

    def _book_buffers(self, grown: int) -> None:
        """What the pool grew by for buffers, and not for what the pieces make, is booked with the first piece."""
        entries = [self.pool.ledger[id(graph)] for graph in self.plan.graphs]
        buffers = grown - sum(entry.added for entry in entries)
        if entries and buffers:
            first = dataclasses.replace(entries[0], added=entries[0].added + buffers)
            self.pool.ledger[id(self.plan.graphs[0])] = first

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _bind_inputs(self) -> None:
        plan, device, storages = self.plan, self.pool.device, []
        for spec in self.inputs.values():
            arg = self.args[spec.index]
            if spec.kind == STATIC:
                found = self.statics.known(spec.index, arg)
                if found is None:
                    self._check_layout(spec, arg)
                    whole = spec.name in self.split.reached_around
                    found = self.statics.bound(spec.index, arg, spec.label, whole=whole)
                self.env[spec.name] = found.unowned
                plan.static.append(found.place)
                storages.append(found.storage)
                plan.static_memory[spec.index] = found.memory
            elif spec.kind == STAGED:
                self._stage(spec, arg)
            elif spec.kind == NUMBER:
                self.env[spec.name] = arg.clone()  # its value is part of the key; the caller's tensor may die
            elif isinstance(arg, torch.Tensor) and device.owns(arg) and arg.layout is torch.strided:
                plan.passed.append(spec.index)
        plan.storages = self.statics.as_one(storages)
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
                bound.pads.extend(pad_copies(unowned, real[spec.name], wide))
            if spec.written:
                bound.copy_back.append((rows, spec.index))

        self.plan.stagers.append(stage)

    # -- pieces and cuts ---------------------------------------------------------------------------------------------

    def _record(self, group: Group, fn: Callable[..., Any]) -> Callable[[], None]:
        env = self.env
        given = [
            env[ref.name] if type(ref) is Ref else self.symbols.evaluate(ref.expr, self.args, ref.kind, self.instead)
            for ref in group.inputs
        ]
        alike = (self.name, group.index) if self.share and not group.draws else None
        self.capture.begin(f"piece {group.index}", family=alike)
        results = fn(*given)
        graph = self.capture.end()
        self.plan.graphs.append(graph)
        self.env.update(zip(group.outputs, results, strict=True))
        if self.held:
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

    def _cut(self, group: Group, fn: Callable[..., Any]) -> CutSteps:
        template: list[Any] = []
        holes: list[tuple[int, int]] = []
        computed: list[tuple[int, Callable[[Frame], Any]]] = []
        resized: list[int] = []
        for position, ref in enumerate(group.inputs):
            template.append(None)
            if isinstance(ref, HostRef):
                if symbols_of(ref.expr) <= self.key_symbols - self.instead.keys():
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
                template[position] = self._unowned(ref.name, whole=around)
                if self.bucket is not None and not self._is_static(ref.name):
                    self._known(ref.name)
                    resized.append(position)
        if group.outputs:
            self._make_result_buffers(group, template)
        sinks = [self._sink(group, name, template) for name in group.outputs]
        return CutSteps(group, fn, template, holes, computed, resized, self.wide, sinks, self._below(group))

    def _below(self, group: Group) -> Exclusion | None:
        """What a call of a cut's only op has no use for; looked up once a recording for all layers."""
        key = group.sole_target, any(map(is_differentiable, group.fakes))
        if key not in self._exclusions:
            self._exclusions[key] = exclusion(key[0], group.fakes)
        return self._exclusions[key]

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
        and a piece may have made the view that is returned; or a cut gets such a piece's view of it as well."""
        spec = self.inputs[name]
        shared = spec.written or name in self.split.returned or name in self.viewed
        return spec.kind == STATIC or (spec.kind == STAGED and shared)
