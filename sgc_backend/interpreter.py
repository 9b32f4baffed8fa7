"""Goes through Dynamo's graph node by node on fake tensors, for whoever wants to watch what the nodes dispatch.

FX and fake tensors only; no device is touched, and neither guards nor symbols come of it. A node that is like an
earlier one isn't run: see Note [Repeated nodes].
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator

from .fakes import ChangedError, Fakes, Held
from .interpret import (
    TRANSPARENT,
    attribute,
    call,
    computing_aside,
    example,
    free_unbacked,
    is_host_value,
    is_wrapped_number,
    refreshed,
)
from .repeats import Found, Repeats, Seen

Made = TypeVar("Made", bound="Interpreter[Any]")


class Interpreter(abc.ABC, Generic[Found]):
    """Visits the nodes of a graph in order. Placeholders get fakes over storages of their own.

    A subclass says what it wants to find of a call node: `examine` finds it and the node's value, either by `run`, or
    for a node that `skips` says must not be run by `refreshed` from what Dynamo computed; `conclude` tells it by
    places; and `apply` is given it, for this node and for every later one that is like it.

    Args:
        gm: Dynamo's graph.
        repeats: whether nodes that are like an earlier one are known by that; False: every node is run.
    """

    def __init__(self, gm: fx.GraphModule, *, repeats: bool) -> None:
        self.gm = gm
        self.mode: Any = detect_fake_mode([example(n) for n in gm.graph.nodes])
        self.fakes = Fakes(told=repeats)
        self.like: dict[fx.Node, Seen[Found]] = {}  # of nodes that weren't run
        self._repeats: Repeats[Found] = Repeats(self.fakes, self.about, self.context)
        self._order = {node: place for place, node in enumerate(gm.graph.nodes)}

    def interpret(self) -> None:
        with computing_aside(self.mode):
            for node in self.gm.graph.nodes:
                if node.op == "placeholder":
                    self.fakes.hold(node, self._placeholder(node))
                    self.visit_input(node)
                elif node.op == "get_attr":
                    self.fakes.hold(node, self._attribute(node))
                elif node.op != "output":
                    self._visit(node)

    # -- what a subclass says ----------------------------------------------------------------------------------------

    def visit_input(self, node: fx.Node) -> None:
        """Called behind each placeholder."""

    @abc.abstractmethod
    def examine(self, node: fx.Node) -> tuple[Any, Any]:
        """The value of a call node, and what `conclude` is given."""

    @abc.abstractmethod
    def conclude(self, node: fx.Node, seen: Any) -> Found:
        """What was found, told by places alone: in `Fakes.given`, `Fakes.held` and `Fakes.memories` of the node."""

    @abc.abstractmethod
    def apply(self, node: fx.Node, found: Found) -> None:
        """Called once for each call node, in order, when ``fakes`` have its value."""

    def context(self, node: fx.Node) -> Hashable:
        """What else has to be equal for two nodes to be alike."""

    def about(self, held: Held) -> Hashable:
        """What else has to be equal for two arguments to be alike."""

    # -- what it can ask ---------------------------------------------------------------------------------------------

    def run(self, node: fx.Node) -> Any:
        """Call what ``node`` calls with the values of its arguments."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.fakes.real)
        return call(self.gm, node, args, kwargs)

    def skips(self, node: fx.Node) -> bool:
        """Nodes that must not or need not be run again: host arithmetic, unbacked sizes, operators of operators."""
        value = example(node)
        if isinstance(node.target, HigherOrderOperator):
            return node.target.name() not in TRANSPARENT
        if free_unbacked(value) or any(free_unbacked(example(n)) for n in node.all_input_nodes):
            return True
        return value is not None and is_host_value(value)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        fakes = self.fakes
        key = self._repeats.key(node)
        seen = self._repeats.find(key)
        if seen is not None:
            self.like[node] = seen
            fakes.assume(node, self._repeats.value_like(node, seen.value))
            self.apply(node, seen.found)
            return
        self._make(fakes.given(node))
        numbered = fakes.numbered
        value, raw = self.examine(node)
        fakes.check_same(node)
        fakes.hold(node, value)
        found = self.conclude(node, raw)
        self._repeats.keep(node, key, found, numbered)
        self.apply(node, found)

    def _make(self, wanted: Iterable[Held]) -> None:
        """Make the fakes that are not there yet."""
        needed: set[fx.Node] = set()
        stack = [h.node for h in wanted if h.tensor is None]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if not self.like[node].fresh:
                    stack.extend(h.node for h in self.fakes.given(node) if h.tensor is None)
        for node in sorted(needed, key=self._order.__getitem__):
            self.fakes.fill(node, refreshed(example(node)) if self.like[node].fresh else self.run(node))

    def _placeholder(self, node: fx.Node) -> Any:
        value = example(node)
        if not isinstance(value, torch.Tensor) or is_wrapped_number(node):
            return value
        return refreshed(value)

    def _attribute(self, node: fx.Node) -> Any:
        value = attribute(self.gm, node)
        if isinstance(value, torch.Tensor) and self.mode is not None:
            return self.mode.from_tensor(value, static_shapes=True)
        return value


def interpreted(make: Callable[[bool], Made]) -> Made:
    """The interpreter that ``make(repeats)`` makes, once it went through its graph."""
    interpreter = make(True)
    try:
        interpreter.interpret()
    except ChangedError:
        interpreter = make(False)
        interpreter.interpret()
    return interpreter
