"""Benchmark cases behind ``python -m sgc_backend bench``; each module has ``run(say) -> dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .environment import environment
from .memory import run as memory

CASES: dict[str, Callable[[Callable[[str], None]], dict[str, Any]]] = {"memory": memory}

__all__ = ["CASES", "environment"]
