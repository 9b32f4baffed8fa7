"""What a plan does between two replays: a cut's call, and where its results land."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .below_autograd import Exclusion
from .errors import ReplayError
from .extents import Compact
from .inputs import distinct_elements

Frame = list[Any]  # one call's arguments, followed by what its cuts hand on to other cuts and to the caller
Step = Callable[[Frame], None]


def cut_step(
    fn: Callable[..., Sequence[Any]],
    template: list[Any],
    holes: Sequence[tuple[int, int]],
    computed: Sequence[tuple[int, Callable[[Frame], Any]]],
    sinks: Sequence[Callable[[Any, Frame], None] | None],
    compacted: Sequence[tuple[int, Compact]] = (),
    pads: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> Step:
    """A step that calls a cut eagerly.

    Args:
        fn: the group's callable.
        template: its arguments; bound ones in place, None elsewhere.
        holes: (position, frame index) of arguments that come with each call.
        computed: (position, function of the frame) of sizes that aren't fixed by the key.
        sinks: what to do with each result; None drops it.
        compacted: (position, argument) of arguments that are copied to lie as the cut expects them.
        pads: as in `Binding`, of arguments that the cut may write.
    """
    landing = [(k, sink) for k, sink in enumerate(sinks) if sink is not None]

    def call(frame: Frame) -> None:
        args = template.copy()
        for position, index in holes:
            args[position] = frame[index]
        for position, compute in computed:
            args[position] = compute(frame)
        for position, argument in compacted:
            args[position] = argument.fetch()
        results = fn(*args)
        for position, argument in compacted:
            argument.store(args[position])
        for rows, last in pads:
            rows.copy_(last)
        for k, sink in landing:
            sink(results[k], frame)

    return call


def sole_step(
    call: Callable[[], Any], sinks: Sequence[Callable[[Any, Frame], None]], below: Exclusion | None = None
) -> Step | Below:
    """A step of one op whose arguments are all bound: ``call()``, whose result goes to the one sink, or to none.

    ``below``: what the op's call has no use for.
    """
    if not sinks:
        step: Step = lambda frame: call()  # noqa: E731
    else:
        (sink,) = sinks
        step = lambda frame: sink(call(), frame)  # noqa: E731
    return step if below is None else Below(step, below)


@dataclass(frozen=True)
class Below:
    """A step that may run with keys of the dispatcher excluded; see Note [Below autograd]."""

    step: Step
    exclusion: Exclusion

    def alone(self) -> Step:
        """The step with its exclusion around it."""
        step, exclusion = self.step, self.exclusion

        def call(frame: Frame) -> None:
            with exclusion():
                step(frame)

        return call


def no_cut(frame: Frame) -> None:
    """The step behind a last piece."""


def bound_steps(steps: Iterable[Step | Below]) -> tuple[list[Step], Exclusion | None]:
    """The steps as they are called, and what to exclude around all of them where they have that in common."""
    steps = list(steps)
    wanted = {step.exclusion if isinstance(step, Below) else None for step in steps if step is not no_cut}
    if len(wanted) == 1 and None not in wanted:
        return [step.step if isinstance(step, Below) else step for step in steps], wanted.pop()
    return [step.alone() if isinstance(step, Below) else step for step in steps], None


def into_slot(slot: int) -> Callable[[Any, Frame], None]:
    """A sink that hands a result on to later cuts and to the outputs."""

    def sink(value: Any, frame: Frame) -> None:
        frame[slot] = value

    return sink


def into_buffer(
    buffer: torch.Tensor, name: str, pads: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
) -> Callable[[Any, Frame], None]:
    """A sink that lands a result where the next recordings read it; no copy where the cut wrote it there itself.

    ``pads``: as in `Binding`.
    """
    address, shape = buffer.data_ptr(), buffer.shape
    repeats = [d for d, (n, s) in enumerate(zip(shape, buffer.stride(), strict=True)) if n > 1 and s == 0]

    def sink(value: torch.Tensor, frame: Frame) -> None:
        if value.data_ptr() == address and value.shape == shape and value.stride() == buffer.stride():
            return
        if value.shape != shape or value.dtype != buffer.dtype:
            raise ReplayError(
                f"cut result {name}: recorded as {tuple(shape)} {buffer.dtype}, now {tuple(value.shape)} "
                f"{value.dtype}; a cut must return the same shape and dtype for the same sizes"
            )
        if not repeats:
            buffer.copy_(value)
        elif any(value.stride(d) for d in repeats):
            raise ReplayError(
                f"cut result {name} repeated its elements when it was recorded (stride 0) and does not any more; "
                f"return the same kind of result every time"
            )
        else:
            distinct_elements(buffer).copy_(distinct_elements(value))
        for rows, last in pads:
            rows.copy_(last)

    return sink


def into_both(
    first: Callable[[Any, Frame], None], second: Callable[[Any, Frame], None]
) -> Callable[[Any, Frame], None]:
    """A sink for a result that recordings read and that the caller gets as it is."""

    def sink(value: Any, frame: Frame) -> None:
        first(value, frame)
        second(value, frame)

    return sink


def _steps(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1]


def expect_alias(view: torch.Tensor, name: str) -> Callable[[Any, Frame], None]:
    """A sink for a result that was ``view``, a view of the cut's input, when it was recorded, and must still be."""
    address, shape, stride, dtype = view.data_ptr(), view.shape, view.stride(), view.dtype

    def sink(value: torch.Tensor, frame: Frame) -> None:
        same = value.data_ptr() == address and value.shape == shape and value.dtype == dtype
        # The stride of a dimension of length 1 says nothing, and a recording's kernel may give it another.
        if not same or (value.stride() != stride and _steps(value) != _steps(view)):
            raise ReplayError(
                f"cut result {name} was a view of the cut's input when it was recorded and is not any more; "
                f"return the same kind of result every time, or name the op in cut_ops of a model of its own"
            )

    return sink
