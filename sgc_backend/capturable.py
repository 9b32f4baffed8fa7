"""Which nodes can't live in a graph, and why: an ordered list of rules, one reason each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .errors import CutOpError
from .facts import GraphFacts, NodeFacts, example, free_unbacked

# Ops that read a result back on the host inside their implementation, which no tag tells.
HOST_SYNCS = frozenset(
    "aten::" + name
    for name in (
        "_local_scalar_dense",
        "is_nonzero",
        "_linalg_check_errors",
        "_linalg_eigh",
        "_linalg_svd",
        "linalg_eig",
        "linalg_lstsq",
        "_linalg_eigvals",
        "linalg_eigvals",
        "geqrf",
        "bincount",
        "histc",
        "_embedding_bag_dense_backward",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "unique_dim_consecutive",
    )
)
CONTROL_FLOW = frozenset(("cond", "while_loop", "scan", "map", "map_impl", "associative_scan", "switch"))
CAPTURABLE_HIGHER_ORDER = frozenset(
    (
        "wrap",
        "tag_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
        "triton_kernel_wrapper_mutation",
        "triton_kernel_wrapper_functional",
        "invoke_subgraph",
    )
)
ATTENTION_ATEN = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention")
COLLECTIVE_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
)

QUANTISED = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))

_attention_ops: set[str] = set()


def register_attention(op: str | OpOverload | OpOverloadPacket | Any) -> None:
    """Declare a custom op as attention: cut where any of its tensors has a dynamic dimension, captured otherwise.

    It is cut as well where its first tensor (the queries, as a rule) has a dimension of length 1: Dynamo takes such a
    length for a constant, also under ``dynamic=True``, and what the op reads on the host would be frozen.

    Args:
        op: ``"ns::name"``, an OpOverload, an OpOverloadPacket, or what ``torch.library.custom_op`` returned.

    Raises:
        CutOpError: ``op`` resolves to no operator.
    """
    names = resolve_op(op)
    if not all(isinstance(n, str) for n in names):
        raise CutOpError(f"{op!r} is a Python function, not an operator; wrap it with torch.library.custom_op")
    _attention_ops.update(names)


@dataclass(frozen=True)
class Reason:
    """Why a node is cut: ``rule`` is a stable short name, ``text`` a sentence for people."""

    rule: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Marks:
    """Resolved ``cut_ops`` and ``capturable_ops``: op names ("ns::op", "ns::op.overload") and functions."""

    cut: frozenset[Any] = frozenset()
    capturable: frozenset[Any] = frozenset()

    @classmethod
    def of(cls, cut_ops: Iterable[Any], capturable_ops: Iterable[Any]) -> Marks:
        """Raises CutOpError where a name resolves to nothing or an op is named in both lists."""
        cut = frozenset(n for op in cut_ops for n in resolve_op(op))
        capturable = frozenset(n for op in capturable_ops for n in resolve_op(op))
        if cut & capturable:
            raise CutOpError(f"in both cut_ops and capturable_ops: {', '.join(map(str, cut & capturable))}")
        return cls(cut, capturable)


def resolve_op(op: Any) -> set[Any]:
    """``op`` as the names (or the function) that nodes are compared with.

    Raises:
        CutOpError: a name that resolves to no operator.
    """
    if isinstance(op, OpOverload):
        return {_full_name(op)}
    if isinstance(op, OpOverloadPacket):
        return {op._qualified_op_name}
    if isinstance(op, HigherOrderOperator):
        return {op.name()}
    packet = getattr(op, "_opoverload", None)  # torch.library.custom_op returns such an object
    if isinstance(packet, OpOverload):
        return {packet._schema.name}
    if isinstance(op, (type, torch.nn.Module)):
        raise CutOpError(f"{op!r} is a module, which Dynamo takes apart; name the ops that it calls")
    if callable(op):
        return {op} | _aten_of(op)
    if not isinstance(op, str):
        raise CutOpError(f"{op!r} is not an op; expected 'ns::op', an OpOverload, an op packet or a function")
    namespace, sep, rest = op.partition("::")
    name, dot, overload = rest.partition(".")
    if not sep or not namespace or not name or (dot and not overload):
        raise CutOpError(f"{op!r} is not an op name; expected 'ns::op' or 'ns::op.overload'")
    found = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(found, OpOverloadPacket) or (overload and overload not in found.overloads()):
        raise CutOpError(
            f"{op!r} resolves to no operator; register or import it before compiling, and check its spelling"
        )
    return {op}


def why_not_capturable(node: fx.Node, facts: GraphFacts, marks: Marks) -> Reason | None:
    """The first rule's reason that keeps ``node`` out of a graph, or None."""
    own = facts.nodes[node.name]
    names = _names(node, own)
    if names & marks.cut:
        return Reason("cut_ops", f"{_label(node)} is in cut_ops")
    if names & marks.capturable:
        return None
    for rule in RULES:
        reason = rule(node, own, facts)
        if reason is not None:
            return reason
    return None


def is_kept(node: fx.Node, facts: GraphFacts, marks: Marks) -> bool:
    """Whether the user wants ``node`` captured, whatever speaks against it."""
    own = facts.nodes[node.name]
    return bool(_names(node, own) & marks.capturable)


def _names(node: fx.Node, own: NodeFacts) -> set[Any]:
    """Everything that ``node`` answers to: its target, and each op that it dispatches, with and without overload."""
    names: set[Any] = set()
    targets = [*own.ops, node.target]
    for target in targets:
        if isinstance(target, OpOverload):
            names |= {target._schema.name, _full_name(target)}
        elif isinstance(target, OpOverloadPacket):
            names.add(target._qualified_op_name)
        elif isinstance(target, HigherOrderOperator):
            names.add(target.name())
        elif callable(target):
            names |= {target} | _aten_of(target)
        elif node.op == "call_method" and hasattr(torch.ops.aten, str(target)):
            names.add(f"aten::{target}")
    return names


def _aten_of(function: Any) -> set[str]:
    """The ATen op that one of torch's own functions stands for: torch.add, F.linear, torch._C._nn.gelu."""
    name = getattr(function, "__name__", "")
    own = (getattr(function, "__module__", None) or "torch").split(".")[0] in ("torch", "_operator")
    return {f"aten::{name}"} if own and name and hasattr(torch.ops.aten, name) else set()


def _label(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target)
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))


# -- the rules, in order -----------------------------------------------------------------------------------------------


def _tagged_unsafe(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # The op's author says so.
    for op in (*own.ops, node.target):
        if torch.Tag.cudagraph_unsafe in _tags(op):
            return Reason("cudagraph_unsafe", f"{_op_name(op)} is tagged cudagraph_unsafe")
    return None


def _control_flow(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # Which branch runs, or how often, is decided on the host from a tensor's value.
    if not isinstance(node.target, HigherOrderOperator):
        return None
    name = node.target.name()
    if name in CONTROL_FLOW:
        return Reason("control_flow", f"{name} decides on the host which branch runs")
    if name in CAPTURABLE_HIGHER_ORDER or "attention" in name:
        return None
    return Reason("higher_order", f"higher-order operator {name} is not known to be capturable")


def _attention(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # Attention mixes the rows of different sizes; with a dynamic length each size would be a kernel of its own.
    if not _is_attention(node, own):
        return None
    if _attends_over_dynamic_length(node):
        return Reason("attention", f"{_label(node)} attends over a dynamic length")
    if _is_declared(own) and _has_one_row(node):
        # Dynamo takes a length of 1 for a constant, whatever it takes other lengths for.
        return Reason("attention", f"{_label(node)} attends over a length of 1, which may be a dynamic one")
    return None


def _data_dependent(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # A graph's shapes are fixed when it is recorded.
    if free_unbacked(example(node)):
        return Reason("data_dependent", f"the size of {_label(node)}'s result depends on data")
    if any(free_unbacked(example(n)) for n in node.all_input_nodes):
        return Reason("data_dependent", f"{_label(node)} takes a size that depends on data")
    if own.bool_index:
        return Reason("data_dependent", f"{_label(node)} indexes with a boolean mask")
    for op in own.ops:
        if torch.Tag.data_dependent_output in _tags(op):
            return Reason("host_sync", f"{op.name()} reads its result on the host")
    # Not every op that is tagged as sized by data is: repeat_interleave may be told its total, index has integers.
    if own.sized_by_data:
        return Reason("data_dependent", f"the size of {own.sized_by_data[0]}'s result depends on data")
    return None


def _host_sync(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # A capture can't wait for the device.
    for op in own.ops:
        if op._schema.name in HOST_SYNCS:
            return Reason("host_sync", f"{op.name()} waits for the device")
    if node.op == "call_method" and node.target in ("item", "tolist", "numpy"):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.name not in facts.wrapped_numbers:
            return Reason("host_sync", f".{node.target}() waits for the device")
    return None


def _host_tensors(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # A recording freezes the host's bytes; and the host's own work isn't recorded at all.
    if own.host_reads:
        return Reason("host_copy", f"{own.host_reads[0]}")
    if own.host_only and own.launches:
        return Reason("host_compute", f"{_label(node)} computes on host tensors")
    return None


def _reaches_around(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # as_strided may reach bytes around an input that its staged copy doesn't have.
    if own.reads and own.reaches_around:
        return Reason("as_strided", f"{_label(node)} may reach beyond an input that is copied")
    return None


def _quantised(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # Their scale lives on the host, outside of the bytes that a recording writes.
    if any(op._schema.name.startswith(("aten::quantize_per", "aten::dequantize")) for op in own.ops):
        return Reason("quantised", f"{_label(node)} works on quantised tensors")
    for value in (example(node), *map(example, node.all_input_nodes)):
        if isinstance(value, torch.Tensor) and value.dtype in QUANTISED:
            return Reason("quantised", f"{_label(node)} works on quantised tensors")
    return None


def _collective(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # NCCL records into graphs; other backends work on the host.
    for op in own.ops or [node.target]:
        if getattr(op, "namespace", None) in COLLECTIVE_NAMESPACES and not _runs_on_nccl(node):
            return Reason("collective", f"collective {_op_name(op)} does not run on NCCL")
    return None


def _generator(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # A graph advances only the generators that were registered with it.
    if node.kwargs.get("generator") is not None:
        return Reason("generator", f"{_label(node)} draws from a generator passed by hand")
    return None


def _untraceable(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # What couldn't be looked into is not trusted.
    if own.error is not None:
        return Reason("unknown", f"{_label(node)} could not be examined ({own.error})")
    return None


RULES: tuple[Callable[[fx.Node, NodeFacts, GraphFacts], Reason | None], ...] = (
    _tagged_unsafe,
    _control_flow,
    _attention,
    _data_dependent,
    _host_sync,
    _host_tensors,
    _reaches_around,
    _quantised,
    _collective,
    _generator,
    _untraceable,
)


def _is_attention(node: fx.Node, own: NodeFacts) -> bool:
    if node.target is torch.nn.functional.scaled_dot_product_attention:
        return True
    if _is_attention_operator(node):
        return True
    aten = (op._schema.name for op in own.ops)
    return _is_declared(own) or any(n.startswith("aten::") and n[6:].startswith(ATTENTION_ATEN) for n in aten)


def _is_declared(own: NodeFacts) -> bool:
    return any(op._schema.name in _attention_ops or _full_name(op) in _attention_ops for op in own.ops)


def _has_one_row(node: fx.Node) -> bool:
    """Whether the first tensor, as a rule the queries, has a dimension of length 1."""
    shapes = [example(n).shape for n in node.all_input_nodes if isinstance(example(n), torch.Tensor)]
    return bool(shapes) and any(isinstance(n, int) and n == 1 for n in shapes[0])


def _is_attention_operator(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and "attention" in node.target.name()


def _attends_over_dynamic_length(node: fx.Node) -> bool:
    """Whether the keys' length has a symbol; for an op whose keys aren't known, whether any dimension has."""
    if node.target is torch.nn.functional.scaled_dot_product_attention or _is_attention_operator(node):
        key = node.kwargs.get("key", node.args[1] if len(node.args) > 1 else None)
        value = example(key) if isinstance(key, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return _is_symbolic(value.shape[-2])
    shapes = [example(n).shape for n in node.all_input_nodes if isinstance(example(n), torch.Tensor)]
    return any(_is_symbolic(n) for shape in shapes for n in shape)


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.is_constant()


def _tags(op: Any) -> Iterable[Any]:
    return getattr(op, "tags", ()) if isinstance(op, OpOverload) else ()


def _full_name(op: OpOverload) -> str:
    """ "ns::op.overload", "default" included: OpOverload.name() leaves that out, and would name the whole packet."""
    return f"{op._schema.name}.{op._overloadname}"


def _op_name(op: Any) -> str:
    return op.name() if isinstance(op, OpOverload) else str(op)


def _runs_on_nccl(node: fx.Node) -> bool:
    """Whether the node's process group is NCCL's; a group that can't be found is not."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    groups = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
    resolve = getattr(torch._C._distributed_c10d, "_resolve_process_group", None)
    if resolve is None:
        return False
    if not groups:  # wait_tensor names no group: it waits for whatever its producer was
        return all(_runs_on_nccl(n) for n in node.all_input_nodes if n.op.startswith("call"))
    try:
        return all("nccl" in dist.get_backend(resolve(g)) for g in groups)
    except (RuntimeError, ValueError):
        return False
