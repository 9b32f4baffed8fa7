"""The guard of a pool's replays: one at a time, each behind the one before it.

Note [Replay guard]
    Recordings of one pool overwrite each other's memory, so two of them must never run at once. In front of a replay
    the current raw stream id is compared with the last one that replayed; only when it differs is an event recorded on
    the previous stream and waited for on this one. Threads take the pool's lock for the length of a replay.

Note [Interrupts]
    Python raises a KeyboardInterrupt as it enters a function of its own, or behind a call of C. So what ends a replay
    or a capture is either a C function, or it is guarded by a flag: entering a Python function in a ``finally`` could
    be interrupted before the first line of it, and would leave the pool taken for good.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

from .device import Device
from .errors import NestedReplayError, StalePoolError

writes = itertools.count(1)  # numbers what may overwrite static outputs, in all pools


class ReplayGuard(abc.ABC):
    """Orders what captures into and replays from one pool.

    Args:
        device: the pool's.
        doomed: recordings that were dropped and not destroyed yet; to be looked at behind every replay.

    Attributes:
        lock: taken for the length of a capture or a replay.
        generation: 0, and 1 once the pool is closed; a recording remembers the one that it was made in.
        written: changes with every replay and capture, which may overwrite static outputs; never comes again.
        replaying: whether a replay is in progress, on the thread that has the lock.
        doomed: see above; where there are any behind a replay, call `settle`.
        let_go: releases what `hold` took; see Note [Interrupts].
    """

    def __init__(self, device: Device, doomed: Collection[Any]) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.let_go: Callable[[], None] = self.lock.release
        self.generation = 0
        self.written = next(writes)
        self.replaying = False
        self._capturing = False
        self._last_raw: int | None = None
        self._last_stream: Any = None
        self.doomed = doomed

    @abc.abstractmethod
    def settle(self, *, trim: bool = True) -> None:
        """Destroy what was dropped."""

    def hold(self, generation: int) -> None:
        """Take the pool's lock, with the current stream behind the last replay's. Pair with `let_go`.

        What is enqueued meanwhile may write what replays read, and read what they write.

        Raises:
            NestedReplayError: this thread is inside a replay or a capture of the same pool.
            StalePoolError: the recording to be replayed is of a generation before the last reset().
        """
        self.lock.acquire()
        if self.replaying or self._capturing or generation != self.generation:
            try:
                self._refuse(generation)
            finally:
                self.lock.release()
        try:
            if self.device.is_capturing():
                raise NestedReplayError(
                    f"replay begun inside a capture that is not ours on {self.device}: what is checked at each replay "
                    f"would not be checked when that one is replayed. Run the inner call outside"
                )
            raw = self.device.current_raw_stream()
            if raw != self._last_raw:
                self._change_stream(raw)
        except BaseException:
            self.lock.release()
            raise

    def replay_begin(self, generation: int) -> None:
        """Take the pool for a replay on the current stream; see Note [Replay guard]. Pair with `replay_end`.

        Raises: see `hold`.
        """
        self.hold(generation)
        try:
            self.written = next(writes)  # where an interrupt may come
            self.replaying = True
        except BaseException:
            self.lock.release()
            raise

    def replay_end(self) -> None:
        """What an interrupt may come in front of; see Note [Interrupts]."""
        self.replaying = False
        self.let_go()
        if self.doomed:
            self.settle()

    def replay_held(self, launch: Callable[[], None]) -> None:
        """Replay by ``launch()`` between `hold` and `let_go`."""
        try:
            self.replaying = True
            self.written = next(writes)
            launch()
        finally:
            self.replaying = False

    def _refuse(self, generation: int) -> None:
        if generation != self.generation:
            raise StalePoolError(f"this recording was made before the pool of {self} was reset; record it again")
        what = "capture" if self._capturing else "replay"
        raise NestedReplayError(
            f"replay begun inside a {what} of the same pool on {self}: it would overwrite the memory of the one in "
            f"progress. Run the inner call outside, or uncaptured, or in a lane of its own"
        )

    def _change_stream(self, raw: int) -> None:
        stream = self.device.current_stream()
        if self._last_stream is not None:
            event = self.device.new_event()
            event.record(self._last_stream)
            stream.wait_event(event)
        self._last_raw, self._last_stream = raw, stream
