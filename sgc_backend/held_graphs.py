"""Graphs that a pool holds: each until its owner lets go of it or dies, and then until no capture is open.

Note [Graphs die here]
    Destroying a graph while this thread captures invalidates the capture, and Python's garbage collector may run at any
    time. So the pool holds every graph, and an owner that dies only asks it to let go, which it does when no capture
    is open.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_here = threading.local()  # how many captures of ours this thread is in


@contextlib.contextmanager
def this_thread_captures() -> Iterator[None]:
    """While open, no graph is destroyed: this thread is in a capture of ours, or makes memory for one."""
    _here.captures = getattr(_here, "captures", 0) + 1
    try:
        yield
    finally:
        _here.captures -= 1


def captures_here() -> int:
    """How many captures of ours this thread is in."""
    return getattr(_here, "captures", 0)


class HeldGraphs:
    """A pool's graphs. True while there are any that nobody let go of.

    Attributes:
        doomed: let go of, and still to be destroyed. The same deque for good.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # graph and its owner's finalizer
        self.doomed: collections.deque[Any] = collections.deque()

    def add(self, graph: Any, owner: Any, let_go: Callable[[Any], None]) -> None:
        """Hold ``graph`` until `doom`; ``let_go(graph)`` is called where ``owner`` dies, if it is not None."""
        finalizer = None if owner is None else weakref.finalize(owner, let_go, graph)
        if finalizer is not None:
            finalizer.atexit = False
        self._held[id(graph)] = (graph, finalizer)

    def doom(self, graph: Any) -> bool:
        """Let go of ``graph``; False where it is not held (any more)."""
        held = self._held.pop(id(graph), None)
        if held is None:
            return False
        if held[1] is not None:
            held[1].detach()
        self.doomed.append(graph)
        return True

    def destroy_doomed(self) -> None:
        """Destroy what was let go of. Not while a capture is open."""
        while self.doomed:
            self.doomed.popleft().reset()

    def destroy_all(self) -> None:
        """Destroy what is held as well."""
        for _, finalizer in self._held.values():
            if finalizer is not None:
                finalizer.detach()
        for graph in (*(graph for graph, _ in self._held.values()), *self.doomed):
            graph.reset()
        self._held.clear()
        self.doomed.clear()

    def __bool__(self) -> bool:
        return bool(self._held)
