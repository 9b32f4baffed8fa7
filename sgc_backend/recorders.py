"""Who holds recordings: every compiled graph and wrapper that is alive, each by a name of its own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_lock = threading.RLock()
_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


def enroll(recorder: Any) -> None:
    """Remember ``recorder`` weakly, which has release() and a name; a name that is taken gets a number behind it."""
    with _lock:
        taken = {r.name for r in _recorders}
        name, number = recorder.name, 2
        while recorder.name in taken:
            recorder.name, number = f"{name} #{number}", number + 1
        _recorders.add(recorder)


def recorders() -> list[Any]:
    """What is alive of all that was enrolled."""
    with _lock:
        return list(_recorders)
