"""Benchmark cases behind ``python -m sgc_backend bench``; each module has ``run(say) -> dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import memory, wrappers
from .environment import environment

CASES: dict[str, Callable[[Callable[[str], None]], dict[str, Any]]] = {"memory": memory.run, "wrappers": wrappers.run}

__all__ = ["CASES", "environment"]
