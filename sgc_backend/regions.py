"""Regions of a graph, which Dynamo calls as one operator, put into the graph: what is to be cut may lie inside.

A model whose layers are marked by ``torch.compiler.nested_compile_region`` is traced once for all of them, and each is
a call of the same body. The body of a checkpoint is no more than itself where no gradients are computed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from .forms import number_form
from .interpret import (
    TRANSPARENT,
    attribute,
    call,
    computing_aside,
    example,
    free_unbacked,
    is_host_value,
    refreshed,
    tensors,
)
from .marks import Marks

INLINED = frozenset(("invoke_subgraph", "tag_activation_checkpoint", "wrap"))
# How Dynamo writes autocast regions down; a torch without these has other nodes, which are met as any node is.
ENTER, EXIT = (getattr(torch.amp.autocast_mode, name, None) for name in ("_enter_autocast", "_exit_autocast"))
# What changes the form or the memory of the tensor that it is called on.
_VIEWS = "as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_"
RESHAPES = frozenset([*_VIEWS.split(), "rename_", "requires_grad_", "resize_", "resize_as_", "set_"])
Values = dict[fx.Node, Any]


def inline_regions(gm: fx.GraphModule, marks: Marks) -> str:
    """Replace calls of regions by the nodes of their bodies, and calls in those as well.

    A call stays one, and is judged as one, where the user names its operator, where its body can't be followed (sizes
    that depend on data, other values than it was traced with), or where its result is used as a whole.

    Returns:
        Why the graph must stay whole: a body changes the form of what it is given, of which Dynamo knows nothing behind
        the call; empty where none does.
    """
    changing = next((name for body in _bodies(gm) for name in _changes_to_operands(body)), None)
    if changing is not None:
        return f"{changing} in the body of a region changes the shape or the memory of a tensor"
    mode = _mode_of(gm)
    adopted: dict[int, str] = {}
    left: set[fx.Node] = set()
    inlined = False
    while calls := [n for n in gm.graph.nodes if n not in left and _is_region(n, marks)]:
        around = _autocast_around(gm, calls)
        for node in calls:
            values = None
            if mode is not None and _is_taken_apart(gm, node):
                with computing_aside(mode), _autocast() as switch:
                    for entry in around[node]:
                        switch(entry, {})
                    values = _values(gm, node, mode, switch)
            if values is None:
                left.add(node)
            else:
                _inline(gm, node, values, adopted)
                inlined = True
    if inlined:
        gm.recompile()
    return ""


def _bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The bodies of a graph's operators, and those in them."""
    for node in gm.graph.find_nodes(op="get_attr"):
        body = attribute(gm, node)
        if isinstance(body, fx.GraphModule):
            yield body
            yield from _bodies(body)


def _changes_to_operands(body: fx.GraphModule) -> Iterator[str]:
    operands = set(body.graph.find_nodes(op="placeholder"))
    for node in body.graph.nodes:
        target = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        name = str(target).partition(".")[0]
        if node.op.startswith("call") and node.args and node.args[0] in operands and name.endswith("_"):
            operands.add(node)  # what works in place returns what it worked on
            if name in RESHAPES:
                yield name


def _is_region(node: fx.Node, marks: Marks) -> bool:
    target = node.target
    if not isinstance(target, HigherOrderOperator) or target.name() not in INLINED:
        return False
    return target.name() not in marks.cut | marks.capturable


def _parts(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    """A call's body, and what the body's placeholders stand for."""
    bodies = [k for k, a in enumerate(node.args) if isinstance(a, fx.Node) and _is_body(gm, a)]
    operands = list(node.args[bodies[0] + 1 :])
    if operands and isinstance(operands[0], str):  # the body's name
        del operands[0]
    return attribute(gm, node.args[bodies[0]]), operands  # type: ignore[arg-type]


def _is_body(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(attribute(gm, node), fx.GraphModule)


def _is_taken_apart(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether every use of a call's result is of one node of its body, or of one operand."""
    body, operands = _parts(gm, node)
    inputs = body.graph.find_nodes(op="placeholder")
    result = body.graph.output_node().args[0]
    if len(inputs) != len(operands) or any(n.op == "call_module" for n in body.graph.nodes):
        return False
    stands_for = dict(zip(inputs, operands, strict=True))

    def is_node(value: Any) -> bool:
        return isinstance(stands_for.get(value, value) if isinstance(value, fx.Node) else value, fx.Node)

    if not isinstance(result, (tuple, list)):
        return is_node(result)
    return all(
        user.target is operator.getitem and user.args[0] is node and is_node(result[user.args[1]])  # type: ignore[index]
        for user in node.users
    )


def _mode_of(gm: fx.GraphModule) -> Any:
    """The mode that the graph's values were made in; while a backend runs, Dynamo has another one for new values."""
    found = (getattr(t, "fake_mode", None) for n in gm.graph.nodes for t in tensors(example(n)))
    return next((mode for mode in found if mode is not None), None)


def _autocast_around(gm: fx.GraphModule, calls: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each call what enters autocast in front of it and isn't left there, outermost first."""
    found: dict[fx.Node, list[fx.Node]] = {}
    active: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.target is ENTER:
            active.append(node)
        elif node.target is EXIT:
            active.remove(node.args[0])  # type: ignore[arg-type]
        elif node in calls:
            found[node] = list(active)
    return found


@contextlib.contextmanager
def _autocast() -> Iterator[Callable[[fx.Node, Values], None]]:
    """Does what a node that switches autocast does; what it left on is off behind it.

    Such nodes decide on dtypes, and without them values of a body would not be what Dynamo found.
    """
    entered: list[Any] = []

    def switch(node: fx.Node, values: Values) -> None:
        if node.target is ENTER:
            values[node] = ENTER(*node.args, **node.kwargs)
            entered.append(values[node])
        else:
            left = values[node.args[0]]  # type: ignore[index]
            entered.remove(left)
            EXIT(left)

    try:
        yield switch
    finally:
        for left in reversed(entered):
            EXIT(left)


def _values(gm: fx.GraphModule, node: fx.Node, mode: Any, switch: Callable[[fx.Node, Values], None]) -> Values | None:
    """What the nodes of a call's body are, computed from its operands; None where that isn't what Dynamo found."""
    body, operands = _parts(gm, node)
    inputs = body.graph.find_nodes(op="placeholder")
    values: Values = dict(zip(inputs, [example(o) if isinstance(o, fx.Node) else o for o in operands], strict=True))
    if any(free_unbacked(example(n)) for n in body.graph.nodes):
        return None
    for n in body.graph.nodes:
        value = example(n)
        if n.op == "output":
            break
        if n.op == "get_attr":
            value = attribute(body, n)
            values[n] = mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
            continue
        if n.target in (ENTER, EXIT):
            switch(n, values)
            continue
        if n.op != "placeholder":
            if value is None or is_host_value(value):
                values[n] = value
            elif isinstance(n.target, HigherOrderOperator) and n.target.name() not in TRANSPARENT:
                values[n] = refreshed(value)
            else:
                try:
                    values[n] = call(body, n, *fx.node.map_arg((n.args, n.kwargs), values.__getitem__))
                except Exception:  # whatever it is: the call stays one, and is examined and judged as one
                    return None
        if _told(values[n]) != _told(value):
            return None
    return values


def _told(value: Any) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    return spec, [_told_of(leaf) if isinstance(leaf, torch.Tensor) else number_form(leaf) for leaf in leaves]


def _told_of(tensor: torch.Tensor) -> Any:
    shape = tensor.shape
    if tensor.layout is torch.strided:
        shape = (*shape, *tensor.stride())  # not the offset: the layers' caches may be parts of one tensor
    return tensor.layout, tensor.dtype, tensor.device, tensor.dim(), list(map(number_form, shape))


def _inline(gm: fx.GraphModule, node: fx.Node, values: Values, adopted: dict[int, str]) -> None:
    body, operands = _parts(gm, node)
    graph = gm.graph
    made: Values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        for n in body.graph.nodes:
            if n.op == "get_attr":
                made[n] = graph.get_attr(_adopt(gm, attribute(body, n), adopted))
                made[n].meta = dict(n.meta)
            elif n.op not in ("placeholder", "output"):
                made[n] = graph.node_copy(n, made.__getitem__)
                if n.target not in (ENTER, EXIT):
                    made[n].meta["example_value"] = values[n]
    result = fx.node.map_arg(body.graph.output_node().args[0], made.__getitem__)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        user.replace_all_uses_with(result[user.args[1]])
        graph.erase_node(user)
    bodies = [n for n in node.all_input_nodes if _is_body(gm, n)]
    graph.erase_node(node)
    for n in bodies:
        if not n.users:
            graph.erase_node(n)


def _adopt(gm: fx.GraphModule, value: Any, adopted: dict[int, str]) -> str:
    """The name under which ``gm`` has ``value``, an attribute of a body."""
    name = adopted.get(id(value))
    if name is None:
        name = adopted[id(value)] = f"_sgc_region_{len(adopted)}"
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            gm.register_buffer(name, value, persistent=False)
        else:
            setattr(gm, name, value)
    return name
