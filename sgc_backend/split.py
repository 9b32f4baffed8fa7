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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .capturable import Reason
from .facts import GraphFacts, example, free_unbacked, is_host_value
from .symbols import expression, kind_of, number

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


@dataclass(frozen=True)
class Split:
    """A graph as groups in order, and what it returns.

    Attributes:
        groups: in the order in which they run.
        outputs: a flat list of values.
        spec: how the outputs are nested; None: not at all.
        returned: placeholders whose memory an output lies in.
        roots: for each value by name, the placeholders whose memory it lies in or may lie in.
    """

    groups: tuple[Group, ...]
    outputs: tuple[Any, ...]
    spec: Any
    returned: frozenset[str]
    roots: Mapping[str, frozenset[str]]

    @property
    def pieces(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.kind == PIECE)

    @property
    def cuts(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.kind == CUT)


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
        NotSplittableError: naming the node that keeps the graph whole.
    """
    ordered = list(_reordered(gm.graph))
    for node in ordered:
        _refuse_spanning(node)
    drafts = _assign(ordered, facts, why)
    home = {node: draft for draft in drafts for node in draft.nodes}
    output = next(n for n in gm.graph.nodes if n.op == "output")
    leaves, spec = pytree.tree_flatten(output.args[0])
    flat = spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children())
    regions = _autocast_regions(ordered)
    wanted = _wanted(drafts, home, leaves)
    plain = _plain_sizes(gm.graph)
    groups = tuple(
        _Builder(gm, draft, home, regions, wanted, facts, wrap_numbers and draft.kind == PIECE, plain).build(index)
        for index, draft in enumerate(drafts)
    )
    outputs = tuple(_outgoing(gm, leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    returned = {r for leaf in leaves if isinstance(leaf, fx.Node) for r in facts.roots.get(leaf.name, ())}
    roots = {n.name: frozenset(facts.roots.get(n.name, ())) for n in ordered}
    for node in wanted:
        roots |= dict.fromkeys(_leaf_names(node), roots[node.name])
    return Split(groups, outputs, None if flat else spec, frozenset(returned), roots)


@dataclass
class _Draft:
    kind: str
    nodes: list[fx.Node]
    cuts: list[CutNode]


def _reordered(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes in order, with every pick from a tuple-valued node directly behind it."""

    def picks(node: fx.Node) -> Iterator[fx.Node]:
        if not _is_container(example(node)):
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
        and _is_container(example(source))
    )


def _is_container(value: Any) -> bool:
    """Whether ``value`` is a tuple or list that holds tensors."""
    return isinstance(value, (tuple, list)) and not isinstance(value, torch.Size) and not is_host_value(value)


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


def _reads_number(node: fx.Node, facts: GraphFacts) -> bool:
    """The .item() of a Python number that Dynamo wrapped: every group takes the number itself."""
    source = node.args[0] if node.op == "call_method" and node.target == "item" else None
    return isinstance(source, fx.Node) and source.name in facts.wrapped_numbers


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


def _assign(ordered: list[fx.Node], facts: GraphFacts, why: Callable[[fx.Node], Reason | None]) -> list[_Draft]:
    drafts: list[_Draft] = []
    idle: list[fx.Node] = []  # views and sizes since the last cut: they join whatever comes next
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in ordered:
        if not node.op.startswith("call") or _is_mode_switch(node) or _reads_number(node, facts):
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
                current = _Draft(kind, [], [])
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
            drafts.append(_Draft(CUT, [], []))
        drafts[-1].nodes.extend(idle)
    return drafts


def _wanted(drafts: list[_Draft], home: dict[fx.Node, _Draft], leaves: list[Any]) -> dict[fx.Node, None]:
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
    return {n: None for n in wanted if not _is_evaluated(n)}


def _is_float_arithmetic(node: fx.Node) -> bool:
    """Arithmetic on host floats: sympy reorders it, which changes last bits, so it is computed as it was written."""
    return (
        node.op == "call_function"
        and isinstance(example(node), torch.SymFloat)
        and all(_is_evaluated(n) for n in node.all_input_nodes)
    )


def _is_evaluated(node: fx.Node) -> bool:
    value = example(node)
    return node.op != "get_attr" and value is not None and is_host_value(value) and not free_unbacked(value)


def _outgoing(gm: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(gm)
    if not _is_evaluated(node):
        return Ref(node.name)
    return pytree.tree_map(lambda v: HostRef(expression(v), kind_of(v)), _plain(example(node)))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


class _Builder:
    """Builds one group's own graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        draft: _Draft,
        home: dict[fx.Node, _Draft],
        regions: dict[fx.Node, tuple[fx.Node, ...]],
        wanted: dict[fx.Node, None],
        facts: GraphFacts,
        wrap_numbers: bool,
        plain_sizes: dict[Any, Any],
    ) -> None:
        self.wrap_numbers = wrap_numbers
        self.gm, self.draft, self.home, self.regions = gm, draft, home, regions
        self.wanted, self.facts = wanted, facts
        self.plain_sizes = plain_sizes
        self.graph = fx.Graph()
        self.inputs: dict[Ref | HostRef, fx.Node] = {}
        self.fakes: list[Any] = []
        self.local: dict[fx.Node, Any] = {}
        self.open: list[tuple[fx.Node, fx.Node]] = []  # autocast entries: the original and this group's own

    def build(self, index: int) -> Group:
        self._collect_inputs()
        for node in self.draft.nodes:
            self._enter(self.regions[node])
            copied = self.graph.node_copy(node, self._argument)
            copied.meta = dict(node.meta)
            self.local[node] = copied
        self._enter(())
        outputs, values, sized_by_data = [], [], set()
        for node in self.draft.nodes:
            if node in self.wanted:
                for path, leaf in _leaves(node):
                    outputs.append(_leaf_name(node, path))
                    if free_unbacked(leaf):
                        sized_by_data.add(outputs[-1])
                    values.append(self._pick(self.local[node], path))
        self.graph.output(tuple(values))
        self.graph.lint()
        own = [self.facts.nodes[n.name] for n in self.draft.nodes]
        return Group(
            kind=self.draft.kind,
            index=index,
            gm=fx.GraphModule(self.gm, self.graph, f"Group{index}"),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            fakes=tuple(self.fakes),
            cuts=tuple(self.draft.cuts),
            kernels=sum(f.launches for f in own),
            writes=frozenset(name for f in own for name in f.writes),
            reads=frozenset(name for f in own for name in f.reads),
            sized_by_data=frozenset(sized_by_data),
            nodes=tuple(n.name for n in self.draft.nodes),
        )

    def _collect_inputs(self) -> None:
        # Placeholders must precede everything else, so the inputs are found before any node is copied.
        outside: dict[fx.Node, None] = {}
        for node in self.draft.nodes:
            for source in node.all_input_nodes:
                if self.home.get(source) is not self.draft:
                    self._expand(source, outside)
        copied = [n for n in outside if n.op == "get_attr" or self._is_wrapped(n) or _is_float_arithmetic(n)]
        for source in copied:
            if self._is_wrapped(source):
                self._wrapped_placeholder(source)
        for source in outside:
            if source not in copied:
                self.local[source] = self._import(source)
        if self.draft.kind == PIECE:
            self._show_symbols()
        for source in copied:
            self.local[source] = self._import(source)

    def _show_symbols(self) -> None:
        """Sizes that no input shows by themselves, as a dimension s + 1 doesn't show s, become inputs of their own.

        Compilers compute derived sizes from the plain ones, and inductor refuses a graph that lacks one.
        """
        shown, used = set(), set()
        for value in self.fakes:
            for expr in map(expression, _sizes(value)):
                used |= getattr(expr, "free_symbols", set())
                shown |= {expr} & used
        for symbol in sorted(used - shown, key=str):
            if symbol in self.plain_sizes:
                self._placeholder(HostRef(symbol), self.plain_sizes[symbol])

    def _expand(self, node: fx.Node, found: dict[fx.Node, None]) -> None:
        """``node`` and, in front of it, what must be there to compute it again."""
        if _is_float_arithmetic(node):
            for source in node.all_input_nodes:
                self._expand(source, found)
        found[node] = None

    def _import(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.graph.node_copy(node, lambda n: n)
        value = example(node)
        if _is_float_arithmetic(node):
            copied = self.graph.node_copy(node, self._argument)
            copied.meta = dict(node.meta)
            return copied
        if self._is_wrapped(node):
            wrapped = self._wrapped_placeholder(node)
            copied = self.graph.node_copy(node, lambda n: wrapped)
            copied.meta = dict(node.meta)
            return copied
        if _is_evaluated(node):
            return pytree.tree_map(lambda v: self._host(expression(v), v), _plain(value))
        if _is_container(value):
            leaves, spec = pytree.tree_flatten(value)
            names = _leaf_names(node)
            return pytree.tree_unflatten(
                [self._placeholder(Ref(name), leaf) for name, leaf in zip(names, leaves, strict=True)], spec
            )
        return self._placeholder(Ref(node.name), value)

    def _wrapped_placeholder(self, read: fx.Node) -> fx.Node:
        source = read.args[0]
        fake = example(source)
        # The symbol that .item() of this fake gives; without it a compiler that traces the piece sees a host sync.
        fake.item_memo = example(read)
        return self._placeholder(Ref(source.name), fake)

    def _is_wrapped(self, node: fx.Node) -> bool:
        return self.wrap_numbers and _reads_number(node, self.facts) and bool(expression(example(node)).free_symbols)

    def _host(self, expr: Any, value: Any) -> Any:
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        if not expr.free_symbols:
            return kind_of(value)(number(expr))
        return self._placeholder(HostRef(expr, kind_of(value)), value)

    def _placeholder(self, ref: Ref | HostRef, value: Any) -> fx.Node:
        found = self.inputs.get(ref)
        if found is None:
            name = ref.name if isinstance(ref, Ref) else f"size_{len(self.inputs)}"
            found = self.inputs[ref] = self.graph.placeholder(name)
            found.meta["example_value"] = value
            self.fakes.append(value)
        return found

    def _argument(self, node: fx.Node) -> Any:
        return self.local[node]

    def _pick(self, node: fx.Node, path: tuple[Any, ...]) -> fx.Node:
        for step in path:
            node = self.graph.call_function(operator.getitem, (node, step))
        return node

    def _enter(self, region: tuple[fx.Node, ...]) -> None:
        keep = 0
        while keep < min(len(self.open), len(region)) and self.open[keep][0] is region[keep]:
            keep += 1
        for _, entered in reversed(self.open[keep:]):
            self.graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
        del self.open[keep:]
        for entry in region[keep:]:
            own = self.graph.call_function(torch.amp.autocast_mode._enter_autocast, entry.args, entry.kwargs)
            self.open.append((entry, own))


def _plain_sizes(graph: fx.Graph) -> dict[Any, Any]:
    """For each symbol that an input shows by itself, the size that shows it."""
    found = [size for node in graph.nodes if node.op == "placeholder" for size in _sizes(example(node))]
    return {expression(size): size for size in found if getattr(expression(size), "is_Symbol", False)}


def _sizes(value: Any) -> list[Any]:
    """The sizes in which a compiler finds a value's symbols."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return [*value.shape, *value.stride()]
    return [value] if isinstance(value, torch.SymInt) else []


def _walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))
    else:
        yield path, value


def _leaves(node: fx.Node) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of every leaf of a value: one, with an empty path, where it isn't a container."""
    value = example(node)
    if not _is_container(value):
        return [((), value)]
    return list(_walk(value, ()))


def _leaf_names(node: fx.Node) -> list[str]:
    return [_leaf_name(node, path) for path, _ in _leaves(node)]


def _leaf_name(node: fx.Node, path: tuple[Any, ...]) -> str:
    return "__".join((node.name, *map(str, path)))


def source_line(node: fx.Node) -> str:
    """The user's line that made ``node``, as ``file:line: code``, or an empty string."""
    trace = node.stack_trace or ""
    frames = [line.strip() for line in trace.strip().splitlines()]
    for position in range(len(frames) - 1, -1, -1):
        if frames[position].startswith("File "):
            place = frames[position].removeprefix("File ").split(", in ")[0]
            file, _, line = place.partition(", line ")
            code = frames[position + 1] if position + 1 < len(frames) else ""
            return f"{file.strip(chr(34))}:{line}: {code}"
    return ""
