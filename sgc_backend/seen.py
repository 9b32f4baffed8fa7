"""What the calls of compiled graphs did while somebody watched: replayed, recorded, ran uncaptured, failed."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .buckets import Key
from .kept_plans import KeptPlans
from .plan import Plan


@dataclass(frozen=True)
class Replayed:
    """One replay as `calls_seen` saw it: the compiled graph, the plan, its arguments, outputs and real sizes."""

    graph: Any
    plan: Plan
    args: tuple[Any, ...]
    outputs: list[Any]
    sizes: Key | None  # the call's, where the plan is made for larger ones


@dataclass
class Seen:
    """What `calls_seen` collected.

    Attributes:
        replayed: replays.
        recorded: (kept plans, key, plan) of what was recorded.
        uncaptured: (graph, cause) of calls that ran uncaptured.
        failures: why captures failed.
        replaced: how many graphs gave place to another one that cuts an op more.
    """

    replayed: list[Replayed] = field(default_factory=list)
    recorded: list[tuple[KeptPlans, Key, Plan]] = field(default_factory=list)
    uncaptured: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    replaced: int = 0

    def undo(self) -> None:
        """Let go of what was recorded."""
        for kept, key, plan in self.recorded:
            kept.forget(key, plan, wasted=False)


seeing: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("calls seen", default=None)


@contextlib.contextmanager
def calls_seen() -> Iterator[Seen]:
    """Collect the calls of compiled graphs that this thread makes while open."""
    found = Seen()
    token = seeing.set(found)
    try:
        yield found
    finally:
        seeing.reset(token)
