"""Judges single ops by their rules, and keeps what is known of the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CutOpError, OptionError
from .facts import is_view, written
from .interpret import is_composite, tensors
from .marks import resolve_op
from .prefix_call import Call, Layouts, Rule, Value
from .prefix_dims import ALONG
from .prefix_layouts import Layout, Padded, UnsafeError, shown
from .prefix_places import PLACES
from .prefix_rules import PRODUCTS, of_pointwise_kind
from .prefix_views import VIEWS

PrefixRule = Callable[[tuple[Any, ...], dict[str, Any]], str | None]

ROWS_RULE = "rows"
RULES = PRODUCTS | ALONG | VIEWS | PLACES
# What shares memory without saying so in its schema.
SHARE_UNDECLARED = ("aten::_unsafe_view", "aten::_reshape_alias")
UNKNOWN = "is not known to compute each row by itself"

_registered: dict[str, str | PrefixRule] = {}


@dataclass(frozen=True)
class Blame:
    """Why a node is not prefix-safe.

    Attributes:
        op: the ATen or custom op of it that isn't, as "ns::name".
        why: a sentence without capital and without the op's name: "reduces the rows (dimension 0 of size s0)".
    """

    op: str
    why: str

    def __str__(self) -> str:
        return f"{self.op} {self.why}"


def register_prefix_rule(op: Any, rule: str | PrefixRule) -> None:
    """Declare when a custom op is prefix-safe, so that what holds it may run padded; it replaces an earlier rule.

    Args:
        op: ``"ns::name"``, ``"ns::name.overload"``, an OpOverload, an OpOverloadPacket, or what
            ``torch.library.custom_op`` returned.
        rule: ``"rows"``: the op computes each row by itself, so that row i of every result, and of every tensor that it
            writes, depends on row i of its inputs alone, whatever the number of rows; its integer arguments don't
            depend on that number. Or a callable that is given the call's args and kwargs with fake tensors, whose
            sizes are symbolic, and returns None where results for n rows are the first n rows of those for more rows,
            whatever is in the other rows, or else why they aren't ("sums over its tokens").

    Raises:
        CutOpError: ``op`` resolves to no operator.
        OptionError: ``rule`` is neither ``"rows"`` nor callable.
    """
    if not callable(rule) and not (isinstance(rule, str) and rule == ROWS_RULE):
        raise OptionError(f"a prefix rule is {ROWS_RULE!r} or a callable (args, kwargs) -> str | None, got {rule!r}")
    names = resolve_op(op)
    if not all(isinstance(n, str) for n in names):
        raise CutOpError(f"{op!r} is a Python function, not an operator; wrap it with torch.library.custom_op")
    _registered.update(dict.fromkeys(names, rule))


class Known:
    """What is known of the tensors that a node meets, which it keeps alive."""

    def __init__(self, padded: Padded) -> None:
        self.padded = padded
        self.values: dict[int, tuple[torch.Tensor, Value]] = {}
        self.wild_memory: set[int] = set()

    def note(self, tensor: torch.Tensor, value: Value) -> None:
        self.values[id(tensor)] = (tensor, value)
        if value.wild:
            self.note_wild(tensor)

    def note_wild(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` holds computed integers."""
        self.wild_memory.add(_memory(tensor))

    def of(self, tensor: torch.Tensor | None) -> Value | None:
        """What was noted of ``tensor``."""
        return self.values[id(tensor)][1] if id(tensor) in self.values else None

    def look(self, tensor: torch.Tensor) -> Value:
        """Raises UnsafeError for a tensor with rows that came from nowhere."""
        found = self.values.get(id(tensor))
        if found is None:
            if self.padded.symbolic(tensor):
                raise UnsafeError("takes a tensor whose rows could not be followed")
            return Value(self.padded.plain(tensor.shape))
        value = found[1]
        if not value.wild and self.wild_memory and _memory(tensor) in self.wild_memory:
            return Value(value.layout, value.window, not tensor.dtype.is_floating_point)
        return value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Spy(TorchDispatchMode):
    """Judges each op that a node dispatches; the first that isn't safe is to blame."""

    supports_higher_order_operators = True

    def __init__(self, padded: Padded, known: Known) -> None:
        super().__init__()
        self.padded, self.known = padded, known
        self.blame: Blame | None = None
        self.ran = False
        self.sizes: frozenset[sympy.Symbol] = frozenset()  # that reached an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.blame is not None or getattr(func, "namespace", None) == "prim":
            return out
        if not isinstance(func, OpOverload):
            self.blame = Blame(_name_of(func), UNKNOWN)
            return out
        try:
            self._judge(func, args, kwargs, out)
        except UnsafeError as error:
            self.blame = Blame(func._schema.name, str(error))
        return out

    def _judge(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        padded, given = self.padded, list(tensors((args, kwargs)))
        self.ran = True
        self.sizes |= padded.occurring([_sizes_in(value) for value in (*args, *kwargs.values())])
        _check_reach(func, padded, given)
        if not padded.symbolic((args, kwargs)) and not padded.symbolic(list(tensors(out))):
            for tensor in tensors(out):  # whatever it computes of exact values is exact
                self.known.note(tensor, Value(padded.plain(tensor.shape)))
            return
        for tensor in (*given, *tensors(out)):
            _check_form(padded, tensor)
        call = Call(func, args, kwargs, out, padded, self.known.look)
        rule = _rule_of(func)
        for name, value in call.args.items():
            if name not in rule.shapes and padded.symbolic([_sizes_in(value)]):
                raise UnsafeError(f"uses the size {min(map(str, padded.occurring([_sizes_in(value)])))} as a value")
        layouts = rule.judge(call)
        if layouts is None:
            layouts = [padded.plain(t.shape) for t in call.out]
        targets = list(written(func, args, kwargs))
        for tensor in targets:
            self._check_write(tensor)
        views = is_view(func) or func._schema.name in SHARE_UNDECLARED
        window = views and (call.window or any(self.known.look(t).window for t in given))
        for tensor, layout in zip(call.out, layouts, strict=True):
            _check_layout(padded, tensor, layout)
            if any(tensor is t for t in targets) and self.known.look(tensor).layout != layout:
                raise UnsafeError(
                    f"writes rows of {shown(layout)} into a tensor of {shown(self.known.look(tensor).layout)}"
                )
            rows = padded.symbolic(tensor)
            wild = call.wild and rows and not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
            keeps = any(tensor is t for t in given)
            self.known.note(tensor, Value(layout, self.known.look(tensor).window if keeps else window and rows, wild))

    def _check_write(self, tensor: torch.Tensor) -> None:
        value = self.known.look(tensor)
        if value.window:
            raise UnsafeError(
                f"writes to {shown(value.layout)}, beyond whose rows lies memory that belongs to other rows"
            )


def _name_of(op: Any) -> str:
    name = getattr(op, "name", None)
    return str(name() if callable(name) else op)


def _sizes_in(value: Any) -> Any:
    """Numbers among an argument, or those that became tensors on their way; not the sizes of its tensors."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "_wrapped_number", None)
    if isinstance(value, (list, tuple)):
        return [_sizes_in(v) for v in value]
    return value


def _check_reach(func: OpOverload, padded: Padded, given: Iterable[torch.Tensor]) -> None:
    if func._schema.name.startswith("aten::as_strided") or torch.Tag.inplace_view in func.tags:
        for tensor in given:
            if padded.symbolic(tensor) or padded.symbolic(tensor.untyped_storage().nbytes()):
                raise UnsafeError("lays out memory anew that holds rows")


def _check_form(padded: Padded, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UnsafeError("works on a tensor that isn't strided")
    for size in map(padded.sized, tensor.shape):
        if not padded.grows(size):
            raise UnsafeError(f"has a dimension of size {size}, which may shrink when there are more rows")


def _check_layout(padded: Padded, tensor: torch.Tensor, layout: Layout) -> None:
    if list(map(padded.product, layout)) != list(map(padded.sized, tensor.shape)):
        raise UnsafeError(f"gives a tensor of {tuple(tensor.shape)} where {shown(layout)} was expected")


def _rule_of(func: OpOverload) -> Rule:
    name = func._schema.name
    registered = _registered.get(f"{name}.{func._overloadname}", _registered.get(name))
    if registered is not None:
        if registered == ROWS_RULE:
            return Rule(_each_row)
        return Rule(_asking(registered), frozenset(a.name for a in func._schema.arguments))
    rule = RULES.get(name) or RULES.get(name.rstrip("_"))
    if rule is None and torch.Tag.nondeterministic_seeded in func.tags:
        raise UnsafeError("draws as many random numbers as there are elements")
    rule = of_pointwise_kind(func) or rule
    if rule is None:
        raise UnsafeError(UNKNOWN)
    return rule


def _plain_inputs(call: Call) -> None:
    for tensor in tensors(call.args):
        for d in range(tensor.dim()):
            call.prefix(call.layout(tensor), d, "takes a tensor by its")


def _each_row(call: Call) -> Layouts:
    _plain_inputs(call)
    given = {dim for tensor in tensors(call.args) for dim in call.layout(tensor)}
    for tensor in (*call.out, *written(call.op, (), call.args)):
        rows = [dim for dim in call.padded.plain(tensor.shape) if call.symbolic(dim)]
        if not rows:
            raise UnsafeError(f"gives or writes a tensor of {tuple(tensor.shape)}, which has no rows")
        for dim in rows:
            if dim not in given:
                raise UnsafeError(f"gives {dim[0]} rows, as many as none of its inputs has")
    call.wild = True
    return None


def _asking(rule: Any) -> Callable[[Call], Layouts]:
    def judge(call: Call) -> Layouts:
        _plain_inputs(call)
        why = rule(*call.given)
        if why is not None:
            raise UnsafeError(str(why))
        call.wild = True
        return None

    return judge
