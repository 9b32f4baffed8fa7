"""Run a split graph's compiled groups one after the other, uncaptured, and watch what its cuts return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .groups import CUT, Group, HostRef, Ref, Split
from .inputs import is_dense
from .symbols import Symbols


@dataclass(frozen=True)
class CutResult:
    """What a cut returned under one key.

    Attributes:
        size, stride, dtype: of a tensor; None where the result isn't one.
        alias: (position of the argument whose memory it lies in, byte offset to that argument), or None.
        sibling: (index of an earlier result over the same storage, byte offset to it), or None.
        bits: (is_conj, is_neg): a view that is read with another sign.
        fills: it takes all of its storage, so that a copy of it is a copy of that.
    """

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    alias: tuple[int, int] | None = None
    sibling: tuple[int, int] | None = None
    bits: tuple[bool, bool] = (False, False)
    fills: bool = field(default=False, compare=False)


class Walk:
    """The uncaptured way through a split graph."""

    def __init__(
        self, split: Split, compiled: Sequence[Callable[..., Any]], symbols: Symbols, inputs: Sequence[str]
    ) -> None:
        self.split, self.compiled, self.symbols, self.inputs = split, compiled, symbols, inputs
        self._last_use = _last_uses(split)

    def run(
        self,
        args: Sequence[Any],
        observe: dict[str, CutResult] | None = None,
        around: Callable[[Group, Callable[..., Any], list[Any]], Any] | None = None,
    ) -> list[Any]:
        """The outputs for ``args``; with ``observe``, also what each cut returned, by name; with ``around``, pieces are
        called by it."""
        env: dict[str, Any] = dict(zip(self.inputs, args, strict=True))
        args = self.symbols.as_called(args)
        for group, fn in zip(self.split.groups, self.compiled, strict=True):
            given = [env[ref.name] if type(ref) is Ref else self._number(ref, args) for ref in group.inputs]
            results = fn(*given) if around is None or group.kind == CUT else around(group, fn, given)
            if observe is not None and group.kind == CUT and group.outputs:
                roots = self.split.roots
                names = [ref.name if isinstance(ref, Ref) else "" for ref in group.inputs]
                sources = [roots.get(name, frozenset()) for name in names]
                described = describe(given, results, sources, [roots[name] for name in group.outputs])
                observe.update(zip(group.outputs, described, strict=True))
            env.update(zip(group.outputs, results, strict=True))
            del given, results  # or this group's values would live through the next one
            for name in self._last_use.get(group.index, ()):
                env.pop(name, None)  # a long model's intermediates must not all live to its end
        return [self._output(out, env, args) for out in self.split.outputs]

    def _number(self, ref: HostRef, args: Sequence[Any]) -> Any:
        return self.symbols.evaluate(ref.expr, args, ref.kind)

    def _output(self, out: Any, env: dict[str, Any], args: Sequence[Any]) -> Any:
        def value(v: Any) -> Any:
            if isinstance(v, Ref):
                return env[v.name]
            return self._number(v, args) if isinstance(v, HostRef) else v

        return pytree.tree_map(value, out, is_leaf=lambda v: isinstance(v, (Ref, HostRef)))


def _last_uses(split: Split) -> dict[int, list[str]]:
    kept = {out.name for out in split.outputs if isinstance(out, Ref)}
    uses: dict[int, list[str]] = {}
    for name, index in split.last_uses.items():
        if name not in kept:
            uses.setdefault(index, []).append(name)
    return uses


def describe(
    given: Sequence[Any],
    results: Sequence[Any],
    given_roots: Sequence[frozenset[str]] | None = None,
    result_roots: Sequence[frozenset[str]] | None = None,
) -> list[CutResult]:
    """What ``results`` are, and which of ``given`` or of one another they lie in.

    Two inputs of one call may happen to share a storage, and not share it in the next. So where the roots of values are
    known (the graph's inputs that they are views of), a result lies in what has a root in common with it, or, as it
    has none, has none either.
    """
    given_roots = given_roots or [frozenset()] * len(given)
    result_roots = result_roots or [frozenset()] * len(results)
    described: list[CutResult] = []
    for position, (value, roots) in enumerate(zip(results, result_roots, strict=True)):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            described.append(CutResult())
            continue
        alike = [_related(roots, other) for other in given_roots]
        siblings = [_related(roots, other) for other in result_roots[:position]]
        described.append(
            CutResult(
                tuple(value.size()),
                tuple(value.stride()),
                value.dtype,
                # An op may return its argument although it says that it makes something new.
                _over(value, given, alike) or _over(value, given, [not known for known in alike]),
                _over(value, results[:position], siblings),
                (value.is_conj(), value.is_neg()),
                is_dense(value.size(), value.stride())
                and value.numel() * value.element_size() == value.untyped_storage().nbytes(),
            )
        )
    return described


def _related(one: frozenset[str], other: frozenset[str]) -> bool:
    return bool(one & other) or not (one or other)


def _over(value: torch.Tensor, others: Sequence[Any], asked: Sequence[bool]) -> tuple[int, int] | None:
    """The first of those ``others`` that are asked about whose storage ``value`` lies in, and the byte offset to it.

    An empty one says nothing: it has no address that another call's could be measured from.
    """
    storage = value.untyped_storage().data_ptr()
    if storage == 0:
        return None
    for index, other in enumerate(others):
        if not asked[index] or not isinstance(other, torch.Tensor) or other.layout is not torch.strided:
            continue
        if other.numel() and other.device == value.device and other.untyped_storage().data_ptr() == storage:
            return index, _address(value) - _address(other)
    return None


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor's first element, or where it would be: data_ptr() of an empty tensor is 0."""
    return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
