"""Timings and their ratios as users read them, and as JSON keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .timing import Ratio, Timing

Say = Callable[[str], None]
WIDTH = 56


def say_timings(say: Say, heading: str, timings: Mapping[str, Timing]) -> None:
    """One line a row, under ``heading`` and what was measured."""
    one = next(iter(timings.values()))
    say(f"\n{heading}: medians of {one.samples} calls, run {one.run}")
    say(f"{'':{WIDTH}} {'host µs':>9} {'p90':>9} {'wall µs':>9} {'p90':>9}")
    for t in timings.values():
        say(f"{t.name:{WIDTH}} {t.host:9.1f} {t.host_p90:9.1f} {t.wall:9.1f} {t.wall_p90:9.1f}")


def say_ratios(
    say: Say, ratios: Iterable[tuple[Ratio, float | None]], of: Sequence[str] = ("host", "wall")
) -> list[dict[str, Any]]:
    """One line a ratio, with its target where it has one; returns them as plain values.

    Args:
        of: which times the targets are for.
    """
    say(f"{'ratios':{WIDTH + 34}} {'host':>6} {'wall':>6}  target of {' and '.join(of)}")
    plain = []
    for found, target in ratios:
        reached = all(getattr(found, what) <= target for what in of) if target else None
        verdict = "" if reached is None else f"  <= {target:.2f}: {'reached' if reached else 'missed'}"
        say(f"{found.name:{WIDTH + 34}} {found.host:6.2f} {found.wall:6.2f}{verdict}")
        plain.append({**found.as_dict(), "target": target, "reached": reached})
    return plain


def say_counts(say: Say, heading: str, counted: Mapping[str, Mapping[str, int]]) -> None:
    """One line a row of what each call does."""
    say(f"\n{heading}: what one call does; emulated, so no times")
    columns = list(next(iter(counted.values())))
    say(f"{'':{WIDTH}} " + " ".join(f"{column:>9}" for column in columns))
    for name, row in counted.items():
        say(f"{name:{WIDTH}} " + " ".join(f"{row[column]:9}" for column in columns))
