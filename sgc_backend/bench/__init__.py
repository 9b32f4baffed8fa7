"""Benchmark cases behind ``python -m sgc_backend bench``; each module has ``run(say, **options) -> dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import capture, compile, decode, dispatch, dynamo, memory, overhead, piecewise, shapes, wrappers
from .environment import environment

CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "overhead": overhead.run,
    "decode": decode.run,
    "wrappers": wrappers.run,
    "piecewise": piecewise.run,
    "dynamo": dynamo.run,
    "dispatch": dispatch.run,
    "memory": memory.run,
    "shapes": shapes.run,
    "capture": capture.run,
    "compile": compile.run,
}

__all__ = ["CASES", "environment"]
