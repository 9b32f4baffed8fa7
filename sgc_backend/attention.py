"""Which nodes are attention, torch's or declared so, and over what length they attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .errors import CutOpError
from .facts import NodeFacts, example
from .marks import full_name, resolve_op

ATTENTION_ATEN = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention")

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


def is_attention(node: fx.Node, own: NodeFacts) -> bool:
    """Whether the node attends: by an op of torch's, or one that was declared."""
    if node.target is torch.nn.functional.scaled_dot_product_attention:
        return True
    if _is_attention_operator(node):
        return True
    aten = (op._schema.name for op in own.ops)
    return is_declared(own) or any(n.startswith("aten::") and n[6:].startswith(ATTENTION_ATEN) for n in aten)


def is_declared(own: NodeFacts) -> bool:
    """Whether the node dispatches an op of `register_attention`."""
    return any(op._schema.name in _attention_ops or full_name(op) in _attention_ops for op in own.ops)


def has_one_row(node: fx.Node) -> bool:
    """Whether the first tensor, as a rule the queries, has a dimension of length 1."""
    shapes = [example(n).shape for n in node.all_input_nodes if isinstance(example(n), torch.Tensor)]
    return bool(shapes) and any(isinstance(n, int) and n == 1 for n in shapes[0])


def _is_attention_operator(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and "attention" in node.target.name()


def attends_over_dynamic_length(node: fx.Node) -> bool:
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
