"""Where the time of a call goes: in named parts, in the garbage collector, and in the functions that took the most."""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOP = 15
Functions = Sequence[tuple[str, str]]  # file without its ending, and name; "~" is the file of what is in C


@dataclass(frozen=True)
class Profile:
    """Seconds, under a profiler, which makes Python slower than it is and leaves the device as it is.

    Attributes:
        total: of the whole call.
        parts: by name; "rest" is what none of them took. Empty where ``lost``.
        lost: the interpreter's profiler did not see some calls return, as it may happen around Dynamo's frames, so that
            nothing is known of what calls took with all that they call.
        collecting: in the garbage collector, whatever part it fell into, in so many ``collections``.
        top: the functions that took the most by themselves: seconds, calls, and where.
    """

    total: float
    parts: dict[str, float]
    lost: bool
    collecting: float
    collections: int
    top: list[tuple[float, int, str]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def say(self, say: Callable[[str], None]) -> None:
        """Print it."""
        say(f"under a profiler {self.total:.2f} s, of which")
        if self.lost:
            say("  this interpreter's profiler lost calls: no parts can be told")
        for name, seconds in self.parts.items():
            say(f"  {name:56} {seconds:8.3f} s {seconds / self.total:6.1%}")
        say(f"  in all of them: {self.collecting:.3f} s in {self.collections} garbage collections")
        say(f"  the {len(self.top)} functions that took the most by themselves")
        for seconds, calls, where in self.top:
            say(f"  {seconds:8.3f} s {calls:8} calls  {where}")


def profiled(call: Callable[[], Any], parts: Mapping[str, tuple[Functions, Functions]]) -> Profile:
    """Call ``call`` once under cProfile.

    Args:
        parts: by name, the functions whose time with all that they call is the part, and those inside of them that are
            other parts and are taken off. Of functions that have one name in one file, the slowest counts: the others
            are those that it calls.
    """
    pauses: list[float] = []

    def collector(phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        pauses.append(-now if phase == "start" else now)

    profile = cProfile.Profile()
    gc.callbacks.append(collector)
    begin = time.perf_counter()
    try:
        profile.runcall(call)
    finally:
        total = time.perf_counter() - begin
        gc.callbacks.remove(collector)
    found: dict[tuple[str, str], float] = {}
    rows, lost = [], False
    for (file, line, name), (_, calls, own, cumulative, _) in pstats.Stats(profile).stats.items():
        key = (Path(file).stem, name)
        found[key] = max(found.get(key, 0.0), cumulative)
        lost |= cumulative < own - 1e-6
        rows.append((own, calls, name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"))

    def taken(functions: Functions) -> float:
        return sum(found.get(function, 0.0) for function in functions)

    split = {name: max(0.0, taken(whole) - taken(less)) for name, (whole, less) in parts.items()}
    split["rest"] = max(0.0, total - sum(split.values()))
    if lost:
        split = {}
    complete = pauses[: len(pauses) // 2 * 2]
    return Profile(total, split, lost, sum(complete), len(complete) // 2, sorted(rows, reverse=True)[:TOP])
