"""What splitting a graph gives: groups in order, pieces and cuts, each with a graph of its own. Frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from .capturable import Reason
from .sole_call import sole_target

PIECE, CUT = "piece", "cut"


@dataclass(frozen=True)
class Ref:
    """A value by name: a placeholder's, or one that an earlier group made."""

    name: str


@dataclass(frozen=True)
class HostRef:
    """A host number of Python type ``kind``, evaluated from the call's inputs (see symbols.py)."""

    expr: Any
    kind: type = int


@dataclass(frozen=True)
class CutNode:
    """One node that is cut: its reason and the user's source line."""

    name: str
    reason: Reason
    source: str


@dataclass(frozen=True)
class Group:
    """A run of nodes that is captured together (a piece) or called eagerly together (a cut).

    Attributes:
        kind: "piece" or "cut".
        index: position among the groups.
        gm: takes ``inputs`` in order, returns a tuple in the order of ``outputs``.
        fakes: the fake values of ``inputs``, for compiling.
        cuts: what was cut; empty for a piece.
        kernels: ops that launch.
        writes: placeholders whose memory it writes to.
        reads: placeholders whose memory its nodes' arguments lie in.
        sized_by_data: results whose size depends on data.
        nodes: names of its nodes in Dynamo's graph.
        mutates: one of its ops may write to an argument.
        draws: one of its ops may draw random numbers.
        reaches_around: a node of it addresses an argument's whole memory, and not only the tensor's own elements.
        overwrites: names of inputs to whose memory it writes, or may write.
        reshaped: names of inputs of which ``fakes`` say what a node somewhere in the graph makes of them in place.
    """

    kind: str
    index: int
    gm: fx.GraphModule
    inputs: tuple[Ref | HostRef, ...]
    outputs: tuple[str, ...]
    fakes: tuple[Any, ...]
    cuts: tuple[CutNode, ...]
    kernels: int
    writes: frozenset[str]
    reads: frozenset[str]
    sized_by_data: frozenset[str]
    nodes: tuple[str, ...]
    mutates: bool = False
    draws: bool = False
    reaches_around: bool = False
    overwrites: frozenset[str] = frozenset()
    reshaped: frozenset[str] = frozenset()

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """The names of those ``inputs`` that are values."""
        return tuple(ref.name for ref in self.inputs if isinstance(ref, Ref))

    @cached_property
    def sole_target(self) -> Any:
        """The function that its only node calls; None where it has other nodes."""
        return sole_target(self.gm)


@dataclass(frozen=True)
class Split:
    """A graph as groups in order, and what it returns.

    Attributes:
        groups: in the order in which they run.
        outputs: a flat list of values.
        spec: how the outputs are nested; None: not at all.
        returned: placeholders whose memory an output lies in.
        roots: for each value by name, the placeholders whose memory it lies in or may lie in.
        reached_around: values, placeholders among them, in whose memory a node reaches around its argument.
        uninitialised: values to whose memory nothing has been written when their group has run.
        storages: for each value by name, numbers that it shares with those that lie in the same memory.
    """

    groups: tuple[Group, ...]
    outputs: tuple[Any, ...]
    spec: Any
    returned: frozenset[str]
    roots: Mapping[str, frozenset[str]]
    reached_around: frozenset[str] = frozenset()
    uninitialised: frozenset[str] = frozenset()
    storages: Mapping[str, frozenset[int | None]] = field(default_factory=dict)

    @cached_property
    def reshaped(self) -> frozenset[str]:
        """Values that cross between groups and are given another shape or other memory in place."""
        return frozenset().union(*(g.reshaped for g in self.groups))

    @cached_property
    def pieces(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.kind == PIECE)

    @cached_property
    def cuts(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.kind == CUT)

    @cached_property
    def last_uses(self) -> Mapping[str, int]:
        """For each value that a group takes or makes, the index of the last such group."""
        last: dict[str, int] = {}
        for group in self.groups:
            for name in (*group.taken, *group.outputs):
                last[name] = group.index
        return last

    @cached_property
    def taken_by_pieces(self) -> frozenset[str]:
        """The values that pieces take."""
        return frozenset(name for piece in self.pieces for name in piece.taken)
