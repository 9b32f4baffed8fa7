"""Benchmark cases behind ``python -m sgc_backend bench``; each module has ``run(say, **options) -> dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import memory, shapes, wrappers
from .environment import environment

CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "memory": memory.run,
    "wrappers": wrappers.run,
    "shapes": shapes.run,
}

__all__ = ["CASES", "environment"]
