"""How the rows of a padded run lie in a tensor, and what a rule about one op is asked with.

A call of n rows runs at b >= n: every size that has a padded symbol in it is larger, and what lies beyond the exact
sizes is garbage. A dimension that was merged of several has *factors*, outermost first: ``view`` of (2, n, H) to
(2 n, H) makes one of the factors (2, n), whose first 2 n elements are not those of the exact run; those with both
coordinates inside (2, n) are. A plain dimension has one factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Min

from .interpret import SYM_TYPES, tensors
from .symbols import expression

Dim = tuple[sympy.Expr, ...]
Layout = tuple[Dim, ...]
ONE: Dim = (sympy.Integer(1),)


class UnsafeError(Exception):
    """An op is not prefix-safe; the text says why, without capital."""


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Attributes:
        layout: for each dimension its factors.
        window: elements beyond its exact sizes lie among the rows of the tensor that it is a view of.
        wild: its integers beyond the exact sizes are computed, so as indices they may be out of range.
    """

    layout: Layout
    window: bool = False
    wild: bool = False


class Padded:
    """The padded symbols, and how sizes depend on them.

    Args:
        symbols: sizes that are larger in a padded run.
        shape_env: whose guards hold for all sizes that the graph is called with; None: nothing is known of them.
    """

    def __init__(self, symbols: Iterable[sympy.Symbol], shape_env: Any = None) -> None:
        self.symbols = frozenset(symbols)
        self._sized: dict[Any, sympy.Expr] = {}
        for guard in getattr(shape_env, "guards", ()):
            equal = guard.expr
            if isinstance(equal, sympy.Eq) and equal.rhs.is_Integer:
                # view(-1, 4) of s rows has s // (s // 4) columns: 4, as a guard says
                self._sized[_normal(shape_env.replace(equal.lhs))] = equal.rhs

    def sized(self, value: Any) -> sympy.Expr:
        """A size as an expression whose equals compare equal."""
        expr = sympy.sympify(expression(value))
        found = self._sized.get(expr)
        if found is None:
            normal = _normal(expr)
            found = self._sized[expr] = self._sized.get(normal, normal)
        return found

    def product(self, factors: Iterable[Any]) -> sympy.Expr:
        return self.sized(sympy.prod(factors))

    def symbolic(self, value: Any) -> bool:
        """Whether a padded symbol occurs in a number or size, or in one of a container's or of a tensor's sizes."""
        return bool(self.occurring(value))

    def occurring(self, value: Any) -> frozenset[sympy.Symbol]:
        if isinstance(value, sympy.Basic):
            return self.symbols & value.free_symbols
        if isinstance(value, torch.Tensor):
            wrapped = getattr(value, "_wrapped_number", None)  # a symbolic number on its way into an op
            return self.occurring((tuple(self.sized(n) for n in value.shape if not isinstance(n, int)), wrapped))
        if isinstance(value, SYM_TYPES):
            return self.symbols & getattr(expression(value), "free_symbols", frozenset())
        if isinstance(value, torch.Size):
            value = tuple(value)
        leaves = pytree.tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            return frozenset()
        return frozenset().union(*map(self.occurring, leaves))

    def grows(self, size: sympy.Expr) -> bool:
        """Whether ``size`` provably never shrinks when the padded symbols grow: only then is there a prefix."""
        if not self.symbolic(size) or size.is_Symbol:
            return True
        if isinstance(size, (sympy.Add, Max, Min, sympy.Max, sympy.Min)):
            return all(map(self.grows, size.args))
        if isinstance(size, sympy.Mul):
            return all(a.is_nonnegative and self.grows(a) for a in size.args)
        if isinstance(size, sympy.Pow):
            base, exponent = size.args
            return bool(base.is_nonnegative and exponent.is_Integer and exponent > 0 and self.grows(base))
        if isinstance(size, CeilToInt):
            return self.grows(size.args[0])
        if isinstance(size, (FloorDiv, IntTrueDiv)):
            over, by = size.args
            return bool(not self.symbolic(by) and by.is_positive and self.grows(over))
        return False

    def canonical(self, factors: Iterable[Any]) -> Dim:
        """Of all ways to write down the same coordinates the shortest: a factor takes in what follows it as long as
        that is static, since prefixes of the two are prefixes of their product."""
        found: list[sympy.Expr] = []
        for factor in map(self.sized, factors):
            if factor == 1:
                continue
            if found and not self.symbolic(factor):
                found[-1] = self.sized(found[-1] * factor)
            else:
                found.append(factor)
        return tuple(found) or ONE

    def plain(self, shape: Iterable[Any]) -> Layout:
        """One factor a dimension: the rows are a prefix of it."""
        return tuple((self.sized(n),) for n in shape)

    def regroup(self, layout: Layout, shape: Sequence[Any]) -> Layout:
        """The layout of a view of the same elements in the same order.

        Raises:
            UnsafeError: a new dimension ends inside of a factor, so that its rows are no prefix.
        """
        sizes = list(map(self.sized, shape))
        flat = list(self.canonical(f for dim in layout for f in dim))
        if 0 in sizes or not self.symbolic(tuple(flat)):
            return self.plain(sizes)
        found: list[Dim] = []
        # From the right: only the outermost part of a factor may be symbolic, so what is split off inwards is static.
        for size in reversed(sizes):
            taken: list[sympy.Expr] = []
            have = sympy.Integer(1)
            while have != size:
                need = _divided(size, have)
                if need is None or not flat:
                    raise UnsafeError(_ends_inside(layout, sizes))
                factor = flat.pop()
                if need != factor and not self.symbolic(need):
                    rest = self._split(factor, need)
                    if rest is not None:
                        flat.append(rest)
                        factor = need
                taken.insert(0, factor)
                have = self.sized(have * factor)
            found.insert(0, self.canonical(taken))
        if self.product(flat) != 1:
            raise UnsafeError(_ends_inside(layout, sizes))
        return tuple(found)

    def _split(self, factor: sympy.Expr, inner: sympy.Expr) -> sympy.Expr | None:
        """What is left of ``factor`` outside of ``inner``; None where it isn't a multiple."""
        exact = _divided(factor, inner)
        if exact is None and self.symbolic(factor) and inner.is_Integer:
            return self.sized(
                FloorDiv(factor, inner)
            )  # a view says that it divides: the outer dimensions must come out as this
        return exact


def _normal(expr: sympy.Expr) -> sympy.Expr:
    return sympy.expand(expr.replace(FloorDiv, lambda a, b: _divided(a, b) or FloorDiv(a, b)))


def _divided(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b where that is a polynomial with integer coefficients."""
    quotient = sympy.cancel(a / b) if b != 1 else a
    if sympy.denom(sympy.together(quotient)) != 1:
        return None
    return sympy.expand(quotient)


def _ends_inside(layout: Layout, sizes: Sequence[sympy.Expr]) -> str:
    return f"views {shown(layout)} as {_tuple(sizes)}, whose rows are not those of either dimension"


def shown(layout: Layout) -> str:
    """A layout for people: merged dimensions as products."""
    return _tuple(" x ".join(f"({f})" if len(dim) > 1 and f.is_Add else str(f) for f in dim) for dim in layout)


def _tuple(parts: Iterable[Any]) -> str:
    parts = list(map(str, parts))
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


class Call:
    """One call of an op, as rules see it.

    Attributes:
        args: every argument by its name in the schema, defaults included.
        given: args and kwargs as they were passed.
        out: the tensors that it returned.
        padded: the padded symbols.
        wild: set by rules: whether integer results may be out of range beyond the rows; by default they are where an
            integer argument is.
        window: set by the rules of views: whether the results are windows.
    """

    def __init__(
        self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, padded: Padded, look: Look
    ) -> None:
        self.op, self.given, self.padded, self.value = op, (tuple(args), kwargs), padded, look
        self.args: dict[str, Any] = {}
        for position, argument in enumerate(op._schema.arguments):
            given = args[position] if position < len(args) else argument.default_value
            self.args[argument.name] = kwargs.get(argument.name, given)
        self.out = list(tensors(out))
        self.window = False
        self.wild = any(look(t).wild for t in tensors(self.args))

    @property
    def name(self) -> str:
        return self.op._schema.name.partition("::")[2]

    def operands(self) -> list[torch.Tensor]:
        """The tensors that it reads, or may read: all but those that it only writes its result to (``out=``)."""
        only = {
            a.name
            for a in self.op._schema.arguments
            if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        }
        return list(tensors({name: value for name, value in self.args.items() if name not in only}))

    def layout(self, of: Any) -> Layout:
        """The layout of a tensor, or of the argument with that name."""
        return self.value(self.args[of] if isinstance(of, str) else of).layout

    def symbolic(self, value: Any) -> bool:
        return self.padded.symbolic(value)

    def dim(self, name: str, layout: Layout) -> int:
        """The argument ``name``, a dimension of a tensor with ``layout``, from 0 upwards."""
        return int(self.args[name]) % max(len(layout), 1)

    def static(self, layout: Layout, dims: Iterable[int], what: str) -> None:
        """Raises UnsafeError, with ``what`` the op does over it, for a dimension among ``dims`` that has rows."""
        for d in dims:
            if self.symbolic(layout[d]):
                raise UnsafeError(f"{what} the rows (dimension {d} of size {self.padded.product(layout[d])})")

    def prefix(self, layout: Layout, d: int, what: str) -> None:
        """Raises UnsafeError where the rows are no prefix of dimension ``d`` because it was merged."""
        if len(layout[d]) > 1:
            raise UnsafeError(f"{what} dimension {d}, which was merged of {shown((layout[d],))[1:-2]}")

    def broadcast(self, layouts: Iterable[Layout]) -> Layout:
        """The layout of a pointwise result.

        Raises:
            UnsafeError: the rows of two operands lie differently in one dimension.
        """
        layouts = list(layouts)
        rank = max(map(len, layouts), default=0)
        found = [ONE] * rank
        for layout in layouts:
            for d, dim in enumerate(layout, rank - len(layout)):
                if dim == ONE:
                    continue
                if found[d] not in (ONE, dim):
                    raise UnsafeError(
                        f"combines tensors whose rows lie differently in dimension {d}: "
                        f"{shown((found[d],))[1:-2]} and {shown((dim,))[1:-2]}"
                    )
                found[d] = dim
        return tuple(found)

    def index(self, tensor: torch.Tensor) -> None:
        """Raises UnsafeError where ``tensor``, which holds indices, may be out of range beyond its rows."""
        if self.symbolic(tensor) and self.value(tensor).wild:
            raise UnsafeError("takes computed indices, which may be out of range beyond the rows of a call")


Look = Callable[[torch.Tensor], Value]
Layouts = Sequence[Layout] | None  # of the results, in order; None: plain


@dataclass(frozen=True)
class Rule:
    """How an op is judged.

    Attributes:
        judge: gives the layouts of the results, or raises UnsafeError.
        shapes: arguments that are sizes of the result; in any other a padded size is used as a value.
    """

    judge: Callable[[Call], Layouts]
    shapes: frozenset[str] = frozenset()
