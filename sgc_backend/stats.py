"""Counters: how often each thing was replayed or ran uncaptured, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """What one compiled graph or wrapper did.

    Attributes:
        replayed: replays by key; of wrappers a ShapeKey, or the size where there is no variant.
        captured: recordings made by key; more than 1 means that a key was recorded again.
        uncaptured: calls that ran compiled or eager instead, by cause.
        failures: captures that failed, by cause.
        uncompiled: pieces that run eagerly inside of recordings and calls, by why the inner compiler can't take them.
        evicted: recordings given up for want of use, by key, to make room under ``max_recordings``.
    """

    replayed: Counter[Any] = field(default_factory=Counter)
    captured: Counter[Any] = field(default_factory=Counter)
    uncaptured: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    uncompiled: Counter[str] = field(default_factory=Counter)
    evicted: Counter[Any] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """A copy with plain types, for JSON."""
        return {
            "replayed": {key_text(k): n for k, n in self.replayed.items()},
            "captured": {key_text(k): n for k, n in self.captured.items()},
            "uncaptured": dict(self.uncaptured),
            "failures": dict(self.failures),
            "uncompiled": dict(self.uncompiled),
            "evicted": {key_text(k): n for k, n in self.evicted.items()},
        }


def key_text(key: Any) -> str:
    """How a key reads in reports: ``(16,)`` as ``16``, ``()`` as ``fixed``; wrapped numbers follow the sizes."""
    if not isinstance(key, tuple):
        return str(key)
    sizes = " x ".join(str(k) for k in key if not isinstance(k, str)) or "fixed"
    numbers = [f"{float.fromhex(k):g}" for k in key if isinstance(k, str)]
    more = ", ..." if len(numbers) > 3 else ""
    return f"{sizes} [{', '.join(numbers[:3])}{more}]" if numbers else sizes
