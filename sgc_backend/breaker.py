"""Splits a breakable capture at the breaks that it meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .below_autograd import Exclusion, exclusion, overload_of, plain_call
from .breaks import External, Observed, matched
from .capture import Capture, unowned_like, with_bits
from .errors import CaptureError
from .inputs import has_overlap, span_bytes
from .segments import Ambient, BreakSegment, expecter, lander
from .settings import Settings
from .tree import flatten, hidden_tensors, tensors_of, unflatten
from .walk import CutResult


class Breaker:
    """Splits a capture at the breaks that it meets."""

    def __init__(self, capture: Capture, observed: list[Observed], strict: bool) -> None:
        self.capture, self.observed, self.strict = capture, observed, strict
        self.pool = capture.pool
        self.segments: list[Any] = []
        self.breaks = 0
        self.error: BaseException | None = None
        self._settings = Settings()  # around the callable
        self._begin()

    def on_break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._break(fn, args, kwargs)
        except BaseException as error:
            self.error = error  # the callable may swallow it, but the recording is broken
            raise

    def _break(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.error is not None:
            raise self.error
        what = f"{self.capture.name}, key {self.capture.key}"
        name = f"{self.breaks} ({getattr(fn, '__qualname__', fn)})"
        if self.pool.device.current_stream() != self.pool.stream:
            raise CaptureError(f"{what}: break {name} is on another stream than the capture; join that one first")
        given = tensors_of((args, kwargs))
        seen = matched(self.observed, self.breaks, fn, len(given), what)
        self._end()
        self.breaks += 1
        tensors, landings = self._results(seen, given, name)
        leaves = [tensors.get(k, leaf) for k, leaf in enumerate(seen.leaves)]
        body = plain_call(fn.body)  # type: ignore[attr-defined]
        segment = BreakSegment(
            name,
            body,
            self._bound(args, kwargs, name),
            Ambient(self.pool.device.type),
            seen.spec,
            [landings.get(k) for k in range(len(leaves))],
            seen.leaves,
            self.strict,
            self._below(body, args, kwargs),
            Settings().changed_since(self._settings),
        )
        self.segments.append(segment)
        self._begin()
        return unflatten(leaves, seen.spec)

    def shared_ambient(self) -> Ambient:
        """The modes to replay under: the first break's. Breaks under the same ones need not switch."""
        breaks = [s for s in self.segments if isinstance(s, BreakSegment)]
        shared = breaks[0].ambient if breaks else None
        if shared is None:
            return Ambient(self.pool.device.type)
        for segment in breaks:
            if segment.ambient == shared:
                segment.ambient = None
        return shared

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Callable[[], tuple[Any, Any]] | tuple[Any, Any]:
        """A break's arguments at replay, or what makes them where a container must be new each time.

        What lies in the pool has just been written when the break runs, so it is not held; what lies elsewhere is the
        caller's, and is.

        Raises:
            CaptureError: an argument hides tensors of the pool in an object that is no pytree.
        """
        inside = self.pool.contains()

        containers = False

        def binder(value: Any) -> Callable[[], Any]:
            nonlocal containers
            leaves, spec = flatten(value)
            for leaf in leaves:
                if any(inside(t) for t in hidden_tensors(leaf)):
                    raise CaptureError(
                        f"{self.capture.name}, key {self.capture.key}: break {name} is given a "
                        f"{type(leaf).__name__}, whose tensors can't be followed, and one of them was made by the "
                        f"segments before: a replay would find whatever was put there last. Pass the tensor itself, "
                        f"or a dataclass, or register the class with torch.utils._pytree"
                    )
            if not any(isinstance(v, torch.Tensor) and inside(v) for v in leaves):
                return lambda: value
            leaves = [
                unowned_like(self.pool.device, v) if isinstance(v, torch.Tensor) and inside(v) else v for v in leaves
            ]
            if spec.is_leaf():
                return lambda: leaves[0]
            containers = True
            return lambda: unflatten(list(leaves), spec)

        positional = [binder(v) for v in args]
        named = {k: binder(v) for k, v in kwargs.items()}
        if not containers:
            return tuple(make() for make in positional), {k: make() for k, make in named.items()}
        return lambda: ([make() for make in positional], {k: make() for k, make in named.items()})

    def _below(self, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exclusion | None:
        """What a call of ``body`` has no use for, where that is an op: breaks run without gradients."""
        target = overload_of(body)
        if not isinstance(target, torch._ops.OpOverload):
            return None
        formal = target._schema.arguments
        given = {a.name: value for a, value in zip(formal, args, strict=False)} | kwargs
        written = [given.get(a.name) for a in formal if a.alias_info is not None and a.alias_info.is_write]
        inside = self.pool.contains()
        return exclusion(target, tensors_of((args, kwargs)), counted=not all(map(inside, tensors_of(written))))

    def finish(self) -> None:
        """End the last segment.

        Raises:
            CaptureError: breaks of the warm-up run did not come.
            BaseException: what a break raised and the callable swallowed.
        """
        if self.error is not None:
            raise self.error
        self._end()
        if self.breaks != len(self.observed):
            raise CaptureError(
                f"{self.capture.name}, key {self.capture.key}: {self.breaks} breaks were captured, the warm-up run had "
                f"{len(self.observed)}; the callable must break at the same places every time"
            )

    def _begin(self) -> None:
        self.capture.begin(f"segment {len(self.segments)}")

    def _end(self) -> None:
        graph = self.capture.end(drop_empty=True)
        if graph is not None:
            self.segments.append(graph)

    def _results(
        self, seen: Observed, given: list[torch.Tensor], name: str
    ) -> tuple[dict[int, torch.Tensor], dict[int, Callable[[Any], None]]]:
        """By leaf: tensors that stand for the results while the capture goes on, and what to do with the real ones."""
        positions = [k for k, leaf in enumerate(seen.leaves) if isinstance(leaf, (CutResult, External))]
        tensors: dict[int, torch.Tensor] = {}
        landings: dict[int, Callable[[Any], None]] = {}
        buffers = self._buffers([seen.leaves[k] for k in positions], name)
        for index, k in enumerate(positions):
            leaf = seen.leaves[k]
            if isinstance(leaf, External):
                tensors[k] = leaf.tensor
            elif leaf.alias is not None:
                tensors[k] = _view(given[leaf.alias[0]], leaf.alias[1], leaf)
            else:
                tensors[k] = buffers[index]
                landings[k] = lander(unowned_like(self.pool.device, buffers[index]), name)
                continue
            kept = "memory that it keeps" if isinstance(leaf, External) else "a view of its argument"
            landings[k] = expecter(tensors[k], name, kept)
        return tensors, landings

    def _buffers(self, leaves: list[Any], name: str) -> dict[int, torch.Tensor]:
        """Stable memory for fresh results: those over one storage lie in one buffer, as they did."""
        families: dict[int, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, External) or leaf.alias is not None:
                continue
            if leaf.size is None:
                raise CaptureError(f"break {name} returns a tensor that is not strided; return a dense one")
            families.setdefault(leaf.sibling[0] if leaf.sibling else index, []).append(index)
        made: dict[int, torch.Tensor] = {}
        for members in families.values():
            if len(members) == 1:
                (index,) = members
                seen = leaves[index]
                stride = seen.stride
                if has_overlap(seen.size, stride) or 0 in stride:
                    stride = torch.empty(seen.size, device="meta").stride()
                made[index] = self._allocate(seen.size, stride, seen.dtype)
                continue
            offsets = {i: leaves[i].sibling[1] if leaves[i].sibling else 0 for i in members}
            start = min(offsets.values())
            end = max(offsets[i] + span_bytes(leaves[i].size, leaves[i].stride, leaves[i].dtype) for i in members)
            whole = self._allocate((end - start,), (1,), torch.uint8)
            for index in members:
                same = [i for i in members if i in made and offsets[i] == offsets[index] and leaves[i] == leaves[index]]
                made[index] = made[same[0]] if same else _view(whole, offsets[index] - start, leaves[index])
        return made

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with self.pool.allocating(), torch.inference_mode(False):
            return torch.empty_strided(size, stride, dtype=dtype, device=self.pool.device.torch_device)


def _view(base: torch.Tensor, offset: int, seen: CutResult) -> torch.Tensor:
    """The view of ``base`` at a byte offset that ``seen`` describes; ``base`` itself where it is just that."""
    bits = (base.is_conj(), base.is_neg())
    like = (tuple(base.size()), tuple(base.stride()), base.dtype, bits)
    if offset == 0 and like == (seen.size, seen.stride, seen.dtype, seen.bits):
        return base
    at = base.storage_offset() * base.element_size() + offset
    # Over the same storage, so that the view keeps the memory from being used again while it lives.
    view = torch.empty(0, dtype=seen.dtype, device=base.device)
    view = view.set_(base.untyped_storage(), at // seen.dtype.itemsize, seen.size, seen.stride)
    return with_bits(view, *seen.bits)
