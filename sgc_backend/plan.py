"""The plan: the flat list of steps that one call replays, and running it.

A plan alternates graph replays and eager cuts. Around them it stages the caller's inputs, copies written ones back and
makes the outputs. Everything that can be known when it is made is bound into it: a call evaluates no size, looks up no
name and dispatches on no kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import ReplayError
from .inputs import distinct_elements
from .pool import GraphPool

Frame = list[Any]  # one call's arguments, followed by what its cuts hand on to other cuts and to the caller
Step = Callable[[Frame], None]


def nothing() -> None:
    """The replay of a segment that begins with a cut."""


def no_cut(frame: Frame) -> None:
    """The cut of a segment that ends with a piece."""


@dataclass
class Plan:
    """One key's recordings, bound for running.

    Attributes:
        graphs: every graph, in order; kept alive by the plan.
        segments: (replay, cut) pairs.
        staging: (buffer, argument index, expanded) of staged inputs.
        copy_back: (buffer, argument index) of staged inputs that the graph writes.
        outputs: one maker per output value.
        arguments: how many arguments a call has.
        slots: how many values cuts hand on in the frame.
        static: (argument index, address, label) of static inputs.
        written_storages: addresses of storages that the graph writes; a staged input over one of them would be a stale
            copy of it.
        written_staged: argument indices of staged inputs that the graph writes.
        tensors: argument indices of all device tensors, needed only where staged inputs are written.
    """

    pool: GraphPool
    generation: int
    graphs: list[Any] = field(default_factory=list)
    segments: list[tuple[Callable[[], None], Step]] = field(default_factory=list)
    staging: list[tuple[torch.Tensor, int, bool]] = field(default_factory=list)
    copy_back: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    outputs: list[Callable[[Frame], Any]] = field(default_factory=list)
    arguments: int = 0
    slots: int = 0
    static: list[tuple[int, int, str]] = field(default_factory=list)
    written_storages: frozenset[int] = frozenset()
    written_staged: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    storages: list[Any] = field(default_factory=list)

    def seal(self) -> Plan:
        """Bind what the hot path reads; call once, when everything is recorded."""
        self.static_indices = [i for i, _, _ in self.static]
        self.static_addresses: list[int | None] = [None] * self.arguments
        for index, address, _ in self.static:
            self.static_addresses[index] = address
        plain = [(b, i) for b, i, expanded in self.staging if not expanded]
        self._plain_buffers = [b for b, _ in plain]
        self._plain_indices = [i for _, i in plain]
        self._expanded = [(b, i) for b, i, expanded in self.staging if expanded]
        self._blank = [None] * self.slots
        self._staged_indices = [i for _, i, _ in self.staging]
        return self

    def aliased(self, args: Sequence[Any]) -> bool:
        """Whether a tensor of this call shares memory with one that the graph writes, other than itself."""
        if self.written_storages:
            for i in self._staged_indices:
                if args[i].untyped_storage().data_ptr() in self.written_storages:
                    return True
        for w in self.written_staged:
            own = args[w].untyped_storage().data_ptr()
            if any(i != w and args[i].untyped_storage().data_ptr() == own for i in self.tensors):
                return True
        return False

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Replay for ``args``, whose key and static addresses have been checked.

        Returns:
            The outputs. Each is the caller's own (outputs="clone"), or valid until the next replay from the pool.

        Raises:
            NestedReplayError, StalePoolError: see `GraphPool.replay_begin`.
            ReplayError: a cut returned another shape, or no longer a view of its input, than when it was recorded.
        """
        frame = [*args, *self._blank]
        pool = self.pool
        pool.replay_begin(self.generation)
        try:
            if self._plain_buffers:
                torch._foreach_copy_(self._plain_buffers, [args[i] for i in self._plain_indices])
            for buffer, i in self._expanded:
                buffer.copy_(distinct_elements(args[i]))
            for replay, cut in self.segments:
                replay()
                cut(frame)
            for buffer, i in self.copy_back:
                args[i].copy_(buffer)
            return [make(frame) for make in self.outputs]
        finally:
            pool.replay_end()

    def release(self) -> None:
        """Drop the recordings and give their memory back to the pool. Idempotent."""
        graphs, self.graphs = self.graphs, []
        self.segments = []
        for graph in graphs:
            self.pool.drop(graph)


def cut_step(
    fn: Callable[..., Sequence[Any]],
    template: list[Any],
    holes: list[tuple[int, int]],
    computed: list[tuple[int, Callable[[Frame], Any]]],
    sinks: list[Callable[[Any, Frame], None] | None],
) -> Step:
    """A step that calls a cut eagerly.

    Args:
        fn: the group's callable.
        template: its arguments; bound ones in place, None elsewhere.
        holes: (position, frame index) of arguments that come with each call.
        computed: (position, function of the frame) of sizes that aren't fixed by the key.
        sinks: what to do with each result; None drops it.
    """
    landing = [(k, sink) for k, sink in enumerate(sinks) if sink is not None]

    def call(frame: Frame) -> None:
        args = template.copy()
        for position, index in holes:
            args[position] = frame[index]
        for position, compute in computed:
            args[position] = compute(frame)
        results = fn(*args)
        for k, sink in landing:
            sink(results[k], frame)

    return call


def into_slot(slot: int) -> Callable[[Any, Frame], None]:
    """A sink that hands a result on to later cuts and to the outputs."""

    def sink(value: Any, frame: Frame) -> None:
        frame[slot] = value

    return sink


def into_buffer(buffer: torch.Tensor, name: str) -> Callable[[Any, Frame], None]:
    """A sink that lands a result where the next recordings read it; no copy where the cut wrote it there itself."""
    address, shape = buffer.data_ptr(), buffer.shape

    def sink(value: torch.Tensor, frame: Frame) -> None:
        if value.data_ptr() == address and value.shape == shape and value.stride() == buffer.stride():
            return
        if value.shape != shape or value.dtype != buffer.dtype:
            raise ReplayError(
                f"cut result {name}: recorded as {tuple(shape)} {buffer.dtype}, now {tuple(value.shape)} "
                f"{value.dtype}; a cut must return the same shape and dtype for the same sizes"
            )
        buffer.copy_(value)

    return sink


def expect_alias(address: int, name: str) -> Callable[[Any, Frame], None]:
    """A sink for a result that was a view of the cut's input when it was recorded, and must still be."""

    def sink(value: torch.Tensor, frame: Frame) -> None:
        if value.data_ptr() != address:
            raise ReplayError(
                f"cut result {name} was a view of the cut's input when it was recorded and is not any more; "
                f"return the same kind of result every time, or name the op in cut_ops of a model of its own"
            )

    return sink
