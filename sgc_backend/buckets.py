"""Which recorded sizes serve a call: for each dynamic size the smallest of a ladder that is allowed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy

from .symbols import code, function_of

REMEMBERED = 4096  # real sizes whose bucket is remembered; cleared when full, so traffic can't grow it
SEARCHED = 64  # sizes below a bucket that are looked through for one that the graph's conditions allow
# Elements between rows that are tried where the graph's conditions refuse rows without any; first what keeps alignment.
APART = (16, 1)
TRIED = 3  # sizes of the ladder that are tried for each dimension, where the graph's conditions refuse the first

Key = tuple[Any, ...]
# (real sizes, a bucket's sizes) -> the least stride with which a dimension clears those inside of it
Stride = Callable[[Key, Key], int]


class Buckets:
    """Maps the values of a key's symbols to those of the recordings that serve them.

    Args:
        symbols: the key's, in order.
        dynamic: those whose value may be rounded up.
        ladder: sizes, ascending.
        ratio: a bucket more than this times the real size is not used.
        conditions: see `conditions_of`.
        exact: whether a size whose buckets the conditions refuse may be recorded by itself.
        strides: symbols that are strides of inputs. A bucket has strides of its own for them, as its sizes ask for.
    """

    def __init__(
        self,
        symbols: Sequence[sympy.Symbol],
        dynamic: Collection[sympy.Symbol],
        ladder: Sequence[int],
        ratio: float,
        conditions: Callable[[], Callable[..., bool]],
        *,
        exact: bool,
        strides: Mapping[sympy.Symbol, Stride] | None = None,
    ) -> None:
        self.symbols, self.dynamic = tuple(symbols), frozenset(dynamic)
        self._positions = [k for k, s in enumerate(self.symbols) if s in self.dynamic]
        self._ladder, self._ratio, self._exact = tuple(ladder), ratio, exact
        self._conditions, self._holds = conditions, None
        self._strides = {k: strides[s] for k, s in enumerate(self.symbols) if strides and s in strides}
        self._apart = [0, *APART] if self._strides else [0]
        self._found: dict[Key, Key | None] = {}

    def of(self, key: Key) -> Key | None:
        """The bucket for real sizes ``key``; None where there is none."""
        try:
            return self._found[key]
        except KeyError:
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            found = self._found[key] = self._choose(key)
            return found

    def smaller(self, bucket: Key) -> Key | None:
        """Real sizes below ``bucket`` that it serves, in every dimension where it serves any; None: in none."""
        sizes = list(bucket)
        for k in self._positions:
            at = bisect.bisect_left(self._ladder, bucket[k])
            least = (self._ladder[at - 1] if at else 0) + 1
            below = range(bucket[k] - 1, least, -1)[:SEARCHED]
            for size in ((least + bucket[k]) // 2, least, *below):
                tried = (*sizes[:k], size, *sizes[k + 1 :])
                # The ladder's sizes below may break the graph's conditions as well as the bucket's above.
                if least <= size < bucket[k] and self._allowed(tried) and self.of(tried) == bucket:
                    sizes = list(tried)
                    break
        return tuple(sizes) if tuple(sizes) != bucket else None

    def fills(self, real: Key, bucket: Key) -> bool:
        """Whether ``real`` has all the rows that ``bucket`` has room for."""
        return all(real[k] == bucket[k] for k in self._positions)

    def values(self, key: Key) -> dict[sympy.Symbol, int]:
        """What the dynamic symbols, and strides, are in ``key``."""
        return {self.symbols[k]: key[k] for k in (*self._positions, *self._strides)}

    def _choose(self, key: Key) -> Key | None:
        choices = [list(self._candidates(key[k])) if k in self._positions else [key[k]] for k in range(len(key))]
        if self._exact:
            for k in self._positions:
                choices[k] += [key[k]] if choices[k] else []
        tries = sorted(itertools.product(*(range(len(c)) for c in choices)), key=sum)
        for picks in tries:
            sizes = tuple(c[i] for c, i in zip(choices, picks, strict=True))
            for apart in self._apart:
                bucket = self._with_strides(key, sizes, apart)
                if bucket == key or self._allowed(bucket):
                    return bucket
        return key if self._exact and all(choices) else None  # beyond the ladder there is no end of sizes

    def _with_strides(self, key: Key, sizes: Key, apart: int) -> Key:
        if not self._strides:
            return sizes
        found = list(sizes)
        for k, stride in sorted(self._strides.items(), key=lambda item: key[item[0]]):  # inner dimensions first
            found[k] = stride(key, tuple(found)) + apart
        return tuple(found)

    def _allowed(self, sizes: Key) -> bool:
        if self._holds is None:
            self._holds = self._conditions()
        return self._holds(*sizes)

    def _candidates(self, size: int) -> Iterator[int]:
        at = bisect.bisect_left(self._ladder, size)
        for bucket in self._ladder[at : at + TRIED]:
            if bucket <= size * self._ratio:
                yield bucket


def conditions_of(
    shape_env: Any, symbols: Sequence[sympy.Symbol], dynamic: Collection[sympy.Symbol]
) -> Callable[..., bool]:
    """Whether values of ``symbols`` meet what the graph was traced under: Dynamo's guards and the sizes' ranges.

    A recording made for sizes that break them would be of another program.
    """
    known, dynamic = set(symbols), set(dynamic)
    texts = []
    for guard in getattr(shape_env, "guards", ()):
        free = getattr(guard.expr, "free_symbols", set())
        if free & dynamic and free <= known:
            texts.append(f"({code(guard.expr)})")  # what has no text is not known to hold: "None" is false
    for symbol in dynamic:
        limits = getattr(shape_env, "var_to_range", {}).get(symbol)
        if limits is not None and isinstance(limits.lower, sympy.Integer):
            texts.append(f"({symbol} >= {int(limits.lower)})")
        if limits is not None and isinstance(limits.upper, sympy.Integer):
            texts.append(f"({symbol} <= {int(limits.upper)})")
    return function_of(symbols, " and ".join(texts) or "True")
