"""Which nodes of Dynamo's graph are prefix-safe, and how rows lie in the values between them. FX only.

A call of n rows may run inside a recording that was made for b >= n rows: then the sizes of all tensors are b's, and
what lies beyond n is garbage: any bits in floating-point tensors, earlier rows in integer ones. A node is
prefix-safe if results within the exact sizes are then those of an exact run, whenever its inputs are. That is judged
node by node, by rules over the ATen ops that each dispatches; what has no rule is not safe. See `Layout` for what
"within the exact sizes" means where dimensions were merged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from .fakes import Held
from .interpret import example, is_host_value, refreshed, tensors
from .interpreter import Interpreter, interpreted
from .nodes import leaf_name, leaves, walk_leaves
from .prefix_call import Value
from .prefix_layouts import Layout, Padded, UnsafeError
from .prefix_ops import UNKNOWN, Blame, Known, Spy


@dataclass
class PrefixFacts:
    """What `prefix_facts` finds.

    Attributes:
        blame: by node name, for each node that is neither prefix-safe nor cut anyway.
        layouts: of every tensor leaf of every value, by the leaf's name.
    """

    blame: dict[str, Blame] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)


def prefix_facts(gm: fx.GraphModule, padded: frozenset[sympy.Symbol], is_cut: Callable[[fx.Node], bool]) -> PrefixFacts:
    """Judge every call node of ``gm`` for which ``is_cut`` is false.

    The values of cut and of blamed nodes count as exact again: plain layouts.

    Args:
        gm: Dynamo's graph, as `gather_facts` takes it; left unchanged.
        padded: the symbols of the sizes that are larger in a padded run.
        is_cut: whether a node runs outside of the pieces, on exactly its rows.
    """
    return interpreted(lambda repeats: _Judge(gm, padded, is_cut, repeats=repeats)).found


@dataclass(frozen=True)
class _Found:
    """What was found of one node.

    Attributes:
        blame: why it isn't prefix-safe; None where it is, or is cut anyway.
        layouts: of the tensor leaves of its value, by their paths.
        given, held: what is known behind it of the tensors in its arguments, and in its value.
        wild: the memory that holds computed integers, by places in `Fakes.memories`.
    """

    blame: Blame | None
    layouts: tuple[tuple[tuple[Any, ...], Layout], ...]
    given: tuple[Value | None, ...]
    held: tuple[Value | None, ...]
    wild: tuple[int, ...]


class _Judge(Interpreter[_Found]):
    def __init__(
        self, gm: fx.GraphModule, padded: frozenset[sympy.Symbol], is_cut: Callable[[fx.Node], bool], *, repeats: bool
    ) -> None:
        super().__init__(gm, repeats=repeats)
        self.padded, self.is_cut = Padded(padded, getattr(self.mode, "shape_env", None)), is_cut
        self.found = PrefixFacts()
        self.known: dict[Held, Value] = {}
        self.wild: set[int | None] = set()

    def context(self, node: fx.Node) -> Hashable:
        return self.is_cut(node)

    def about(self, held: Held) -> Hashable:
        return self.known.get(held), held.memory in self.wild

    def visit_input(self, node: fx.Node) -> None:
        for held in self.fakes.held(node):
            self.known[held] = Value(self.padded.plain(held.tensor.shape))
        self.found.layouts |= {leaf_name(node, path): layout for path, layout in self._plain(node)}

    def examine(self, node: fx.Node) -> tuple[Any, tuple[Blame | None, Known, Any]]:
        value, known = example(node), self._known(node)
        if self.is_cut(node) or (self.skips(node) and is_host_value(value)):
            return self._again(value, known), (None, known, self._plain(node))
        spy = Spy(self.padded, known)
        try:
            if self.skips(node):
                raise _BlameError(_label(node), UNKNOWN)
            try:
                with spy:
                    result = self.run(node)
            except Exception as error:
                raise _BlameError(_label(node), f"could not be examined ({type(error).__name__})") from error
            if spy.blame is not None:
                raise _BlameError(spy.blame.op, spy.blame.why)
            self._check_sizes(node, spy)
            return result, (None, known, self._layouts(node, result, known))
        except _BlameError as error:
            return self._again(value, known), (error.blame, known, self._plain(node))

    def conclude(self, node: fx.Node, seen: tuple[Blame | None, Known, Any]) -> _Found:
        blame, known, layouts = seen
        wild = {self.fakes.number(storage) for storage in known.wild_memory}
        return _Found(
            blame,
            tuple(layouts),
            tuple(known.of(h.tensor) for h in self.fakes.given(node)),
            tuple(known.of(h.tensor) for h in self.fakes.held(node)),
            tuple(k for k, memory in enumerate(self.fakes.memories(node)) if memory is not None and memory in wild),
        )

    def apply(self, node: fx.Node, found: _Found) -> None:
        if found.blame is not None:
            self.found.blame[node.name] = found.blame
        self.found.layouts |= {leaf_name(node, path): layout for path, layout in found.layouts}
        held = zip((*self.fakes.given(node), *self.fakes.held(node)), (*found.given, *found.held), strict=True)
        self.known |= {h: value for h, value in held if value is not None}
        memories = self.fakes.memories(node)
        self.wild |= {memories[k] for k in found.wild}

    def _known(self, node: fx.Node) -> Known:
        """What is known of a node's arguments."""
        known = Known(self.padded)
        for h in self.fakes.given(node):
            if h in self.known:
                known.note(h.tensor, self.known[h])
            if h.memory is not None and h.memory in self.wild:
                known.note_wild(h.tensor)
        return known

    def _check_sizes(self, node: fx.Node, spy: Spy) -> None:
        """A size that the node was given, but that no op of it saw, went into data."""
        if isinstance(node.target, HigherOrderOperator):
            return  # given the sizes that its body's inputs have, whether or not they are used
        given = self.padded.occurring([_host_leaves(example(n)) for n in node.all_input_nodes])
        missing = given - spy.sizes
        if missing and spy.ran:
            raise _BlameError(_label(node), f"uses the size {min(map(str, missing))} as a value")

    def _layouts(self, node: fx.Node, result: Any, known: Known) -> list[tuple[tuple[Any, ...], Layout]]:
        try:
            return [
                (path, known.look(leaf).layout)
                for path, leaf in walk_leaves(result, ())
                if isinstance(leaf, torch.Tensor)
            ]
        except UnsafeError as error:
            raise _BlameError(_label(node), str(error)) from None

    def _plain(self, node: fx.Node) -> list[tuple[tuple[Any, ...], Layout]]:
        return [(path, self.padded.plain(leaf.shape)) for path, leaf in leaves(node) if isinstance(leaf, torch.Tensor)]

    def _again(self, value: Any, known: Known) -> Any:
        """New memory like ``value``, which holds exact rows."""
        value = refreshed(value)
        for tensor in tensors(value):
            known.note(tensor, Value(self.padded.plain(tensor.shape)))
        return value


def _host_leaves(value: Any) -> Any:
    return value if is_host_value(value) else None


def _label(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name
    name = getattr(target, "name", None)
    return name() if callable(name) else str(getattr(target, "__name__", target))


class _BlameError(Exception):
    def __init__(self, op: str, why: str) -> None:
        super().__init__(why)
        self.blame = Blame(op, why)
