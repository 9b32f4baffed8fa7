"""Breaks: functions that a breakable capture runs eagerly, and what it knows of their results.

A break isn't executed while it is captured: what it returns is known from the warm-up run before, so no host work is
done on garbage and no state is written once too often.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import torch

from .errors import CaptureError, OptionError
from .tree import flatten, is_unrun, tensors_of
from .walk import describe


class Watcher(Protocol):
    """Who is told of breaks: the warm-up run, or the capture."""

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("breakable capture", default=None)
_captured: dict[int, tuple[str, Callable[[], Callable[[torch.Tensor], bool]]]] = {}  # see `captured`


def eager_on_graph(
    fn: Callable[..., Any] | None = None, *, capture_stub: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Mark a function as a break: in a breakable recording it is called eagerly at every replay.

    Use as ``@eager_on_graph`` or ``@eager_on_graph(capture_stub=...)``. Outside of a breakable capture the function
    runs as it is; inside another break it runs inline.

    It may return anything: tensors, nested containers, dataclasses, views of its arguments, its arguments written in
    place, None, host values. Fresh tensors are copied into stable buffers at replay; views and in-place results cost no
    copy, nor do tensors that it keeps (a cache), which must then lie where they lay. Host values are frozen when it is
    captured. It runs under autocast and inference mode as in the capture, and under those settings of torch and
    function modes that the callable itself puts up around it (default device and dtype, deterministic algorithms,
    kernels of attention, cuDNN's flags, precision of float32 and of sums).

    Args:
        fn: the function. An op of torch.library.custom_op may be marked itself, ``eager_on_graph(torch.ops.ns.op)``:
            it is then called without the kernels that torch puts in front of it for gradients.
        capture_stub: called in its place in both warm-up runs, with the same arguments; must return the same structure
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
            if _captured:
                _refuse_what_is_captured(call, args, kwargs)
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


@contextlib.contextmanager
def captured(name: str, contains: Callable[[], Callable[[torch.Tensor], bool]]) -> Iterator[None]:
    """While open, breaks that nobody watches refuse what ``contains()`` says to lie in a capture of ``name``.

    They run on another thread than the capture's, at once and on memory that nothing was written to.
    """
    token = object()
    _captured[id(token)] = name, contains
    try:
        yield
    finally:
        del _captured[id(token)]


def _refuse_what_is_captured(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = tensors_of((args, kwargs))
    for name, contains in list(_captured.values()):
        inside = contains()
        if any(inside(tensor) for tensor in given):
            raise CaptureError(
                f"{name}: break {getattr(fn, '__qualname__', fn)} is called on another thread, with a tensor that is "
                f"being captured; call it on the thread that called the callable, and let its body use other threads"
            )


@dataclasses.dataclass(frozen=True)
class External:
    """A result in memory that no argument reaches and that is the same every time: a cache of the body's own."""

    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Observed:
    """One break as the warm-up run saw it.

    Attributes:
        fn: the marked function.
        given: how many tensors its arguments held.
        leaves: its result, flat: tensors as `CutResult` or `External`, other values as they are.
        spec: how the leaves are nested.
    """

    fn: Callable[..., Any]
    given: int
    leaves: tuple[Any, ...]
    spec: Any


class Observer:
    """Runs breaks for real in the warm-up and writes down what they return.

    Args:
        before: the observer of the warm-up run before: a result that is the same object in both is not made anew.
    """

    def __init__(self, before: Observer | None = None) -> None:
        self.seen: list[Observed] = []
        self.results: list[list[Any]] = []  # held, so that no later result gets their memory
        self._views: list[tuple[int, int, torch.Tensor, int | None]] = []  # break, leaf, and its version when it came
        self.before = before.results if before is not None else []

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_of((args, kwargs))
        shapes = [_shape(t) for t in given]
        with watching(None):  # a break inside a break runs inline
            result = fn.stub(*args, **kwargs)  # type: ignore[attr-defined]
        if shapes != [_shape(t) for t in given]:
            raise CaptureError(
                f"break {getattr(fn, '__qualname__', fn)} changed the shape of its argument in place (unsqueeze_, t_, "
                f"resize_, ...), which neither later segments nor its next run could see; make a view instead"
            )
        leaves, spec = flatten(result)
        for leaf in leaves:
            _refuse_hidden_tensors(leaf, fn)
        position = len(self.seen)
        known = self.before[position] if position < len(self.before) else []
        tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
        described = iter(describe(given, tensors))
        noted: list[Any] = []
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                noted.append(leaf)
                continue
            entry = next(described)
            external = entry.alias is None and any(leaf is v for v in known)
            noted.append(External(leaf) if external else entry)
            if not external and entry.alias is None and any(_same_view(leaf, v) for v in known):
                self._views.append((position, k, leaf, _version(leaf)))
        self.seen.append(Observed(fn, len(given), tuple(noted), spec))
        self.results.append(leaves)
        return result

    def settled(self) -> list[Observed]:
        """What was seen, once the run is over.

        A new view of the same memory each time may move with what the host decides, so it is copied like a fresh
        result; but not where that memory was written behind the break, which must reach all who see it.
        """
        for position, k, view, version in self._views:
            if version is None or _version(view) != version:
                seen = self.seen[position]
                leaves = (*seen.leaves[:k], External(view), *seen.leaves[k + 1 :])
                self.seen[position] = dataclasses.replace(seen, leaves=leaves)
        return self.seen


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.shape,)
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _same_view(a: Any, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    seen, known = ((t.data_ptr(), t.size(), t.stride(), t.dtype) for t in (a, b))
    return a.numel() > 0 and seen == known


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # inference tensors count no writes


def _refuse_hidden_tensors(leaf: Any, fn: Callable[..., Any]) -> None:
    held = list(getattr(leaf, "__dict__", {}).values()) if not isinstance(leaf, (torch.Tensor, type)) else []
    if isinstance(leaf, (list, dict, set)):  # a subclass that is no pytree
        held = list(leaf.values()) if isinstance(leaf, dict) else list(leaf)
    if isinstance(leaf, Coroutine):
        leaf.close()  # or Python warns that nobody awaited it
    if is_unrun(leaf) or any(isinstance(v, torch.Tensor) for v in held):
        raise CaptureError(
            f"break {getattr(fn, '__qualname__', fn)} returns a {type(leaf).__name__}, "
            f"whose tensors can't be followed; return tensors, tuples, lists, dicts or dataclasses, "
            f"or register the class with torch.utils._pytree"
        )


def matched(observed: list[Observed], position: int, fn: Callable[..., Any], given: int, what: str) -> Observed:
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
        again = "; it was marked anew: mark it once, outside of the callable" if was == name else ""
        raise CaptureError(f"{what}: break {position} is {name}, in the warm-up run it was {was}{again}")
    if seen.given != given:
        raise CaptureError(
            f"{what}: break {position} ({name}) got {given} tensors, in the warm-up run it got {seen.given}; call it "
            f"with the same arguments every time"
        )
    return seen
