"""Compile a group of nodes, or a graph left whole, with the inner compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .split import Group


def compile_group(group: Group, inner: str | Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A piece's callable: takes ``group.inputs`` in order, returns a tuple in the order of ``group.outputs``."""
    if inner == "eager":
        return group.gm.forward
    if inner == "inductor":
        return _inductor(group.gm, group.fakes)
    return _flat(compile_whole(group.gm, group.fakes, inner))


def compile_whole(gm: fx.GraphModule, examples: Sequence[Any], inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """A graph that stays whole, by the inner compiler as torch.compile would call it; gradients included."""
    if inner == "eager":
        return gm.forward
    if callable(inner):
        return inner(gm, list(examples))
    from torch._dynamo.backends.registry import (
        lookup_backend,  # torch._dynamo is loaded by now; we are its backend
    )

    return lookup_backend(inner)(gm, list(examples))


def _inductor(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    from torch._inductor import standalone_compile

    return _flat(standalone_compile(gm, list(fakes), dynamic_shapes="from_tracing_context"))


def _flat(fn: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        out = fn(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    return call
