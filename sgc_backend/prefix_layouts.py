"""How the rows of a padded run lie in a tensor.

A call of n rows runs at b >= n: every size that has a padded symbol in it is larger, and what lies beyond the exact
sizes is garbage. A dimension that was merged of several has *factors*, outermost first: ``view`` of (2, n, H) to
(2 n, H) makes one of the factors (2, n), whose first 2 n elements are not those of the exact run; those with both
coordinates inside (2, n) are. A plain dimension has one factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Min

from .forms import expression
from .interpret import SYM_TYPES

Dim = tuple[sympy.Expr, ...]
Layout = tuple[Dim, ...]
ONE: Dim = (sympy.Integer(1),)


class UnsafeError(Exception):
    """An op is not prefix-safe; the text says why, without capital."""


class Padded:
    """The padded symbols, and how sizes depend on them.

    Args:
        symbols: sizes that are larger in a padded run.
        shape_env: whose guards hold for all sizes that the graph is called with; None: nothing is known of them.
    """

    def __init__(self, symbols: Iterable[sympy.Symbol], shape_env: Any = None) -> None:
        self.symbols = frozenset(symbols)
        self._sized: dict[Any, sympy.Expr] = {}
        self._equal: dict[sympy.Expr, sympy.Expr] = {}
        for guard in getattr(shape_env, "guards", ()):
            equal = guard.expr
            if isinstance(equal, sympy.Eq) and equal.rhs.is_Integer:
                # view(-1, 4) of s rows has s // (s // 4) columns: 4, as a guard says
                self._equal[_normal(shape_env.replace(equal.lhs))] = equal.rhs

    def sized(self, value: Any) -> sympy.Expr:
        """A size as an expression whose equals compare equal."""
        expr = sympy.sympify(expression(value))
        found = self._sized.get(expr)
        if found is None:
            normal = _normal(expr)
            found = self._sized[expr] = _normal(normal.xreplace(self._equal)) if self._equal else normal
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
