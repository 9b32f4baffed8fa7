"""Breaks: functions that a breakable capture runs eagerly, and what it knows of their results.

A break isn't executed while it is captured: what it returns is known from the warm-up run before, so no host work is
done on garbage and no state is written once too often.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from .errors import CaptureError, OptionError
from .walk import CutResult, describe


class Watcher(Protocol):
    """Who is told of breaks: the warm-up run, or the capture."""

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("breakable capture", default=None)


def eager_on_graph(
    fn: Callable[..., Any] | None = None, *, capture_stub: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Mark a function as a break: in a breakable recording it is called eagerly at every replay.

    Use as ``@eager_on_graph`` or ``@eager_on_graph(capture_stub=...)``. Outside of a breakable capture the function
    runs as it is; inside another break it runs inline.

    It may return anything: tensors, nested containers, dataclasses, views of its arguments, its arguments written in
    place, None, host values. Fresh tensors are copied into stable buffers at replay; views and in-place results cost no
    copy. Host values are frozen when it is captured.

    Args:
        fn: the function.
        capture_stub: called in its place in the warm-up runs, with the same arguments; must return the same structure
            with tensors of the same shape and dtype. For a body that is expensive or must not run on warm-up data.

    Raises:
        OptionError: ``fn`` or ``capture_stub`` is no callable.
    """
    if fn is None:
        return functools.partial(eager_on_graph, capture_stub=capture_stub)
    for what, given in (("fn", fn), ("capture_stub", capture_stub)):
        if not callable(given) and (what == "fn" or given is not None):
            raise OptionError(f"eager_on_graph: {what} must be a callable, got {type(given).__name__}")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.get()
        if watcher is None:
            return fn(*args, **kwargs)
        return watcher.on_break(call, args, kwargs)

    call.body, call.stub = fn, capture_stub or fn  # type: ignore[attr-defined]
    return call


@eager_on_graph
def break_graph() -> None:
    """End the graph segment here and begin another: host work between the two is done by no one at replay.

    Use it to let work of other streams, queued between replays, come in between.
    """


class watching:
    """While open, breaks of this thread are told to ``watcher``; None: they run inline."""

    def __init__(self, watcher: Watcher | None) -> None:
        self.watcher = watcher

    def __enter__(self) -> None:
        self._token = _watcher.set(self.watcher)

    def __exit__(self, *_: Any) -> None:
        _watcher.reset(self._token)


@dataclasses.dataclass(frozen=True)
class Observed:
    """One break as the warm-up run saw it.

    Attributes:
        fn: the marked function.
        leaves: its result, flat: tensors as `CutResult`, other values as they are.
        spec: how the leaves are nested.
    """

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Any


class Observer:
    """Runs breaks for real in the warm-up and writes down what they return."""

    def __init__(self) -> None:
        self.seen: list[Observed] = []

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with watching(None):  # a break inside a break runs inline
            result = fn.stub(*args, **kwargs)  # type: ignore[attr-defined]
        leaves, spec = flatten(result)
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        described = iter(describe(tensors_of((args, kwargs)), tensors))
        self.seen.append(
            Observed(fn, tuple(next(described) if isinstance(v, torch.Tensor) else v for v in leaves), spec)
        )
        return result


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a pytree in which dataclasses count as containers, whether registered or not."""
    return pytree.tree_flatten(_opened(tree))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of `flatten`."""
    return _closed(pytree.tree_unflatten(leaves, spec))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor in ``tree``, in order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to each tensor."""
    leaves, spec = flatten(tree)
    return unflatten([fn(v) if isinstance(v, torch.Tensor) else v for v in leaves], spec)


class _Opened(tuple):
    """A dataclass instance as (class, fields) on its way through a pytree."""


pytree.register_pytree_node(
    _Opened,
    lambda opened: (list(opened[1].values()), (opened[0], tuple(opened[1]))),
    lambda values, context: _Opened((context[0], dict(zip(context[1], values, strict=True)))),
    serialized_type_name="sgc_backend.breaks._Opened",
)


def _opened(tree: Any) -> Any:
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and type(tree) not in pytree.SUPPORTED_NODES:
        return _Opened((type(tree), {f.name: _opened(getattr(tree, f.name)) for f in dataclasses.fields(tree)}))
    return _map_children(_opened, tree)


def _closed(tree: Any) -> Any:
    if isinstance(tree, _Opened):
        made = object.__new__(tree[0])
        for name, value in tree[1].items():
            object.__setattr__(made, name, _closed(value))
        return made
    return _map_children(_closed, tree)


def _map_children(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple):
        values = [fn(v) for v in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if type(tree) is list:
        return [fn(v) for v in tree]
    if isinstance(tree, dict) and type(tree) in pytree.SUPPORTED_NODES:
        copied = tree.copy()
        copied.update((k, fn(v)) for k, v in tree.items())
        return copied
    return tree


def matched(observed: list[Observed], position: int, fn: Callable[..., Any], what: str) -> Observed:
    """The break that the warm-up saw at ``position``, which must be of ``fn``.

    Raises:
        CaptureError: the capture breaks elsewhere than the warm-up did.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if position >= len(observed):
        raise CaptureError(
            f"{what}: break {position} ({name}) was not there in the warm-up run, which had {len(observed)} breaks; "
            f"the callable must break at the same places every time"
        )
    seen = observed[position]
    if seen.fn is not fn:
        was = getattr(seen.fn, "__qualname__", repr(seen.fn))
        raise CaptureError(f"{what}: break {position} is {name}, in the warm-up run it was {was}")
    return seen


def results(seen: Observed) -> Iterator[tuple[int, CutResult]]:
    """(position, description) of each tensor among a break's leaves."""
    return ((k, leaf) for k, leaf in enumerate(seen.leaves) if isinstance(leaf, CutResult))
