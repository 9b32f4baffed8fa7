"""Time calls side by side: host time until a call returns, wall time until the device is done; medians in µs.

Every round runs each call some times in a row, as a serving loop does, each from an idle device, and takes the calls in
an order of its own. Whatever changes while it is measured (clocks, other load) so changes all rows alike. The first
in a row, which find the caches full of another call's data, don't count. Rows can be compared where they come from one
such run, and only there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ROUNDS, WARM_UP = 60, 4
IN_A_ROW, SETTLE = 5, 2

_runs = itertools.count(1)


@dataclass(frozen=True)
class Timing:
    """One row.

    Attributes:
        run: which run measured it, a number of this process's.
        samples: how many calls.
        host, wall: medians in µs.
        host_p90, wall_p90: what nine calls in ten stayed below, in µs.
    """

    name: str
    run: int
    samples: int
    host: float
    wall: float
    host_p90: float
    wall_p90: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Ratio:
    """A row's host and wall time over those of its floor."""

    name: str
    host: float
    wall: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Sweep:
    """What calls of many sizes took.

    Attributes:
        samples: how many calls.
        host_p50, host_p99, wall_p50, wall_p99: half of the calls, and 99 in 100, stayed below; in µs.
    """

    samples: int
    host_p50: float
    host_p99: float
    wall_p50: float
    wall_p99: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure(
    calls: Mapping[str, Callable[[], Any]],
    synchronize: Callable[[], None],
    *,
    rounds: int = ROUNDS,
    warm_up: int = WARM_UP,
    in_a_row: int = IN_A_ROW,
    settle: int = SETTLE,
) -> dict[str, Timing]:
    """Time ``calls`` in one run; rows in the order of ``calls``.

    Args:
        synchronize: waits for the device.
        rounds, warm_up: rounds that count, and rounds before them that don't.
        in_a_row, settle: calls of a row in a round that count, and calls before them that don't.

    Raises:
        ValueError: ``rounds`` or ``in_a_row`` is below 1.
    """
    if min(rounds, in_a_row) < 1:
        raise ValueError(f"rounds and in_a_row must be 1 or more, got {rounds} and {in_a_row}")
    run, order, shuffle = next(_runs), list(calls), random.Random(0).shuffle
    host: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    with no_collections():
        for number in range(-warm_up, rounds):
            shuffle(order)
            for name in order:
                call = calls[name]
                for place in range(-settle, in_a_row):
                    took = _timed(call, synchronize)
                    if number >= 0 and place >= 0:
                        host[name].append(took[0])
                        wall[name].append(took[1])
    return {
        name: Timing(
            name,
            run,
            len(host[name]),
            statistics.median(host[name]),
            statistics.median(wall[name]),
            _below(host[name], 90),
            _below(wall[name], 90),
        )
        for name in calls
    }


def sweep(call: Callable[[int], Any], sizes: Sequence[int], synchronize: Callable[[], None], *, passes: int) -> Sweep:
    """Time ``call`` of each of ``sizes`` once in a pass, in an order of each pass's own, from an idle device.

    Raises:
        ValueError: no size, or ``passes`` is below 1.
    """
    if not sizes or passes < 1:
        raise ValueError(f"a sweep needs a size and a pass, got {len(sizes)} sizes and {passes} passes")
    order, shuffle = list(sizes), random.Random(0).shuffle
    host, wall = [], []
    with no_collections():
        for _ in range(passes):
            shuffle(order)
            for n in order:
                took = _timed(lambda n=n: call(n), synchronize)
                host.append(took[0])
                wall.append(took[1])
    return Sweep(len(host), _below(host, 50), _below(host, 99), _below(wall, 50), _below(wall, 99))


def ratio(row: Timing, *floor: Timing) -> Ratio:
    """``row`` over the sum of the rows of its floor.

    Raises:
        ValueError: no floor, or the rows were not measured in one run.
    """
    _in_one_run(row, floor)
    under = " + ".join(f.name for f in floor)
    name = f"{row.name} / ({under})" if len(floor) > 1 else f"{row.name} / {under}"
    return Ratio(name, row.host / sum(f.host for f in floor), row.wall / sum(f.wall for f in floor))


def slope(
    name: str, rows: tuple[Timing, Timing], floors: tuple[Sequence[Timing], Sequence[Timing]], *, steps: int
) -> tuple[Ratio, dict[str, float]]:
    """What a step more costs over what it costs in the floor.

    Args:
        name: of the ratio.
        rows: with few steps, and with ``steps`` more.
        floors: the rows of each one's floor, which are added up.

    Returns:
        The ratio, and host and wall time of a step in µs: of ours, and of the floor.

    Raises:
        ValueError: no floor, ``steps`` below 1, or the rows were not measured in one run.
    """
    if steps < 1:
        raise ValueError(f"{name}: steps must be 1 or more, got {steps}")
    _in_one_run(rows[0], (rows[1], *floors[0], *floors[1]))
    if not all(floors):
        raise ValueError(f"{name} needs floors of one row or more, got none")

    def step(what: str) -> tuple[float, float]:
        few, many = (sum(getattr(f, what) for f in floor) for floor in floors)
        return (getattr(rows[1], what) - getattr(rows[0], what)) / steps, (many - few) / steps

    (host, bare_host), (wall, bare_wall) = step("host"), step("wall")
    # noise can make a floor's difference vanish, and then the ratio says nothing
    found = Ratio(name, *(a / b if b > 0 else math.nan for a, b in ((host, bare_host), (wall, bare_wall))))
    return found, {"host": host, "wall": wall, "floor host": bare_host, "floor wall": bare_wall}


def _in_one_run(row: Timing, floor: Sequence[Timing]) -> None:
    if not floor:
        raise ValueError(f"a ratio of {row.name} needs a floor of one row or more, got none")
    others = [f"{f.name} (run {f.run})" for f in floor if f.run != row.run]
    if others:
        raise ValueError(
            f"{row.name} was measured in run {row.run}, its floor in another: {', '.join(others)}; pass all of them to "
            f"one measure() call"
        )


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect garbage now, and not while open."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _timed(call: Callable[[], Any], synchronize: Callable[[], None]) -> tuple[float, float]:
    """Host and wall time of one call from an idle device, in µs."""
    synchronize()
    begin = time.perf_counter_ns()
    result = call()
    returned = time.perf_counter_ns()
    synchronize()
    done = time.perf_counter_ns()
    del result  # here, or it would be freed while the next call is timed
    return (returned - begin) / 1e3, (done - begin) / 1e3


def _below(values: list[float], share: int) -> float:
    """What ``share`` in 100 of ``values`` stay below."""
    return sorted(values)[min(len(values) - 1, len(values) * share // 100)]
