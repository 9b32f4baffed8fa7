"""The ops that users name, and the names that a node answers to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .errors import CutOpError
from .facts import NodeFacts


@dataclass(frozen=True)
class Marks:
    """Resolved ``cut_ops`` and ``capturable_ops``: op names ("ns::op", "ns::op.overload") and functions.

    Attributes:
        failed: names of ops in which a capture failed.
    """

    cut: frozenset[Any] = frozenset()
    capturable: frozenset[Any] = frozenset()
    failed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, cut_ops: Iterable[Any], capturable_ops: Iterable[Any]) -> Marks:
        """Raises CutOpError where a name resolves to nothing or an op is named in both lists."""
        cut = frozenset(n for op in cut_ops for n in resolve_op(op))
        capturable = frozenset(n for op in capturable_ops for n in resolve_op(op))
        if cut & capturable:
            raise CutOpError(f"in both cut_ops and capturable_ops: {', '.join(map(str, cut & capturable))}")
        return cls(cut, capturable)

    def wants_captured(self, op: str) -> bool:
        """Whether the user wants "ns::op", or one of its overloads, captured."""
        return any(isinstance(name, str) and (name == op or name.startswith(f"{op}.")) for name in self.capturable)

    def with_failed(self, op: str) -> Marks:
        """The same, with one op more in which a capture failed."""
        return dataclasses.replace(self, failed=self.failed | {op})


def resolve_op(op: Any) -> set[Any]:
    """``op`` as the names (or the function) that nodes are compared with.

    Raises:
        CutOpError: a name that resolves to no operator.
    """
    if isinstance(op, OpOverload):
        return {full_name(op)}
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


def names_of(node: fx.Node, own: NodeFacts) -> set[Any]:
    """Everything that ``node`` answers to: its target, and each op that it dispatches, with and without overload."""
    names: set[Any] = set()
    targets = [*own.ops, node.target]
    for target in targets:
        if isinstance(target, OpOverload):
            names |= {target._schema.name, full_name(target)}
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


def full_name(op: OpOverload) -> str:
    """ "ns::op.overload", "default" included: OpOverload.name() leaves that out, and would name the whole packet."""
    return f"{op._schema.name}.{op._overloadname}"
