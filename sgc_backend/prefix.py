"""Which nodes of Dynamo's graph are prefix-safe, and how rows lie in the values between them. FX only.

A call of n rows may run inside a recording that was made for b >= n rows: then the sizes of all tensors are b's, and
what lies beyond n is garbage: any bits in floating-point tensors, earlier rows in integer ones. A node is
prefix-safe if results within the exact sizes are then those of an exact run, whenever its inputs are. That is judged
node by node, by rules over the ATen ops that each dispatches; what has no rule is not safe. See `Layout` for what
"within the exact sizes" means where dimensions were merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from .interpret import Interpreter, example, is_host_value, tensors
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
    judge = _Judge(gm, padded, is_cut)
    judge.interpret()
    return judge.found


class _Judge(Interpreter):
    def __init__(self, gm: fx.GraphModule, padded: Padded, is_cut: Callable[[fx.Node], bool]) -> None:
        super().__init__(gm)
        self.padded, self.is_cut = Padded(padded, getattr(self.mode, "shape_env", None)), is_cut
        self.found = PrefixFacts()
        self.known = Known(self.padded)

    def visit_input(self, node: fx.Node) -> None:
        self._plain(node, self.env[node])

    def visit(self, node: fx.Node) -> None:
        value = example(node)
        if self.is_cut(node) or (self.skips(node) and is_host_value(value)):
            self._plain(node, self.refreshed(value))
            return
        spy = Spy(self.padded, self.known)
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
            self._check_sizes(node, result, spy)
            layouts = self._layouts(node, result)
        except _BlameError as error:
            self.found.blame[node.name] = error.blame
            self._plain(node, self.refreshed(value))
        else:
            self.env[node] = result
            self.found.layouts |= layouts

    def _check_sizes(self, node: fx.Node, result: Any, spy: Spy) -> None:
        """A size that the node was given, but that no op of it saw, went into data."""
        if isinstance(node.target, HigherOrderOperator):
            return  # given the sizes that its body's inputs have, whether or not they are used
        given = self.padded.occurring([_host_leaves(example(n)) for n in node.all_input_nodes])
        missing = given - spy.sizes
        if missing and spy.ran:
            raise _BlameError(_label(node), f"uses the size {min(map(str, missing))} as a value")

    def _layouts(self, node: fx.Node, result: Any) -> dict[str, Layout]:
        try:
            return {
                leaf_name(node, path): self.known.look(leaf).layout
                for path, leaf in walk_leaves(result, ())
                if isinstance(leaf, torch.Tensor)
            }
        except UnsafeError as error:
            raise _BlameError(_label(node), str(error)) from None

    def _plain(self, node: fx.Node, value: Any) -> None:
        self.env[node] = value
        for tensor in tensors(value):
            self.known.note(tensor, Value(self.padded.plain(tensor.shape)))
        for path, leaf in leaves(node):
            if isinstance(leaf, torch.Tensor):
                self.found.layouts[leaf_name(node, path)] = self.padded.plain(leaf.shape)


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
