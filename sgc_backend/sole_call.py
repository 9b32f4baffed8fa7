"""A graph of one op, called without the graph around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .below_autograd import overload_of


def sole_call(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[[], Any] | None:
    """The call of ``gm``'s only op, bound to ``given`` in the places of its placeholders; None where it has other
    nodes, takes containers, or returns anything but nothing or what the op returns."""
    node = _sole_node(gm)
    if node is None:
        return None
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    returned = output.args[0]
    if not isinstance(returned, (tuple, list)) or list(returned) not in ([], [node]):
        return None
    arguments = (*node.args, *node.kwargs.values())
    if any(isinstance(value, (tuple, list, dict, slice)) for value in arguments):
        return None
    values = dict(zip(placeholders, given, strict=True))

    def bound(value: Any) -> Any:
        return values[value] if isinstance(value, fx.Node) else value

    return functools.partial(
        overload_of(node.target), *map(bound, node.args), **{k: bound(v) for k, v in node.kwargs.items()}
    )


def sole_target(gm: fx.GraphModule) -> Any:
    """The function that ``gm``'s only node calls; None where it has other nodes."""
    node = _sole_node(gm)
    return None if node is None else overload_of(node.target)


def _sole_node(gm: fx.GraphModule) -> fx.Node | None:
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    return nodes[0] if len(nodes) == 1 and nodes[0].op == "call_function" else None
