"""A cut of a recording, bound to what the pieces around it left: what makes its step for real sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .below_autograd import Exclusion
from .extents import Compact, Geometry, lies_as, prefix
from .groups import Group
from .plan import Real
from .recording import pad_copies
from .sole_call import sole_call
from .steps import Below, Frame, Step, cut_step, sole_step


class CutSteps:
    """Makes a cut's step. Slots, and what is empty or the same for all cuts is shared: a graph's recordings have
    thousands of these, and the garbage collector goes through all that they consist of.

    Args:
        group, fn: the cut, and its callable.
        template: its arguments; bound ones in place, None elsewhere.
        holes, computed: as `cut_step` takes them.
        resized: positions of bound arguments that have other sizes in the bucket.
        wide: geometry in the bucket, by name.
        sinks: for each result what makes its sink.
        below: what a call of its only op has no use for.
    """

    __slots__ = ("_below", "_computed", "_fn", "_group", "_holes", "_resized", "_sinks", "_template", "_wide")

    def __init__(
        self,
        group: Group,
        fn: Callable[..., Any],
        template: list[Any],
        holes: Sequence[tuple[int, int]],
        computed: Sequence[tuple[int, Callable[[Frame], Any]]],
        resized: Sequence[int],
        wide: Mapping[str, Geometry],
        sinks: Sequence[Callable[[Real], Callable[[Any, Frame], None]]],
        below: Exclusion | None,
    ) -> None:
        self._group, self._fn, self._template, self._wide, self._below = group, fn, template, wide, below
        self._holes, self._computed = tuple(holes), tuple(computed)
        self._resized, self._sinks = tuple(resized), tuple(sinks)

    def __call__(self, real: Real) -> Step | Below:
        group, template, compacted, pads = self._group, self._template, [], []
        given = template.copy()
        for position in self._resized:
            name = group.inputs[position].name
            here, wide = real[name], self._wide[name]
            if group.mutates:
                pads.extend(pad_copies(template[position], here, wide))
            if lies_as(here, wide):
                given[position] = prefix(template[position], here, wide)
            else:
                compacted.append((position, Compact(template[position], here, wide, written=group.mutates)))
        landing = [sink(real) for sink in self._sinks]
        if not (self._holes or self._computed or compacted or pads):
            call = sole_call(group.gm, given)
            if call is not None and self._fn == group.gm.forward:
                return sole_step(call, landing, self._below)
        return cut_step(self._fn, given, self._holes, self._computed, landing, compacted, pads)
