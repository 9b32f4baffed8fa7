"""A break as a recording replays it, bound to what it gets and to where its results go."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .below_autograd import Exclusion
from .errors import ReplayError, StrictError
from .settings import Entered
from .tree import flatten


class Ambient:
    """The modes around breaks when they were captured; entered where the replay's caller has others."""

    def __init__(self, device_type: str) -> None:
        self._types = sorted({device_type, "cpu"})
        self._modes = self._now()

    def _now(self) -> tuple[Any, ...]:
        autocast = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self._types]
        # Which dtype an autocast that is off would use is no matter.
        return torch.is_inference_mode_enabled(), *((on, dtype if on else None) for on, dtype in autocast)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ambient) and self._modes == other._modes

    __hash__ = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have these modes on, and no gradients, as in the capture."""
        inference, *autocast = self._modes
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            for kind, (enabled, dtype) in zip(self._types, autocast, strict=True):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.no_grad())
            yield

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run ``steps`` under these modes; where they are on already, at the price of a comparison."""
        if self._now() != self._modes:
            with self.entered():
                for step in steps:
                    step()
            return
        gradients = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # what torch.no_grad() does, without an object for it
            for step in steps:
                step()
        finally:
            torch._C._set_grad_enabled(gradients)


@dataclass
class BreakSegment:
    """One break, bound to what it gets and to where its results go.

    Attributes:
        name: what errors call it.
        fn: the body.
        given: its (args, kwargs), or what makes them: tensors of the pool lie where the segments before left them; what
            holds none of those is the caller's own object, as it is at replay.
        ambient: the modes that were on around it, where they differ from the recording's.
        spec: structure that its result must have.
        landings: for each leaf a function that takes it, or None for host values.
        frozen: the host values among the leaves as they were captured.
        strict: refuse a host value that changed.
        below: what a call of ``fn`` has no use for; see Note [Below autograd].
        settings: what has those of torch's settings on that the callable changed around it.
    """

    name: str
    fn: Callable[..., Any]
    given: Callable[[], tuple[Any, Any]] | tuple[Any, Any]
    ambient: Ambient | None
    spec: Any
    landings: list[Callable[[Any], None] | None]
    frozen: tuple[Any, ...]
    strict: bool
    below: Exclusion | None = None
    settings: Entered | None = None
    changed: bool = False

    def __post_init__(self) -> None:
        self.plain = self.spec.is_leaf()  # the result is no container
        self.silent = self.plain and self.landings == [None] and self.frozen == (None,)  # it is None

    def step(self) -> Callable[[], None]:
        """`replay` as a recording calls it; call once its modes are settled."""
        if self.below is None or self.ambient is not None or self.settings is not None:
            return self.replay
        if not self.silent or callable(self.given):
            return self.replay
        args, kwargs = self.given
        below, call = self.below, functools.partial(self.fn, *args, **kwargs)

        def replay() -> None:
            with below():
                call()
            if torch.is_grad_enabled():
                torch.set_grad_enabled(False)

        return replay

    def replay(self) -> None:
        """Call the body and put its results where the next segments read them.

        Raises:
            ReplayError: the result has another structure, shape or dtype than when it was captured.
            StrictError: strict, and a host value that was frozen changed.
            Exception: what the body raises.
        """
        given = self.given
        args, kwargs = given() if callable(given) else given
        if self.ambient is None and self.below is None and self.settings is None:
            result = self.fn(*args, **kwargs)
        else:
            with (
                contextlib.nullcontext() if self.ambient is None else self.ambient.entered(),
                contextlib.nullcontext() if self.settings is None else self.settings(),
                contextlib.nullcontext() if self.below is None else self.below(),
            ):
                result = self.fn(*args, **kwargs)
        if torch.is_grad_enabled():  # the body switched it on
            torch.set_grad_enabled(False)
        if result is not None or not self.silent:
            self._take(result)

    def _take(self, result: Any) -> None:
        if self.plain and (result is None or type(result) is torch.Tensor):
            leaves: Sequence[Any] = (result,)
        else:
            leaves, spec = flatten(result)
            if spec != self.spec:
                raise ReplayError(f"break {self.name} returned {spec}, when it was captured it returned {self.spec}")
        for leaf, landing, frozen in zip(leaves, self.landings, self.frozen, strict=True):
            if landing is not None:
                landing(leaf)
            elif not self.changed and not _same(leaf, frozen):
                self._host_value_changed(leaf, frozen)

    def _host_value_changed(self, now: Any, then: Any) -> None:
        text = (
            f"break {self.name} returned the host value {now!r:.200}; the recording goes on with {then!r:.200}, as "
            f"when it was captured. Return a tensor, or record one variant for each value"
        )
        if self.strict:
            raise StrictError(text)
        self.changed = True  # said once
        warnings.warn(text, stacklevel=2)


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b) or (a != a and b != b)  # NaN is not equal to itself
    except Exception:  # whatever can't be compared is taken to be the object that it was
        return False


def expecter(expected: torch.Tensor, name: str, what: str) -> Callable[[Any], None]:
    """A check that a result, which was ``what``, lies where it lay, read in the same way."""
    like = _likeness(expected)

    def expect(value: Any) -> None:
        if not isinstance(value, torch.Tensor) or _likeness(value) != like:
            raise ReplayError(
                f"break {name} returned {what} when it was captured and does not any more, or another part of it; "
                f"return the same every time, or a copy (.clone())"
            )

    return expect


def _likeness(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.size(), t.stride(), t.dtype, t.is_conj(), t.is_neg()


def lander(buffer: torch.Tensor, name: str) -> Callable[[Any], None]:
    """Copies a result to where the next segments read it."""

    def land(value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != buffer.shape or value.dtype != buffer.dtype:
            got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ReplayError(
                f"break {name} returned {got}, when it was captured it returned {tuple(buffer.shape)} {buffer.dtype}"
            )
        buffer.copy_(value)

    return land
