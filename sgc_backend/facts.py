"""What a node of Dynamo's graph really does, asked of the ATen ops that it runs.

Torch-level calls are open-ended (`x[mask]` is a getitem); the ATen ops behind them are a small closed set with
schemas, tags and devices. So the graph is interpreted once on fake tensors, node by node, and what each node
dispatched is written down. FX and fake tensors only; no device is touched.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HOST_TYPES = (int, float, bool, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
SYM_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
        bool_index: an index op got a boolean mask, so its output's size depends on data.
        sized_by_data: ops whose result's size depends on data.
        error: why it couldn't be interpreted, or None.
    """

    ops: list[OpOverload] = field(default_factory=list)
    launches: bool = False
    host_reads: list[str] = field(default_factory=list)
    host_only: bool = False
    writes: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    bool_index: bool = False
    sized_by_data: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass
class GraphFacts:
    """What the nodes of a graph do.

    Attributes:
        nodes: facts of every call node by name.
        device_type: where the graph computes.
        wrapped_numbers: placeholders that are Python numbers.
        roots: for each node by name, the placeholders whose memory its value lies in or may lie in.
    """

    nodes: dict[str, NodeFacts]
    device_type: str
    wrapped_numbers: set[str]
    roots: dict[str, set[str]] = field(default_factory=dict)


def example(node: fx.Node) -> Any:
    """The fake value that Dynamo computed for ``node``, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_host_value(value: Any) -> bool:
    """Whether ``value`` holds no tensor: numbers, sizes, symbols, and containers of them."""
    leaves = pytree.tree_leaves(list(value) if isinstance(value, torch.Size) else value)
    return value is not None and all(isinstance(v, (*HOST_TYPES, *SYM_TYPES)) or v is None for v in leaves)


def free_unbacked(value: Any) -> bool:
    """Whether a size or number in ``value`` depends on tensor data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for leaf in pytree.tree_leaves(list(value) if isinstance(value, torch.Size) else value):
        if isinstance(leaf, (torch.Tensor, *SYM_TYPES)) and free_unbacked_symbols(leaf):
            return True
    return False


def is_wrapped_number(node: fx.Node) -> bool:
    """Whether a placeholder is a Python number that Dynamo wrapped in a 0-dim host tensor."""
    arg = node.meta.get("grapharg")
    return node.op == "placeholder" and arg is not None and bool(getattr(arg, "pass_arg_as_tensor", False))


def gather_facts(gm: fx.GraphModule, device_type: str) -> GraphFacts:
    """Interpret ``gm`` on fresh fakes and return what each node does.

    ``device_type`` is where the graph computes; on the emulated device, whose tensors are the host's, nothing counts
    as a host read.
    """
    examples = [example(n) for n in gm.graph.nodes]
    mode = detect_fake_mode(examples)
    facts = GraphFacts({}, device_type, {n.name for n in gm.graph.nodes if is_wrapped_number(n)})
    walker = _Walker(gm, facts, mode)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                # Only facts are wanted here: no new guard and no new symbol may come of this walk.
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        # As Dynamo does: without it some ops (constant_pad_nd) turn symbolic sizes into numbers, and the mode's cache
        # would hand those on to whoever compiles the pieces.
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        for node in gm.graph.nodes:
            walker.visit(node)
    return facts


class _Walker:
    def __init__(self, gm: fx.GraphModule, facts: GraphFacts, mode: Any) -> None:
        self.gm, self.facts, self.mode = gm, facts, mode
        self.env: dict[fx.Node, Any] = {}
        self.roots: dict[
            int | None, str
        ] = {}  # storage id -> placeholder; env keeps the storages alive, so ids stay unique

    def visit(self, node: fx.Node) -> None:
        value = example(node)
        if node.op == "placeholder":
            self.env[node] = self._placeholder(node, value)
            self.facts.roots[node.name] = self._roots_of(self.env[node])
            return
        if node.op == "get_attr":
            self.env[node] = self._attribute(node)
            return
        if node.op == "output":
            return
        facts = self.facts.nodes[node.name] = NodeFacts()
        for source in node.all_input_nodes:
            facts.reads |= self.facts.roots.get(source.name, set())
        if self._skip(node, value):
            facts.launches = not is_host_value(value)
            self._assume(node, value, facts)
            return
        args = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        spy = _Spy(facts, self.facts.device_type, self.roots)
        try:
            with spy:
                self.env[node] = _call(self.gm, node, *args)
        except Exception as error:
            facts.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._assume(node, value, facts)
        else:
            # A storage of no placeholder's may still be one that a node which wasn't run made of a placeholder's.
            guessed = {
                root
                for source in node.all_input_nodes
                for root in self.facts.roots.get(source.name, set()) - self._roots_of(self.env.get(source))
            }
            if spy.wrote:
                facts.writes |= guessed
            self.facts.roots[node.name] = self._roots_of(self.env[node]) | guessed
        spy.finish()

    def _roots_of(self, value: Any) -> set[str]:
        return {self.roots[s] for s in map(_storage_id, _tensors(value)) if s in self.roots}

    def _placeholder(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_wrapped_number(node):
            return value
        fresh = self._refreshed(value)
        storage = _storage_id(fresh)
        if storage is not None:
            self.roots[storage] = node.name
        return fresh

    def _attribute(self, node: fx.Node) -> Any:
        value = _attribute(self.gm, node)
        if isinstance(value, torch.Tensor) and self.mode is not None:
            return self.mode.from_tensor(value, static_shapes=True)
        return value

    def _skip(self, node: fx.Node, value: Any) -> bool:
        """Nodes that must not or need not be run again: host arithmetic, unbacked sizes, operators of operators."""
        if isinstance(node.target, HigherOrderOperator):
            return not _is_transparent(node.target)
        if free_unbacked(value) or any(free_unbacked(example(n)) for n in node.all_input_nodes):
            return True
        return value is not None and is_host_value(value)

    def _assume(self, node: fx.Node, value: Any, facts: NodeFacts) -> None:
        """A node that wasn't run may return views of whatever it got, and writes whatever it could write."""
        self.env[node] = self._refreshed(value)
        self.facts.roots[node.name] = set() if is_host_value(value) else set(facts.reads)
        if _may_write(self.gm, node):
            facts.writes |= facts.reads

    def _refreshed(self, value: Any) -> Any:
        """Fakes like ``value``'s, each over a storage of its own, so that roots can be told apart."""
        return pytree.tree_map_only(torch.Tensor, _fresh_fake, value)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _fresh_fake(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided or free_unbacked(t):
        return t
    with torch.inference_mode(False):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def _may_write(gm: fx.GraphModule, node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, HigherOrderOperator):
        bodies = [_attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr"]
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


def _is_transparent(op: HigherOrderOperator) -> bool:
    return op.name() in TRANSPARENT


def _call(gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if isinstance(node.target, HigherOrderOperator):
        return _run_body(args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _run_body(args: Any) -> Any:
    """Run what a transparent operator wraps: its body and the operands behind it, less the body's identifier."""
    position = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
    operands = list(args[position + 1 :])
    if operands and isinstance(operands[0], str):
        del operands[0]
    return args[position](*operands)


TRANSPARENT = frozenset(
    ("wrap", "tag_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled", "invoke_subgraph")
)
ONLY_ALLOCATE = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class _Spy(TorchDispatchMode):
    """Writes down what one node dispatches."""

    supports_higher_order_operators = True

    def __init__(self, facts: NodeFacts, device_type: str, roots: dict[int | None, str]) -> None:
        super().__init__()
        self.facts, self.device_type, self.roots = facts, device_type, roots
        self.device_tensor = self.host_tensor = self.wrote = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        given = list(_tensors((args, kwargs)))
        produced = list(_tensors(out))
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
            facts.bool_index |= any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(indices))
        for tensor in _written(func, args, kwargs):
            self.wrote = True
            root = self.roots.get(_storage_id(tensor))
            if root is not None:
                facts.writes.add(root)

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


def _written(func: OpOverload, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        yield from _tensors(value)


def _storage_id(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # inside torch.func transforms tensors have no storage to show
        return None


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))
