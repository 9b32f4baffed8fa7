"""What a node of Dynamo's graph really does, asked of the ATen ops that it runs.

Torch-level calls are open-ended (`x[mask]` is a getitem); the ATen ops behind them are a small closed set with
schemas, tags and devices. So the graph is interpreted once on fake tensors, node by node, and what each node
dispatched is written down. FX and fake tensors only; no device is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from .fakes import Held
from .forms import storage_id
from .interpret import (
    TRANSPARENT,
    attribute,
    example,
    free_unbacked,
    is_composite,
    is_host_value,
    is_wrapped_number,
    refreshed,
    run_body,
    tensors,
)
from .interpreter import Interpreter, interpreted


@dataclass
class NodeFacts:
    """One node's behaviour.

    Attributes:
        ops: ATen and custom ops that it dispatches, in order; views included.
        launches: whether any of them does more than make a view.
        host_reads: ops that hand a tensor of the device to the host, or read a host tensor into the device.
        host_only: all of its tensors live on the host.
        writes: names of placeholders whose memory it writes to, or may write to where it couldn't be run.
        reads: names of placeholders whose memory its arguments lie in.
        touches: memory that it writes to, as in `GraphFacts.storages`.
        bool_index: an index op got a boolean mask, so its output's size depends on data.
        sized_by_data: ops whose result's size depends on data.
        reshapes: op that gives a tensor another shape or other memory in place; or empty.
        error: why it couldn't be interpreted, or None.
    """

    ops: list[OpOverload] = field(default_factory=list)
    launches: bool = False
    host_reads: list[str] = field(default_factory=list)
    host_only: bool = False
    writes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    touches: set[int | None] = field(default_factory=set)
    bool_index: bool = False
    sized_by_data: list[str] = field(default_factory=list)
    reshapes: str = ""
    error: str | None = None

    @property
    def only_allocates(self) -> bool:
        """Whether its value is fresh memory that nothing has been written to."""
        return bool(self.ops) and all(op._schema.name in ONLY_ALLOCATE for op in self.ops)

    @property
    def reaches_around(self) -> bool:
        """Whether it addresses an argument's whole memory, and not only the tensor's own elements."""
        return any(op._schema.name.startswith("aten::as_strided") for op in self.ops)


@dataclass
class GraphFacts:
    """What the nodes of a graph do.

    Attributes:
        nodes: facts of every call node by name.
        device_type: where the graph computes.
        wrapped_numbers: placeholders that are Python numbers.
        roots: for each node by name, the placeholders whose memory its value lies in or may lie in.
        storages: for each node by name, numbers that it shares with the nodes whose values lie in the same memory.
        reshaped: names of nodes with a tensor that a node gives another shape or other memory in place (`t_`, `set_`).
            What Dynamo says of their values is true behind the last such node alone.
    """

    nodes: dict[str, NodeFacts]
    device_type: str
    wrapped_numbers: set[str]
    roots: dict[str, set[str]] = field(default_factory=dict)
    storages: dict[str, frozenset[int | None]] = field(default_factory=dict)
    reshaped: set[str] = field(default_factory=set)

    def share_memory(self, one: str, other: str) -> bool:
        """Whether two nodes' values lie, or may lie, in the same memory."""
        for known in (self.storages, self.roots):
            if not set(known.get(one, ())).isdisjoint(known.get(other, ())):
                return True
        return False


def gather_facts(gm: fx.GraphModule, device_type: str) -> GraphFacts:
    """Interpret ``gm`` on fresh fakes and return what each node does.

    ``device_type`` is where the graph computes; on the emulated device, whose tensors are the host's, nothing counts
    as a host read.
    """
    numbers = {n.name for n in gm.graph.nodes if is_wrapped_number(n)}
    walker = interpreted(lambda repeats: _Walker(gm, GraphFacts({}, device_type, numbers), repeats=repeats))
    reshaped = walker.reshaped
    walker.facts.reshaped |= {n.name for n in gm.graph.nodes if not reshaped.isdisjoint(walker.fakes.held(n))}
    return walker.facts


@dataclass(frozen=True)
class _Found:
    """What one node was seen to do.

    Attributes:
        facts: what doesn't depend on where its arguments come from.
        wrote: whether it writes to anything.
        touches: the memory that it writes to, by places in `Fakes.memories`.
        reshapes: the arguments that it reshapes in place, by places in `Fakes.given`.
        assumed: it wasn't run.
    """

    facts: NodeFacts
    wrote: bool = False
    touches: tuple[int, ...] = ()
    reshapes: tuple[int, ...] = ()
    assumed: bool = False


class _Walker(Interpreter[_Found]):
    def __init__(self, gm: fx.GraphModule, facts: GraphFacts, *, repeats: bool) -> None:
        super().__init__(gm, repeats=repeats)
        self.facts = facts
        self.roots: dict[int | None, str] = {}  # of memory, the placeholder
        self.reshaped: set[Held] = set()

    def visit_input(self, node: fx.Node) -> None:
        if not is_wrapped_number(node):
            self.roots.update((h.memory, node.name) for h in self.fakes.held(node) if h.memory is not None)
        self.facts.roots[node.name] = self._roots_of(node)

    def examine(self, node: fx.Node) -> tuple[Any, tuple[NodeFacts, _Spy | None]]:
        value, facts = example(node), NodeFacts()
        if self.skips(node):
            facts.launches = not is_host_value(value)
            return refreshed(value), (facts, None)
        spy = _Spy(facts, self.facts.device_type)
        try:
            with spy:
                result = self.run(node)
        except Exception as error:
            facts.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            result = refreshed(value)
        spy.finish()
        return result, (facts, spy)

    def conclude(self, node: fx.Node, seen: tuple[NodeFacts, _Spy | None]) -> _Found:
        facts, spy = seen
        if spy is None:
            return _Found(facts, assumed=True)
        to = {self.fakes.number(storage) for storage in map(storage_id, spy.written)}
        touches = tuple(k for k, memory in enumerate(self.fakes.memories(node)) if memory is not None and memory in to)
        changed = set(map(id, spy.reshaped))
        reshapes = tuple(k for k, held in enumerate(self.fakes.given(node)) if id(held.tensor) in changed)
        return _Found(facts, bool(spy.written), touches, reshapes, facts.error is not None)

    def apply(self, node: fx.Node, found: _Found) -> None:
        name, memories, roots = node.name, self.fakes.memories(node), self.facts.roots
        reads = set().union(*(roots.get(source.name, ()) for source in node.all_input_nodes))
        touches = {memories[k] for k in found.touches}
        writes = {self.roots[memory] for memory in touches if memory in self.roots}
        given = self.fakes.given(node) if found.reshapes else []
        self.reshaped.update(given[k] for k in found.reshapes)
        if found.assumed:
            # A node that wasn't run may return views of whatever it got, and writes whatever it could write.
            roots[name] = set() if is_host_value(example(node)) else set(reads)
            if _may_write(self.gm, node):
                writes |= reads
        else:
            # Memory of no placeholder's may still be some that a node which wasn't run made of a placeholder's.
            guessed = {
                root
                for source in node.all_input_nodes
                for root in roots.get(source.name, set()) - self._roots_of(source)
            }
            if found.wrote:
                writes |= guessed
            roots[name] = self._roots_of(node) | guessed
        self.facts.nodes[name] = replace(found.facts, reads=reads, writes=writes, touches=touches)
        self.facts.storages[name] = frozenset(h.memory for h in self.fakes.held(node)) - {None}

    def _roots_of(self, node: fx.Node) -> set[str]:
        return {self.roots[h.memory] for h in self.fakes.held(node) if h.memory in self.roots}


def _may_write(gm: fx.GraphModule, node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        bodies = [attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr"]
        return "mutation" in target.name() or any(
            _may_write(body, n)
            for body in bodies
            if isinstance(body, fx.GraphModule)
            for n in body.graph.nodes
            if n.op.startswith("call")
        )
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, o)._schema.is_mutable for o in target.overloads())
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.endswith("_") or name.startswith(("setitem", "__i")) or "out" in node.kwargs


ONLY_ALLOCATE = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class _Spy(TorchDispatchMode):
    """Writes down what one node dispatches."""

    supports_higher_order_operators = True

    def __init__(self, facts: NodeFacts, device_type: str) -> None:
        super().__init__()
        self.facts, self.device_type = facts, device_type
        self.device_tensor = self.host_tensor = False
        self.written: list[torch.Tensor] = []  # kept, or memory made later could be taken for theirs
        self.reshaped: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):  # in the body of another one
            if func.name() not in TRANSPARENT:  # the node's error then, for which it is cut
                raise NotImplementedError(f"{func.name()} in the body of an operator")
            with self:
                return run_body(args)
        out = func(*args, **kwargs)
        if isinstance(func, OpOverload):
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        facts = self.facts
        if func.namespace == "prim":  # queries of metadata
            return
        facts.ops.append(func)
        if not is_view(func) and func._schema.name not in ONLY_ALLOCATE:
            facts.launches = True
        if torch.Tag.dynamic_output_shape in func.tags and free_unbacked(out):
            facts.sized_by_data.append(func.name())
        given = list(tensors((args, kwargs)))
        produced = list(tensors(out))
        if not given and not produced:
            return
        on_device = [t for t in (*given, *produced) if t.device.type == self.device_type]
        on_host = [t for t in (*given, *produced) if t.device.type != self.device_type]
        self.device_tensor |= bool(on_device)
        self.host_tensor |= bool(on_host)
        if on_device and on_host and not is_view(func):
            facts.host_reads.append(f"{func.name()} mixes {self.device_type} and {on_host[0].device.type} tensors")
        if func.overloadpacket in INDEX_OPS:
            indices = args[1] if len(args) > 1 else ()
            facts.bool_index |= any(t.dtype in (torch.bool, torch.uint8) for t in tensors(indices))
        self.written += written(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags and func.overloadpacket is not torch.ops.aten.detach_:
            facts.reshapes = func.name()
            self.reshaped += written(func, args, kwargs)

    def finish(self) -> None:
        self.facts.host_only = self.host_tensor and not self.device_tensor


INDEX_OPS = {
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._index_put_impl_,
    torch.ops.aten._unsafe_index,
    torch.ops.aten._unsafe_index_put,
}


def is_view(func: OpOverload) -> bool:
    """Whether ``func`` only makes views, and so launches nothing."""
    schema = func._schema
    if schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns) or func is torch.ops.aten.detach.default


def written(func: OpOverload, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        yield from tensors(value)
