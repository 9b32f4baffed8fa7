"""Host numbers of a graph as expressions of its inputs' sizes.

Dynamo's graph computes with symbolic sizes. Every size that crosses from one piece to another is an expression of the
symbols that the inputs bring, so it is evaluated from the call's inputs instead of being carried from piece to piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .facts import example, free_unbacked, is_wrapped_number
from .forms import expression

CACHED_CALLS = 1024  # evaluated inputs kept; cleared when full, so traffic can't grow it


class UnboundSymbolError(Exception):
    """A size can't be computed from the inputs: the graph's symbols are not all visible in them."""


class Symbols:
    """Where each symbol of a graph is found in a call's inputs, and the evaluation of expressions over them.

    Raises:
        UnboundSymbolError: from `evaluate`, for a symbol that no input shows plainly.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._readers: dict[sympy.Symbol, Callable[[Sequence[Any]], Any]] = {}
        self.sizes: dict[sympy.Symbol, int] = {}  # symbol -> input index, for sizes passed as ints
        self.numbers: dict[sympy.Symbol, int] = {}  # symbol -> input index, for wrapped numbers
        self.items: dict[sympy.Symbol, int] = {}  # symbol -> input index, for what the host reads of its own tensors
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for index, node in enumerate(placeholders):
            value = example(node)
            symbol = expression(value) if isinstance(value, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol):
                self.sizes[symbol] = index
                self._readers.setdefault(symbol, lambda args, i=index: args[i])
        for index, node in enumerate(placeholders):
            value = example(node)
            if is_wrapped_number(node):
                self._add_number(node, index)
            elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for dim, size in enumerate(value.shape):
                    symbol = expression(size)
                    if isinstance(symbol, sympy.Symbol):
                        self._readers.setdefault(symbol, lambda args, i=index, d=dim: args[i].shape[d])
        for index, node in enumerate(placeholders):  # behind the sizes, which no write changes
            if isinstance(example(node), torch.Tensor) and not is_wrapped_number(node):
                self._add_item(node, index)
        values = [example(node) for node in placeholders]
        self._tensors = [v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]
        self.dimensions: set[sympy.Symbol] = set()  # symbols that are a dimension of an input
        for value in self._tensors:
            for size in value.shape:
                self.dimensions |= getattr(expression(size), "free_symbols", set())
        self._cache: dict[tuple[Any, ...], Any] = {}
        self._free: dict[Any, tuple[sympy.Symbol, ...]] = {}

    def strides(self) -> dict[sympy.Symbol, tuple[torch.Tensor, int]]:
        """Symbols that are nothing but a stride: the one input, as traced, that has them, and the dimension."""
        found: dict[sympy.Symbol, list[tuple[torch.Tensor, int]]] = {}
        for value in self._tensors:
            for dim, stride in enumerate(value.stride()):
                for symbol in getattr(expression(stride), "free_symbols", ()):
                    found.setdefault(symbol, []).append((value, dim))
        return {
            symbol: places[0]
            for symbol, places in found.items()
            if len(places) == 1
            and expression(places[0][0].stride(places[0][1])) == symbol
            and symbol not in self.dimensions
            and symbol not in self.numbers
        }

    def _add_number(self, node: fx.Node, index: int) -> None:
        for user in node.users:
            symbol = expression(example(user))
            if user.target == "item" and isinstance(symbol, sympy.Symbol):
                self.numbers[symbol] = index
                self._readers.setdefault(symbol, lambda args, i=index: args[i].item())

    def _add_item(self, node: fx.Node, index: int) -> None:
        """Dynamo takes what the host reads of a host tensor without dimensions for a size, as it takes an int."""
        for user in node.users:
            symbol = expression(example(user))
            number = user.target == "item" and isinstance(symbol, sympy.Symbol) and not free_unbacked(example(user))
            if number and symbol not in self._readers:
                self._readers[symbol] = lambda args, i=index: args[i].item()
                self.items[symbol] = index

    def as_called(self, args: Sequence[Any]) -> Sequence[Any]:
        """``args`` for `evaluate`, whose numbers stay as they are when the graph writes to what they are read of."""
        if not self.items:
            return args
        read = set(self.items.values())
        return [arg.clone() if i in read else arg for i, arg in enumerate(args)]

    def bound(self, symbols: Iterable[sympy.Symbol]) -> tuple[sympy.Symbol, ...]:
        """``symbols`` in a stable order.

        Raises:
            UnboundSymbolError: one of them isn't shown by any input.
        """
        ordered = tuple(sorted(set(symbols), key=str))
        for symbol in ordered:
            if symbol not in self._readers:
                raise UnboundSymbolError(f"no input shows the size {symbol}")
        return ordered

    def read(self, symbol: sympy.Symbol, args: Sequence[Any]) -> Any:
        """The value of one symbol in a call's inputs."""
        return self._readers[symbol](args)

    def evaluate(
        self,
        expr: Any,
        args: Sequence[Any],
        kind: type | None = None,
        instead: Mapping[sympy.Symbol, int] | None = None,
    ) -> Any:
        """The int, float or bool (``kind``; None: as ``expr`` has it) that ``expr`` is for a call's inputs; symbols in
        ``instead`` have the values that it gives."""
        value = self._evaluate(expr, args, instead or {})
        return value if kind is None else kind(value)

    def _evaluate(self, expr: Any, args: Sequence[Any], instead: Mapping[sympy.Symbol, int]) -> Any:
        if not isinstance(expr, sympy.Basic):
            return expr
        if isinstance(expr, sympy.Symbol) and expr in self._readers:  # as nearly all are
            return instead[expr] if expr in instead else self._readers[expr](args)
        free = self._free.get(expr)
        if free is None:  # sympy looks through the whole expression for them
            free = self._free[expr] = self.bound(expr.free_symbols)
        values = tuple(instead[s] if s in instead else self._readers[s](args) for s in free)
        key = (expr, *map(repr, values))  # by text: 0.0 and -0.0 are equal numbers
        found = self._cache.get(key)
        if found is None:
            found = number(expr.xreplace({s: sympy.sympify(v) for s, v in zip(free, values, strict=True)}))
            if len(self._cache) >= CACHED_CALLS:
                self._cache.clear()
            self._cache[key] = found
        return found


def code(expr: Any) -> str | None:
    """``expr`` as the text of a Python expression for `function_of`; None where a function in it has no such text."""
    from torch.utils._sympy.printers import PythonPrinter

    if not isinstance(expr, sympy.Basic):
        return repr(expr if isinstance(expr, (bool, float)) else int(expr))
    if not all(hasattr(PythonPrinter, f"_print_{type(f).__name__}") for f in expr.atoms(sympy.Function)):
        return None
    return PythonPrinter().doprint(expr)


def function_of(symbols: Sequence[sympy.Symbol], text: str) -> Callable[..., Any]:
    """``text``, made of what `code` gives, as a function of the values of ``symbols``; floats may come as hex text."""
    found = eval(f"lambda {', '.join(map(str, symbols))}: {text}", {"math": math, "torch": torch})
    if all(s.is_integer for s in symbols):
        return found
    return lambda *values: found(*(float.fromhex(v) if isinstance(v, str) else v for v in values))


def kind_of(value: Any) -> type:
    """The Python type that a torch.Sym* value, or a plain number, has when it is evaluated."""
    if isinstance(value, (torch.SymFloat, float)):
        return float
    return bool if isinstance(value, (torch.SymBool, bool)) else int


def number(expr: Any) -> int | float | bool:
    """A closed sympy expression as a Python number."""
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    return int(expr) if isinstance(expr, sympy.Integer) else float(expr)
