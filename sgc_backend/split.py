"""Split Dynamo's graph into pieces and cuts. FX only: graph in, frozen `Split` out; no device is seen.

Nodes keep their order, so writes keep theirs. Four things make the groups whole:

- Results of a tuple-valued node are picked (getitem) right behind it, so that tensors cross between groups, not tuples.
- Sizes never cross: a group that needs one gets it as an input of its own, evaluated from the call's inputs.
- A stretch of views belongs to the piece that follows it, or to the cut where another cut follows: no group is made of
  views alone, and adjacent cuts share one step.
- autocast regions are reopened in each group that lies in them; grad-mode switches are dropped, because what is split
  computes no gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .capturable import Reason
from .facts import GraphFacts, example
from .forms import expression
from .group_builder import Draft, GroupBuilder, plain_sizes
from .groups import CUT, PIECE, CutNode, HostRef, Ref, Split
from .interpret import label
from .nodes import is_container, is_evaluated, leaf_names, plain_value, reads_number, source_line
from .symbols import kind_of


class NotSplittableError(Exception):
    """The graph holds something whose effect spans nodes, so that it must stay whole."""


def split_graph(
    gm: fx.GraphModule,
    facts: GraphFacts,
    why: Callable[[fx.Node], Reason | None],
    *,
    wrap_numbers: bool = False,
) -> Split:
    """Split ``gm`` at the nodes for which ``why`` gives a reason.

    Args:
        gm: Dynamo's graph; left unchanged.
        facts: of the same graph.
        why: the reason that a node is cut, or None.
        wrap_numbers: hand Python numbers to pieces as Dynamo does, in 0-dim host tensors: compilers know how to take
            them out, and most can't take a symbolic float. Otherwise by value.

    Raises:
        NotSplittableError: naming the node that keeps the graph whole, or an op that must not be cut.
    """
    ordered = list(_reordered(gm.graph))
    for node in ordered:
        _refuse_spanning(node)
    _refuse_reshaped_inputs(ordered, facts)
    drafts = _assign(ordered, facts, why)
    home = {node: draft for draft in drafts for node in draft.nodes}
    _refuse_reshaping(ordered, home, facts)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    leaves, spec = pytree.tree_flatten(output.args[0])
    flat = spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children())
    regions = _autocast_regions(ordered)
    wanted = _wanted(drafts, home, leaves)
    plain = plain_sizes(gm.graph)
    groups = tuple(
        GroupBuilder(gm, draft, home, regions, wanted, facts, wrap_numbers and draft.kind == PIECE, plain).build(index)
        for index, draft in enumerate(drafts)
    )
    outputs = tuple(_outgoing(gm, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    returned = {r for leaf in leaves if isinstance(leaf, fx.Node) for r in facts.roots.get(leaf.name, ())}
    roots = {n.name: frozenset(facts.roots.get(n.name, ())) for n in ordered}
    around = _reached_around(ordered, facts)
    storages = {n.name: facts.storages.get(n.name, frozenset()) for n in ordered}
    blank = _uninitialised(drafts, facts)
    for node in wanted:
        roots |= dict.fromkeys(leaf_names(node), roots[node.name])
        storages |= dict.fromkeys(leaf_names(node), storages[node.name])
        if node.name in around:
            around |= set(leaf_names(node))
    nested = None if flat else spec
    return Split(groups, outputs, nested, frozenset(returned), roots, frozenset(around), blank, storages)


def _refuse_reshaped_inputs(ordered: Sequence[fx.Node], facts: GraphFacts) -> None:
    """What recordings and cuts get in place of an input may be another object over the same memory or a copy."""
    for node in ordered:
        if node.op in ("placeholder", "get_attr") and node.name in facts.reshaped:
            raise NotSplittableError(f"the shape or the memory of {label(node)} is changed in place (.data = or set_)")


def _uninitialised(drafts: Sequence[Draft], facts: GraphFacts) -> frozenset[str]:
    """The values to whose memory no node up to the end of their group has written."""
    found: set[str] = set()
    blank: set[int | None] = set()
    for draft in drafts:
        for node in draft.nodes:
            known = facts.nodes.get(node.name)
            if known is None or known.error or not known.ops:
                for source in node.all_input_nodes:
                    blank -= facts.storages.get(source.name, frozenset())
            elif known.only_allocates:
                blank |= facts.storages[node.name]
            else:
                blank -= known.touches
        for node in draft.nodes:
            storages = facts.storages.get(node.name)
            if storages and storages <= blank:
                found.add(node.name)
    return frozenset(found)


def _reached_around(ordered: list[fx.Node], facts: GraphFacts) -> set[str]:
    """The arguments of nodes that reach around them, and what those are views of."""
    found: set[str] = set()
    for node in reversed(ordered):
        sources = [source.name for source in node.all_input_nodes]
        if node.name in facts.nodes and facts.nodes[node.name].reaches_around:
            found.update(sources)
        elif node.name in found:
            found.update(name for name in sources if facts.share_memory(node.name, name))
    return found


def _reordered(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes in order, with every pick from a tuple-valued node directly behind it."""

    def picks(node: fx.Node) -> Iterator[fx.Node]:
        if not is_container(example(node)):
            return
        for user in node.users:
            if _is_pick(user):
                yield user
                yield from picks(user)

    for node in graph.nodes:
        if _is_pick(node):
            continue
        yield node
        if node.op.startswith("call"):
            yield from picks(node)


def _is_pick(node: fx.Node) -> bool:
    source = node.args[0] if node.op == "call_function" and node.args else None
    return (
        node.target is operator.getitem
        and isinstance(source, fx.Node)
        and source.op.startswith("call")
        and is_container(example(source))
    )


def _refuse_spanning(node: fx.Node) -> None:
    if node.op == "call_module":
        raise NotSplittableError(f"module call {node.target}: its weights are hidden from the graph")
    target = node.target
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    namespace = getattr(target, "namespace", "")
    if "functorch" in module or name in ("_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting"):
        raise NotSplittableError(f"torch.func transform ({name})")
    if node.op == "call_function" and not _is_mode_switch(node) and _sets_state(node, name):
        raise NotSplittableError(f"{name} changes a setting of torch for the nodes behind it")
    if namespace == "streams" or "torch.cuda.streams" in module or isinstance(example(node), torch.Stream):
        raise NotSplittableError(f"streams or events used inside the graph ({name})")


def _refuse_reshaping(ordered: Sequence[fx.Node], home: dict[fx.Node, Draft], facts: GraphFacts) -> None:
    """A cut gets the same tensors over what pieces left at every replay, and pieces what they were recorded with. So
    neither would see what a cut made of a tensor's shape at the right time."""
    for node in ordered:
        draft = home.get(node)
        op = facts.nodes[node.name].reshapes if draft is not None and draft.kind == CUT else ""
        if not op:
            continue
        operand = node.all_input_nodes[0]
        for other in ordered:
            same = other is operand or facts.share_memory(operand.name, other.name)
            if home.get(other) is draft or other.name not in facts.reshaped or not same:
                continue
            if any(home[n].kind == PIECE for n in (other, *other.users) if n in home):
                raise NotSplittableError(
                    f"{op} changes the shape or the memory of {operand.name} in a cut, and a piece has it"
                )


def _is_mode_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MODE_SWITCHES


MODE_SWITCHES = tuple(
    switch
    for switch in (
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch._C._set_grad_enabled,
        getattr(torch.autograd.grad_mode, "_enter_inference_mode", None),
        getattr(torch.autograd.grad_mode, "_exit_inference_mode", None),
    )
    if switch is not None
)


def _sets_state(node: fx.Node, name: str) -> bool:
    """Whether a node works through torch's global state alone: it takes no tensor and gives none."""
    values = [example(n) for n in node.all_input_nodes]
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves([values, example(node)])):
        return False
    words = ("_set_", "set_", "_enter", "_exit", "_push", "_pop", "use_", "_sdpa_kernel", "manual_seed", "_sdp")
    return name.startswith(words) and getattr(node.target, "__module__", "").split(".")[0] in ("torch", "")


def _autocast_regions(ordered: list[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the autocast entries that are open around it, outermost first."""
    regions: dict[fx.Node, tuple[fx.Node, ...]] = {}
    active: tuple[fx.Node, ...] = ()
    for node in ordered:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            active = (*active, node)
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            active = tuple(n for n in active if n is not node.args[0])
        regions[node] = active
    return regions


def _assign(ordered: list[fx.Node], facts: GraphFacts, why: Callable[[fx.Node], Reason | None]) -> list[Draft]:
    drafts: list[Draft] = []
    idle: list[fx.Node] = []  # views and sizes since the last cut: they join whatever comes next
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in ordered:
        if not node.op.startswith("call") or _is_mode_switch(node) or reads_number(node, facts):
            continue
        if _is_pick(node):
            where = home[node.args[0]]  # type: ignore[index]
            where.append(node)
            home[node] = where
            continue
        reason = why(node)
        current = drafts[-1] if drafts else None
        if reason is None and not facts.nodes[node.name].launches:
            where = current.nodes if current is not None and current.kind == PIECE else idle
        else:
            kind = PIECE if reason is None else CUT
            if current is None or current.kind != kind:
                current = Draft(kind, [], [])
                drafts.append(current)
            for waiting in idle:
                home[waiting] = current.nodes
            current.nodes.extend(idle)
            idle.clear()
            where = current.nodes
            if reason is not None:
                current.cuts.append(CutNode(node.name, reason, source_line(node)))
        where.append(node)
        home[node] = where
    if idle:
        if not drafts or drafts[-1].kind == PIECE:
            drafts.append(Draft(CUT, [], []))
        drafts[-1].nodes.extend(idle)
    return drafts


def _wanted(drafts: list[Draft], home: dict[fx.Node, Draft], leaves: list[Any]) -> dict[fx.Node, None]:
    """Values that leave the group that makes them, in order; sizes that follow from the inputs never do."""
    wanted: dict[fx.Node, None] = {}
    for draft in drafts:
        for node in draft.nodes:
            for source in node.all_input_nodes:
                if source in home and home[source] is not draft:
                    wanted[source] = None
    for leaf in leaves:
        if isinstance(leaf, fx.Node) and leaf in home:
            wanted[leaf] = None
    return {n: None for n in wanted if not is_evaluated(n)}


def _outgoing(gm: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(gm)
    if not is_evaluated(node):
        return Ref(node.name)
    return pytree.tree_map(lambda v: HostRef(expression(v), kind_of(v)), plain_value(example(node)))
