"""Which nodes can't live in a graph, and why: an ordered list of rules, one reason each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .attention import attends_over_dynamic_length, has_one_row, is_attention, is_declared
from .facts import GraphFacts, NodeFacts, example, free_unbacked
from .marks import Marks, names_of

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
        "linalg_pinv",
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
HOST_CHECKS = frozenset(("aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"))
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
COLLECTIVE_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
)

QUANTISED = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))


@dataclass(frozen=True)
class Reason:
    """Why a node is cut: ``rule`` is a stable short name, ``text`` a sentence for people."""

    rule: str
    text: str

    def __str__(self) -> str:
        return self.text


def why_not_capturable(node: fx.Node, facts: GraphFacts, marks: Marks) -> Reason | None:
    """The first rule's reason that keeps ``node`` out of a graph, or None."""
    own = facts.nodes[node.name]
    names = names_of(node, own)
    if names & marks.cut:
        return Reason("cut_ops", f"{_label(node)} is in cut_ops")
    if names & marks.capturable:
        return None
    if names & marks.failed:
        return Reason("capture_failed", f"a capture failed in {_label(node)}")
    for rule in RULES:
        reason = rule(node, own, facts)
        if reason is not None:
            return reason
    return None


def is_kept(node: fx.Node, facts: GraphFacts, marks: Marks) -> bool:
    """Whether the user wants ``node`` captured, whatever speaks against it."""
    own = facts.nodes[node.name]
    return bool(names_of(node, own) & marks.capturable)


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
    if not is_attention(node, own):
        return None
    if attends_over_dynamic_length(node):
        return Reason("attention", f"{_label(node)} attends over a dynamic length")
    if is_declared(own) and has_one_row(node):
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


def _host_check(node: fx.Node, own: NodeFacts, facts: GraphFacts) -> Reason | None:
    # Each call has sizes of its own; a recording checked those that it was made at.
    if any(op._schema.name in HOST_CHECKS for op in own.ops):
        return Reason("host_check", f"{_label(node)} checks a size of each call")
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
    _host_check,
    _host_tensors,
    _reaches_around,
    _quantised,
    _collective,
    _generator,
    _untraceable,
)


def _tags(op: Any) -> Iterable[Any]:
    return getattr(op, "tags", ()) if isinstance(op, OpOverload) else ()


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
