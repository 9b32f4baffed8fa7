"""A graph's key: which symbols are in it, and how their values are read off a call's arguments.

It holds the values of the sizes (int) and numbers (their hex text) that pieces see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .buckets import Key
from .facts import example
from .forms import expression
from .groups import HostRef, Ref, Split
from .inputs import STAGED, STATIC, Input
from .symbols import Symbols


def key_symbols(gm: fx.GraphModule, split: Split, inputs: Sequence[Input], symbols: Symbols) -> set[sympy.Symbol]:
    """Every symbol on whose value a recording depends."""
    found = _symbols_in_pieces(split) | _symbols_around_pieces(gm, split, inputs)
    # Behind the write a call shows another number than the one that it began with, and that the graph goes on with.
    found |= {s for s, index in symbols.items.items() if inputs[index].written}
    if split.reshaped:  # which sizes these have on the way isn't known
        found |= {s for node in gm.graph.find_nodes(op="placeholder") for s in _symbols_of(example(node))}
    return found


def key_reader(symbols: Symbols, held: Sequence[sympy.Symbol]) -> Callable[[Sequence[Any]], Key]:
    """What gives the key of a call's arguments: the values of the symbols ``held`` in it, in order."""
    read = symbols.read
    if not held:
        return lambda args: ()
    if all(s in symbols.sizes for s in held):
        indices = [symbols.sizes[s] for s in held]
        if len(indices) == 1:
            only = indices[0]
            return lambda args: (args[only],)
        return lambda args: tuple(args[i] for i in indices)
    return lambda args: tuple(_key_part(read(s, args)) for s in held)


def _key_part(value: Any) -> Any:
    # Floats by their exact text: 0.0 and -0.0 are equal numbers and different values, NaN is not equal to itself.
    return value.hex() if isinstance(value, float) else value


def _symbols_in_pieces(split: Split) -> set[Any]:
    """Every symbol that shapes a value inside a piece, or that a piece takes as a number.

    Not those of storage offsets: a recording sees each input at an address of its own.
    """
    found: set[Any] = set()
    for group in split.pieces:
        for ref in group.inputs:
            if isinstance(ref, HostRef):
                found |= getattr(ref.expr, "free_symbols", set())
        for node in group.gm.graph.nodes:
            found |= _symbols_of(example(node))
    return found


def _symbols_around_pieces(gm: fx.GraphModule, split: Split, inputs: Sequence[Input]) -> set[Any]:
    """Every symbol that shapes what a recording has at an address of its own although no piece sees that shape: an
    input of which pieces see a cut's view, and what cuts return of memory that pieces read or make."""
    kept = {i.name for i in inputs if i.kind in (STAGED, STATIC)}
    in_pieces = {name for g in split.pieces for name in (*g.outputs, *(r.name for r in g.inputs if isinstance(r, Ref)))}
    memory = frozenset().union(*(split.storages.get(name, frozenset()) for name in in_pieces | kept))
    # What is sized by data is handed on as it comes: no piece reads it, and it may only seem to lie in that memory.
    results = {name for g in split.cuts for name in g.outputs if name not in g.sized_by_data}
    shaped = kept | {
        n for n in results if split.roots.get(n, frozenset()) & kept or split.storages.get(n, memory) & memory
    }
    return {s for node in gm.graph.nodes if node.name in shaped for s in _symbols_of(example(node))}


def _symbols_of(value: Any) -> set[Any]:
    found: set[Any] = set()
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            sizes = [*leaf.shape, *leaf.stride()] if leaf.layout is torch.strided else []
        else:
            sizes = [leaf]
        for size in sizes:
            found |= getattr(expression(size), "free_symbols", set())
    return found
