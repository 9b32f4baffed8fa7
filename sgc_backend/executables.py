"""Executables that graphs of one kind share: recorded graphs cost no device memory, what runs them does.

Note [Shared executables]
    A recorded graph lives in host memory; the executable that the driver makes of it takes device memory outside of
    the allocator, at least 128 KiB however small it is (measured on an H200, driver 580: 2,000 graphs of 7 kernels take
    256 MiB). One executable can serve all sizes of a piece whose graphs are alike: it is told to do what another graph
    says when the size changes. Alike means: equal in all that `Driver.signature` reads. Not everything that a driver
    says it has updated it has: between graphs whose kernels are launched in clusters of different shapes the update
    succeeds, and the results are wrong (seen there). With equal attributes it was right in 2,800 updates among the
    graphs of 51 sizes, and 22 of these were unlike: cuBLAS picks its clusters by the size.

    A change of size costs the host about 15 µs for the update and 18 µs at the launch that follows, for 14 kernels,
    where a launch alone takes 4; so executables are shared only where a user asks for it. An update leaves launches
    that were made before as they are, so replays need not wait for each other.

    Reading what a graph is takes as long as making several executables. So a family of which the first few graphs were
    all unlike each other is left to torch from then on.

    Only graphs that draw no random numbers share: torch's replay sets the generator's state, and it knows its own
    executables only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

TRIES = 8  # graphs of a family, none like another, after which no more of it are looked at


class Executable:
    """One executable.

    Attributes:
        handle: the driver's address of it.
        holds: the graph, by the driver's address, that it does at its next launch.
        users: graphs that run through it.
    """

    __slots__ = ("handle", "holds", "key", "users")

    def __init__(self, handle: int, holds: int, key: Hashable) -> None:
        self.handle, self.holds, self.key, self.users = handle, holds, key, 1


class SharedGraph:
    """A recorded graph that runs through an executable which others use too. Has torch's replay() and reset().

    Attributes:
        graph: torch's CUDAGraph, which keeps what was recorded; replaying it makes an executable of its own.
        executable: what it runs through; None after reset().
    """

    def __init__(self, owner: Executables, graph: Any, raw: int, executable: Executable) -> None:
        self._owner, self.graph, self._raw = owner, graph, raw
        self.executable: Executable | None = executable
        self.replay = owner.launcher(graph, raw, executable)

    def reset(self) -> None:
        """Give up the recording; the executable goes with its last user. Idempotent."""
        executable, self.executable = self.executable, None
        if executable is not None:
            self.replay = self.graph.replay  # which says that there is nothing any more
            self._owner.leave(executable, self._raw)
        self.graph.reset()


def plain(graph: Any) -> Any:
    """torch's CUDAGraph of a recorded graph."""
    return graph.graph if isinstance(graph, SharedGraph) else graph


class Executables:
    """A pool's shared executables. Its graphs replay one at a time, under the pool's lock.

    Args:
        driver: what makes, updates, launches and destroys executables; see `Driver`.
        stream: ``() -> int``: the current stream's address, where the thread's context is that of the pool's device;
            None where it is not, and torch must launch.

    Attributes:
        alive: how many executables there are.
        graphs: how many graphs run through them.
    """

    def __init__(self, driver: Any, stream: Callable[[], int | None]) -> None:
        self._driver, self._stream = driver, stream
        self._shared: dict[Hashable, Executable] = {}
        self._unlike: dict[Hashable, int] = {}  # by family, graphs that were like none before; of those that share, -1
        self.alive = self.graphs = 0

    def worth(self, family: Hashable) -> bool:
        """Whether a graph of ``family`` may be like another one."""
        return self._unlike.get(family, 0) < TRIES

    def join(self, graph: Any, family: Hashable) -> SharedGraph:
        """Have ``graph`` run through the executable of those of its ``family`` that it is like, or through a new one.

        Raises:
            RuntimeError: the driver makes none.
        """
        raw = graph.raw_cuda_graph()
        signature = self._driver.signature(raw)
        key = None if signature is None else (family, signature)
        executable = self._shared.get(key) if key is not None else None
        if executable is not None and self._update(executable, raw):
            executable.users += 1
            self.graphs += 1
            self._unlike[family] = -1
            return SharedGraph(self, graph, raw, executable)
        executable = Executable(self._driver.instantiate(raw), raw, key)
        self.alive += 1
        self.graphs += 1
        if self._unlike.get(family) != -1:
            self._unlike[family] = self._unlike.get(family, 0) + 1
        if key is not None:
            self._shared[key] = executable
        return SharedGraph(self, graph, raw, executable)

    def leave(self, executable: Executable, raw: int) -> None:
        """One user less."""
        executable.users -= 1
        self.graphs -= 1
        if executable.holds == raw:
            executable.holds = 0  # the address may be another graph's next
        if executable.users == 0:
            self.alive -= 1
            if self._shared.get(executable.key) is executable:
                del self._shared[executable.key]
            self._driver.destroy(executable.handle)
        if not self.graphs:
            self._unlike.clear()  # what is recorded from here on is new

    def _update(self, executable: Executable, raw: int) -> bool:
        """Have ``executable`` do what the graph at ``raw`` says; False where the driver refuses."""
        executable.holds = 0  # also where an interrupt comes between the update and the note of it
        if not self._driver.update(executable.handle, raw):
            return False
        executable.holds = raw
        return True

    def launcher(self, graph: Any, raw: int, executable: Executable) -> Callable[[], None]:
        """What replays ``graph``."""
        launch, update, stream, handle = self._driver.launch, self._update, self._stream, executable.handle

        def replay() -> None:
            current = stream()
            if current is None or (executable.holds != raw and not update(executable, raw)):
                graph.replay()
                return
            if launch(handle, current) != 0:
                graph.replay()  # says what is wrong, or makes what was missing: a context in a new thread

        return replay
