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
        self._held: dict[int, Any] = {}
        self._owned: dict[int, list[Any]] = {}  # by id of a graph: those that its owner's death lets go of
        self.doomed: collections.deque[Any] = collections.deque()

    def add(self, graph: Any, owned: list[Any] | None = None) -> None:
        """Hold ``graph`` until `doom`; ``owned``: what `owned_by` made, for it to be let go of as well."""
        self._held[id(graph)] = graph
        if owned is not None:
            self._owned[id(graph)] = owned
            owned.append(graph)

    def doom(self, graph: Any) -> bool:
        """Let go of ``graph``; False where it is not held (any more)."""
        if self._held.pop(id(graph), None) is None:
            return False
        owned = self._owned.pop(id(graph), None)
        if owned is not None:
            owned.remove(graph)
        self.doomed.append(graph)
        return True

    def destroy_doomed(self) -> None:
        """Destroy what was let go of. Not while a capture is open."""
        while self.doomed:
            self.doomed.popleft().reset()

    def destroy_all(self) -> None:
        """Destroy what is held as well."""
        for graph in (*self._held.values(), *self.doomed):
            graph.reset()
        for owned in tuple(self._owned.values()):  # an owner may die meanwhile, on any thread
            owned.clear()
        self._owned.clear()
        self._held.clear()
        self.doomed.clear()

    def __bool__(self) -> bool:
        return bool(self._held)


def owned_by(owner: Any, let_go: Callable[[Any], None]) -> list[Any]:
    """A list for `HeldGraphs.add`: ``let_go(graph)`` is called for each graph in it when ``owner`` dies.

    One finalizer serves all graphs of an owner: hundreds of recordings would each keep the garbage collector as busy
    with theirs as with all the rest of a recording.
    """
    graphs: list[Any] = []
    weakref.finalize(owner, _let_go_of_all, graphs, let_go).atexit = False
    return graphs


def _let_go_of_all(graphs: list[Any], let_go: Callable[[Any], None]) -> None:
    for graph in tuple(graphs):
        let_go(graph)
