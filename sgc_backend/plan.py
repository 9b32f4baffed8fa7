"""The plan: the flat list of steps that one call replays, and running it.

A plan alternates graph replays and eager cuts. Around them it stages the caller's inputs, copies written ones back and
makes the outputs. Everything that can be known when it is made is bound into it: a call evaluates no size, looks up no
name and dispatches on no kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .below_autograd import Exclusion
from .errors import ReplayError, StalePoolError
from .extents import Geometry
from .inputs import distinct_elements
from .pool import GraphPool
from .spans import copy_of, storage_span, tensor_span
from .steps import Below, Frame, Step, bound_steps, no_cut

Real = Mapping[str, Geometry] | None  # the geometry of each value by name at a call's real sizes
BINDINGS = 512  # real sizes that a plan keeps its steps for


def nothing() -> None:
    """The replay in front of a cut behind which another one follows, or behind the last cut."""


@dataclass
class Binding:
    """The steps of a plan for one set of real sizes.

    Attributes:
        segments: (replay, cut) pairs.
        last: the replay behind the last cut.
        below: what all cuts have no use for; see Note [Below autograd].
        outputs: one maker per output value.
        buffers, plain: staged inputs' buffers, and the arguments that are copied into them.
        expanded: (buffer, argument index) of staged inputs that repeat elements.
        pads: (rows behind the real ones, last real row) of staged inputs that the former must hold valid values of.
        copy_back: (buffer, argument index) of staged inputs that the graph writes.
    """

    segments: list[tuple[Callable[[], None], Step]] = field(default_factory=list)
    last: Callable[[], None] = nothing
    below: Exclusion | None = None
    outputs: list[Callable[[Frame], Any]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    expanded: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    pads: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copy_back: list[tuple[torch.Tensor, int]] = field(default_factory=list)


def _run_segments(segments: Sequence[tuple[Callable[[], None], Step]], frame: Frame) -> None:
    for replay, cut in segments:
        replay()
        cut(frame)


class PlanReleasedError(Exception):
    """The plan was released between being found and being run; nothing was touched, so the call starts over."""


@dataclass
class Plan:
    """One key's recordings, bound for running.

    Attributes:
        pool, generation: where the recordings lie, and the pool's generation that they belong to.
        arguments: how many arguments a call has.
        graphs: every graph, in order.
        steps: for each segment its graph's replay, and what makes its cut for real sizes.
        makers: what makes each output's maker for real sizes.
        stagers: what adds a staged input to a binding for real sizes.
        staged, passed: argument indices of inputs that are staged, and of those that only cuts see.
        geometry: real sizes -> what the makers above take: each value's geometry by name; None: the plan serves the
            sizes that it was recorded at, and the makers take None.
        slots: how many values cuts hand on in the frame.
        static: (argument index, address, bytes, label) of static inputs.
        written: argument indices of inputs that the graph writes.
        reached: argument indices of inputs around which a cut reaches, into the rest of their storage; with the first
            address and the address behind the last of a static one's storage.
        storages: weak references to the static inputs' storages.
        static_memory: the same as objects that can be waited for, by argument index.
        runs: how often it ran.
        pool_spans: (first address, address behind the last) of the memory that the recordings may write.
    """

    pool: GraphPool
    generation: int
    arguments: int
    graphs: list[Any] = field(default_factory=list)
    steps: list[tuple[Callable[[], None], Callable[[Real], Step | Below]]] = field(default_factory=list)
    makers: list[Callable[[Real], Callable[[Frame], Any]]] = field(default_factory=list)
    stagers: list[Callable[[Real, Binding], None]] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    geometry: Callable[[Any], Real] | None = None
    slots: int = 0
    static: list[tuple[int, int, int, str]] = field(default_factory=list)
    written: frozenset[int] = frozenset()
    reached: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    storages: tuple[Any, ...] = ()
    static_memory: dict[int, Any] = field(default_factory=dict)
    pool_spans: tuple[tuple[int, int], ...] = ()
    released: bool = False
    runs: int = 0
    _watch: Any = None

    def seal(self) -> Plan:
        """Bind what the hot path reads; call once, when everything is recorded."""
        self.static_indices = [i for i, *_ in self.static]
        self.static_addresses: list[int | None] = [None] * self.arguments
        for index, address, *_ in self.static:
            self.static_addresses[index] = address
        # Most calls need no more than this to tell that nothing lies in the pool.
        self._low = min((start for start, _ in self.pool_spans), default=0)
        self._high = max((end for _, end in self.pool_spans), default=0)
        self._bindings: dict[Any, Binding] = {}
        if self.geometry is None:
            self._bindings[None] = self._bind(None)
        self._blank = [None] * self.slots
        self._static_spans = {i: self.reached.get(i) or (p, p + n) for i, p, n, _ in self.static}
        written = [self._static_spans[i] for i in self.static_indices if i in self.written]
        self._written_static = [(start, end) for start, end in written if end > start]
        self._written_range = (
            min((start for start, _ in self._written_static), default=0),
            max((end for _, end in self._written_static), default=0),
        )
        self._written_staged = [i for i in self.staged if i in self.written]
        self._written_passed = [i for i in self.passed if i in self.written]
        self._written_movable = (*self._written_staged, *self._written_passed)
        self.writes = bool(self.written)
        self._takes = bool(self.staged or self.passed)
        return self

    def _bind(self, sizes: Any) -> Binding:
        real = None if self.geometry is None else self.geometry(sizes)
        bound = Binding()
        for stage in self.stagers:
            stage(real, bound)
        cuts, bound.below = bound_steps(cut(real) for _, cut in self.steps)
        bound.segments = [(replay, cut) for (replay, _), cut in zip(self.steps, cuts, strict=True)]
        if cuts and cuts[-1] is no_cut:
            bound.last, _ = bound.segments.pop()
        bound.outputs = [make(real) for make in self.makers]
        return bound

    def binding(self, sizes: Any = None) -> Binding:
        """The steps for real ``sizes``; made once for each while it is in use."""
        bound = self._bindings.get(sizes)
        if bound is None:
            bound = self._bind(sizes)
            while len(self._bindings) >= BINDINGS:
                self._bindings.pop(next(iter(self._bindings)), None)
            self._bindings[sizes] = bound
        return bound

    def aliased(self, args: Sequence[Any]) -> bool:
        """Whether a recording or a cut would miss a write of this call, because two of its inputs overlap in memory.

        Not where nothing is written: ask ``writes`` first, as most calls need no more.
        """
        staged = {i: tensor_span(args[i]) for i in self.staged}
        passed = {i: tensor_span(args[i]) for i in self.passed}
        for i in self.reached:
            for spans in (staged, passed):
                if i in spans:
                    spans[i] = storage_span(args[i])
        given = (*staged.values(), *passed.values())
        # Two comparisons settle it where nothing lies near what is written.
        low, high = self._written_range
        if any(a < high and low < b for a, b in given):
            for start, end in self._written_static:
                if any(a < end and start < b for a, b in given):
                    return True
        for w in self._written_staged:
            start, end = staged[w]
            others = (*staged.items(), *passed.items(), *self._static_spans.items())
            if any(i != w and a < end and start < b for i, (a, b) in others):
                return True
        for w in self._written_passed:
            start, end = passed[w]
            if any(a < end and start < b for a, b in (*staged.values(), *self._static_spans.values())):
                return True
        return False

    def writes_into_pool(self, args: Sequence[Any]) -> bool:
        """Whether an argument that is written lies in the pool, where a replay writes as well: a static result."""
        at = [args[i].data_ptr() for i in self._written_movable]
        return any(self._low <= p < self._high and any(a <= p < b for a, b in self.pool_spans) for p in at)

    def run(self, args: Sequence[Any], sizes: Any = None) -> list[Any]:
        """Replay for ``args``, whose key and static addresses have been checked, and for which `aliased` and
        `writes_into_pool` are false. ``sizes``: the call's, where the recordings are made for larger ones.

        Returns:
            The outputs. Each is the caller's own (outputs="clone"), or valid until the next replay from the pool.

        Raises:
            PlanReleasedError: released, or its pool reset, since it was found.
            NestedReplayError: see `GraphPool.replay_begin`.
            ReplayError: a cut returned another shape, or no longer a view of its input, than when it was recorded.
        """
        frame = [*args, *self._blank]
        pool = self.pool
        try:
            pool.replay_begin(self.generation)
        except StalePoolError as error:
            raise PlanReleasedError from error
        try:
            if self.released:
                raise PlanReleasedError
            self.runs += 1
            bound = self._bindings.get(sizes) or self.binding(sizes)
            if self._takes:
                self._stage(frame, bound)
            try:
                if bound.below is not None:
                    with bound.below():
                        _run_segments(bound.segments, frame)
                elif bound.segments:
                    _run_segments(bound.segments, frame)
                bound.last()
            finally:
                # Also when a cut raised: what was written until then is written, as it would be without us.
                for buffer, i in bound.copy_back:
                    args[i].copy_(buffer)
            return [make(frame) for make in bound.outputs]
        finally:  # Note [Interrupts] in replay_guard.py
            pool.replaying = False
            pool.let_go()
            if pool.doomed:
                pool.settle()

    def _stage(self, frame: Frame, bound: Binding) -> None:
        # An input may lie in the pool itself (a static output of an earlier call): then it must be out of the way
        # before anything here is written.
        low, high = self._low, self._high
        inside = [i for i in self.staged if low <= frame[i].data_ptr() < high]
        for i in self.passed:
            if type(frame[i]) is not int and low <= frame[i].data_ptr() < high:
                inside.append(i)
        if inside:
            self._move_out(frame, inside)
        if bound.buffers:
            torch._foreach_copy_(bound.buffers, [frame[i] for i in bound.plain])
        for buffer, i in bound.expanded:
            buffer.copy_(distinct_elements(frame[i]))
        for rows, last in bound.pads:
            rows.copy_(last)

    def _move_out(self, frame: Frame, suspects: Sequence[int]) -> None:
        """Put copies of those ``suspects`` that do lie in the pool into ``frame``: for the buffers, for cuts that read
        them behind the first piece, and for the caller who gets them back.

        Raises:
            ReplayError: one of them is written here: its bytes may be those of this very call's outputs.
        """
        inside = [i for i in suspects if any(a <= frame[i].data_ptr() < b for a, b in self.pool_spans)]
        for i in inside:
            if i in self.written:
                raise ReplayError(
                    f"argument {i} lies in the graph pool and is written here; pass a copy of it (.clone())"
                )
        for i in inside:
            frame[i] = copy_of(frame[i], whole=i in self.reached)

    def watch(self, finalizer: weakref.finalize) -> None:
        """Keep ``finalizer``, which lets go of this plan, in place of an earlier one, until the plan is released."""
        if self._watch is not None:
            self._watch.detach()
        finalizer.atexit = False
        self._watch = finalizer

    def release(self, *, trim: bool = True) -> None:
        """Drop the recordings and give their memory back to the pool. Idempotent. ``trim``: see `GraphPool.drop`."""
        if self._watch is not None:
            self._watch.detach()
        # Without the pool's lock: a finalizer may come here on any thread, which must not wait for another one. A
        # replay in progress goes on, since the pool destroys a graph only where nobody has the lock.
        self.released = True
        graphs, self.graphs = self.graphs, []
        for graph in graphs:
            self.pool.drop(graph, trim=trim)
