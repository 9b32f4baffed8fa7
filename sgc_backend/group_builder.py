"""Builds one group's own graph out of the nodes that fell to it."""

from __future__ import annotations

import collections
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .facts import GraphFacts, NodeFacts, example, free_unbacked
from .forms import expression, storage_id
from .groups import PIECE, CutNode, Group, HostRef, Ref
from .nodes import (
    is_container,
    is_evaluated,
    is_float_arithmetic,
    leaf_name,
    leaf_names,
    leaves,
    plain_value,
    reads_number,
)
from .symbols import kind_of, number


@dataclass
class Draft:
    kind: str
    nodes: list[fx.Node]
    cuts: list[CutNode]


class GroupBuilder:
    """Builds one group's own graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        draft: Draft,
        home: dict[fx.Node, Draft],
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
        self.sources: dict[str, str] = {}  # input by name: the node that gives it, or a part of it
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
                for path, leaf in leaves(node):
                    outputs.append(leaf_name(node, path))
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
            draws=any(f.error or (f.launches and not f.ops) or any(map(_may_draw, f.ops)) for f in own),
            mutates=any(
                f.error or any(op._schema.is_mutable for op in f.ops) if f.ops else n.target is not operator.getitem
                for n, f in zip(self.draft.nodes, own, strict=True)
            ),
            reaches_around=any(f.reaches_around for f in own),
            overwrites=self._overwrites(own),
            reshaped=frozenset(name for name, source in self.sources.items() if source in self.facts.reshaped),
        )

    def _overwrites(self, own: list[NodeFacts]) -> frozenset[str]:
        writes = {name for f in own for name in f.writes}
        touches = {storage for f in own for storage in f.touches}
        return frozenset(
            name
            for name, source in self.sources.items()
            if not writes.isdisjoint(self.facts.roots.get(source, ()))
            or not touches.isdisjoint(self.facts.storages.get(source, ()))
        )

    def _collect_inputs(self) -> None:
        # Placeholders must precede everything else, so the inputs are found before any node is copied.
        outside: dict[fx.Node, None] = {}
        for node in self.draft.nodes:
            for source in node.all_input_nodes:
                if self.home.get(source) is not self.draft:
                    self._expand(source, outside)
        copied = [n for n in outside if n.op == "get_attr" or self._is_wrapped(n) or is_float_arithmetic(n)]
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

        Compilers compute derived sizes from the plain ones, and inductor refuses a graph that lacks one. Tensors of one
        storage show nothing where one is written: AOTAutograd puts one flat tensor in their place.
        """
        merged = self._merged_storages()
        shown, used = set(), set()
        for value in self.fakes:
            hidden = isinstance(value, torch.Tensor) and storage_id(value) in merged
            for expr in map(expression, (*_sizes(value), *([value.storage_offset()] if hidden else ()))):
                used |= getattr(expr, "free_symbols", set())
                if not hidden:
                    shown |= {expr} & used
        for symbol in sorted(used - shown, key=str):
            if symbol in self.plain_sizes:
                self._placeholder(HostRef(symbol), self.plain_sizes[symbol])

    def _merged_storages(self) -> set[int]:
        """Storages of several inputs of a piece that a compiler makes one input of, since it sees a write."""
        ops = (op for n in self.draft.nodes for op in self.facts.nodes[n.name].ops)
        if not self.wrap_numbers or not any(op._schema.is_mutable for op in ops):
            return set()
        seen = collections.Counter(storage_id(value) for value in self.fakes if isinstance(value, torch.Tensor))
        return {storage for storage, count in seen.items() if storage is not None and count > 1}

    def _expand(self, node: fx.Node, found: dict[fx.Node, None]) -> None:
        """``node`` and, in front of it, what must be there to compute it again."""
        if is_float_arithmetic(node):
            for source in node.all_input_nodes:
                self._expand(source, found)
        found[node] = None

    def _import(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.graph.node_copy(node, lambda n: n)
        value = example(node)
        if is_float_arithmetic(node):
            copied = self.graph.node_copy(node, self._argument)
            copied.meta = dict(node.meta)
            return copied
        if self._is_wrapped(node):
            wrapped = self._wrapped_placeholder(node)
            copied = self.graph.node_copy(node, lambda n: wrapped)
            copied.meta = dict(node.meta)
            return copied
        if is_evaluated(node):
            return pytree.tree_map(lambda v: self._host(expression(v), v), plain_value(value))
        if is_container(value):
            leaves, spec = pytree.tree_flatten(value)
            names = leaf_names(node)
            return pytree.tree_unflatten(
                [self._placeholder(Ref(name), leaf, node) for name, leaf in zip(names, leaves, strict=True)], spec
            )
        return self._placeholder(Ref(node.name), value, node)

    def _wrapped_placeholder(self, read: fx.Node) -> fx.Node:
        source = read.args[0]
        fake = example(source)
        # The symbol that .item() of this fake gives; without it a compiler that traces the piece sees a host sync.
        fake.item_memo = example(read)
        return self._placeholder(Ref(source.name), fake)

    def _is_wrapped(self, node: fx.Node) -> bool:
        return self.wrap_numbers and reads_number(node, self.facts) and bool(expression(example(node)).free_symbols)

    def _host(self, expr: Any, value: Any) -> Any:
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        if not expr.free_symbols:
            return kind_of(value)(number(expr))
        return self._placeholder(HostRef(expr, kind_of(value)), value)

    def _placeholder(self, ref: Ref | HostRef, value: Any, source: fx.Node | None = None) -> fx.Node:
        found = self.inputs.get(ref)
        if found is None:
            if isinstance(ref, Ref) and source is not None:
                self.sources[ref.name] = source.name
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


def plain_sizes(graph: fx.Graph) -> dict[Any, Any]:
    """For each symbol that an input shows by itself, the size that shows it."""
    found = [size for node in graph.nodes if node.op == "placeholder" for size in _sizes(example(node))]
    return {expression(size): size for size in found if getattr(expression(size), "is_Symbol", False)}


def _sizes(value: Any) -> list[Any]:
    """The sizes in which a compiler finds a value's symbols."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return [*value.shape, *value.stride()]
    return [value] if isinstance(value, torch.SymInt) else []


def _may_draw(op: Any) -> bool:
    """Whether an op may draw random numbers; of torch's own a tag tells."""
    return torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in ("aten", "prims")
