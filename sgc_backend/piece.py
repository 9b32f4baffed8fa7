"""Compile a group of nodes, or a graph left whole, with the inner compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from .alike import program
from .errors import OptionError
from .groups import PIECE, Group


def compile_group(group: Group, inner: str | Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A piece's callable: takes ``group.inputs`` in order, returns a tuple in the order of ``group.outputs``."""
    if inner == "eager":
        return group.gm.forward
    fakes = [_in_backend_mode(fake) for fake in group.fakes]
    if inner == "inductor":
        return _inductor(group.gm, fakes)
    return _flat(compile_whole(group.gm, fakes, inner))


def compile_pieces(groups: Sequence[Group], inner: str | Callable[..., Any]) -> list[Callable[..., tuple[Any, ...]]]:
    """The callables of ``groups``, cuts as they are; pieces that are the same program are compiled once."""
    made: dict[Hashable, Callable[..., tuple[Any, ...]]] = {}
    found = []
    for group in groups:
        if group.kind != PIECE:
            found.append(group.gm.forward)
            continue
        key = program(group) if inner in ("inductor", "aot_eager") else None
        compiled = made.get(key) if key is not None else None
        if compiled is None:
            compiled = compile_group(group, inner)
        if key is not None:
            made[key] = compiled
        found.append(compiled)
    return found


def _in_backend_mode(fake: Any) -> Any:
    """A wrapped number's fake in the mode that backends trace in, with the symbol that .item() of it gives.

    Dynamo gives backends a fake mode of their own; compilers move foreign fakes into it and lose that symbol on the
    way, after which .item() looks like a host sync.
    """
    symbol = getattr(fake, "item_memo", None)
    context = torch._guards.TracingContext.try_get()
    if symbol is None or context is None or context.fake_mode is None:
        return fake
    moved = context.fake_mode.from_tensor(fake)
    moved.item_memo = symbol
    return moved


def compile_whole(gm: fx.GraphModule, examples: Sequence[Any], inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """A graph that stays whole, by the inner compiler as torch.compile would call it; gradients included."""
    if inner == "eager":
        return gm.forward
    if callable(inner):
        compiled = inner(gm, list(examples))
        if not callable(compiled):
            raise OptionError(f"inner={inner!r} returned {compiled!r}; expected a callable, as Dynamo backends return")
        return compiled
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
