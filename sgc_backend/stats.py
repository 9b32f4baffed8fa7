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
            "replayed": _by_text(self.replayed),
            "captured": _by_text(self.captured),
            "uncaptured": dict(self.uncaptured),
            "failures": dict(self.failures),
            "uncompiled": dict(self.uncompiled),
            "evicted": _by_text(self.evicted),
        }


def _by_text(counts: Counter[Any]) -> dict[str, int]:
    found: Counter[str] = Counter()  # variants of a class of the user's may have one repr
    for key, count in list(counts.items()):  # a copy: other threads go on counting
        found[key_text(key)] += count
    return dict(found)


def key_text(key: Any) -> str:
    """How a key reads in reports: ``(16,)`` as ``16``, ``()`` as ``fixed``; wrapped numbers follow the sizes.

    No two keys read alike.
    """
    if not isinstance(key, tuple):
        return str(key)
    sizes = " x ".join(str(k) for k in key if not isinstance(k, str)) or "fixed"
    numbers = [_number_text(float.fromhex(k)) for k in key if isinstance(k, str)]
    return f"{sizes} [{', '.join(numbers)}]" if numbers else sizes


def _number_text(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
