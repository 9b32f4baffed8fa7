"""Whether a graph's pieces may run at larger sizes than a call has, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode

from .buckets import Buckets, Key, conditions_of
from .capturable import Reason
from .config import Options
from .extents import Extents
from .facts import GraphFacts, example
from .forms import expression
from .groups import HostRef, Ref, Split
from .inputs import Input, is_static
from .prefix import PrefixFacts, prefix_facts
from .split import NotSplittableError, split_graph
from .symbols import Symbols, code, function_of

# What must be left to capture, or exact sizes are recorded instead: of the ops that launch, and of those a piece, where
# there are many more pieces.
LEAST_SHARE, LEAST_KERNELS, FEW_PIECES = 0.5, 4, 6


@dataclass
class Padding:
    """How a graph is padded.

    Attributes:
        buckets: which recordings serve which sizes.
        extents: the geometry of the values that cross between groups.
        trusted: the user vouches for it (pad="trust"): neither rules nor tries.
    """

    buckets: Buckets
    extents: Extents
    trusted: bool


@dataclass
class PaddedSplit:
    """A graph's split, with what padding asks for.

    Attributes:
        split: the groups.
        prefix: what the rules found; None where the graph is not to be padded.
        why_not: a sentence; empty where it is to be padded.
    """

    split: Split
    prefix: PrefixFacts | None
    why_not: str


def split_for_padding(
    gm: fx.GraphModule,
    facts: GraphFacts,
    why: Callable[[fx.Node], Reason | None],
    symbols: Symbols,
    options: Options,
    *,
    keep: Callable[[fx.Node], bool],
    wrap_numbers: bool,
) -> PaddedSplit:
    """Split ``gm`` at the nodes for which ``why`` gives a reason and, where that lets the rest be padded and leaves
    pieces worth it, at those whose rows depend on one another. Nodes to ``keep`` are not cut for padding."""
    plain = split_graph(gm, facts, why, wrap_numbers=wrap_numbers)
    dynamic = frozenset(_dynamic(gm, symbols))
    if not dynamic:
        others = "static inputs alone have dynamic dimensions, and are read where they are"
        return PaddedSplit(plain, None, others if symbols.dimensions else "no dimension is dynamic")
    if options.pad == "never":
        return PaddedSplit(plain, None, 'pad="never"')
    if options.capture_sizes is None:
        return PaddedSplit(plain, None, "capture_sizes=None records exact sizes")
    if not plain.pieces:
        return PaddedSplit(plain, None, "there is no piece")
    if plain.reshaped:
        return PaddedSplit(plain, None, f"the shape or the memory of {min(plain.reshaped)} is changed in place")
    if plain.reached_around:
        return PaddedSplit(plain, None, f"as_strided reaches around {min(plain.reached_around)}")
    prefix = prefix_facts(gm, dynamic, lambda node: why(node) is not None)
    if options.pad == "trust" or not prefix.blame:
        return PaddedSplit(plain, prefix, "")

    first = next(iter(prefix.blame.items()))
    cause = f"{first[0]}: {first[1]}"
    if options.capture_sizes != "auto":
        # Who lists sizes calls with them, and wants as few cuts as there can be.
        return PaddedSplit(plain, None, f"nothing is cut for it where capture_sizes is a list ({cause})")

    kept = [n for n in gm.graph.nodes if n.name in prefix.blame and keep(n)]
    if kept:
        return PaddedSplit(plain, None, f"capturable_ops keeps {kept[0].name}: {prefix.blame[kept[0].name]}")

    def also(node: fx.Node) -> Reason | None:
        reason, blame = why(node), prefix.blame.get(node.name)
        if reason is None and blame is not None:
            return Reason("padding", str(blame))
        return reason

    try:
        padded = split_graph(gm, facts, also, wrap_numbers=wrap_numbers)
    except NotSplittableError as error:
        return PaddedSplit(plain, None, f"{error} ({cause})")
    before, left = (sum(piece.kernels for piece in split.pieces) for split in (plain, padded))
    many = len(padded.pieces) > len(plain.pieces) + FEW_PIECES
    if left < LEAST_SHARE * before or (many and left < LEAST_KERNELS * len(padded.pieces)):
        count = f"{left} of {before} ops that launch would be left, in {len(padded.pieces)} pieces"
        return PaddedSplit(plain, None, f"{count} instead of {len(plain.pieces)} ({cause})")
    return PaddedSplit(padded, prefix, "")


def _dynamic(gm: fx.GraphModule, symbols: Symbols) -> set[sympy.Symbol]:
    """The sizes that may be rounded up: not those of static inputs, which are read where they are."""
    static = [example(n) for n in gm.graph.find_nodes(op="placeholder") if is_static(n)]
    sizes = [expression(n) for value in static if isinstance(value, torch.Tensor) for n in value.shape]
    return symbols.dimensions - {s for n in sizes for s in getattr(n, "free_symbols", ())}


def padding_of(
    gm: fx.GraphModule,
    split: Split,
    prefix: PrefixFacts,
    symbols: Symbols,
    key_symbols: tuple[sympy.Symbol, ...],
    inputs: tuple[Input, ...],
    options: Options,
) -> Padding:
    """How ``split`` is padded: the dynamic sizes among ``key_symbols`` are rounded up."""
    names = {i.name for i in inputs} | {o.name for o in split.outputs if isinstance(o, Ref)}
    for group in split.groups:
        names |= {r.name for r in group.inputs if isinstance(r, Ref)} | set(group.outputs)
    dynamic = [s for s in key_symbols if s in _dynamic(gm, symbols)]
    mode = detect_fake_mode([example(n) for n in gm.graph.nodes])
    env = None if mode is None else mode.shape_env
    strides = strides_of(symbols, key_symbols, split)
    buckets = Buckets(
        key_symbols,
        dynamic,
        options.ladder(),
        options.max_padding_ratio,
        lambda: conditions_of(env, key_symbols, [*dynamic, *strides]),
        exact=options.capture_sizes == "auto",
        strides=strides,
    )
    return Padding(buckets, Extents(gm, names, prefix.layouts, key_symbols), options.pad == "trust")


def strides_of(
    symbols: Symbols, key_symbols: tuple[sympy.Symbol, ...], split: Split
) -> dict[sympy.Symbol, Callable[[Key, Key], int]]:
    """The key's symbols that only tell how far the rows of an input lie apart: a slice of a wider tensor's columns.

    Recordings see copies of inputs, so they may have strides of their own, and one serves slices of any width.
    """
    numbers = {s for g in split.pieces for r in g.inputs if isinstance(r, HostRef) for s in r.expr.free_symbols}
    return {
        symbol: _stride_in(tensor, dim, key_symbols)
        for symbol, (tensor, dim) in symbols.strides().items()
        if symbol in key_symbols and symbol not in numbers and _known(tensor, key_symbols)
    }


def _known(tensor: torch.Tensor, key_symbols: tuple[sympy.Symbol, ...]) -> bool:
    numbers = [sympy.sympify(expression(n)) for n in (*tensor.shape, *tensor.stride())]
    return all(n.free_symbols <= set(key_symbols) for n in numbers) and all(map(code, numbers))


def _stride_in(tensor: torch.Tensor, dim: int, key_symbols: tuple[sympy.Symbol, ...]) -> Callable[[Key, Key], int]:
    def at(numbers: Any) -> Callable[..., tuple[int, ...]]:
        return function_of(key_symbols, f"({''.join(f'{code(sympy.sympify(expression(n)))}, ' for n in numbers)})")

    size_at, stride_at = at(tensor.shape), at(tensor.stride())

    def stride(real: Key, bucket: Key) -> int:
        own, size, strides = stride_at(*real), size_at(*bucket), stride_at(*bucket)
        inner = [d for d in range(tensor.dim()) if (own[d], d) < (own[dim], dim) and d != dim]
        return max([1, *(size[d] * strides[d] for d in inner)])

    return stride
