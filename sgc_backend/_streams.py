"""Streams and events of the emulated device, and its state.

Everything runs in the order of the calls here. What a real device would be free to run at the same time is
known from vector clocks: a stream's clock says, per stream, which launches come before what it launches next.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._arena import Arena, Handle
from ._pool_mode import PoolMode, leave
from ._recorder import Recorder
from .errors import OptionError


@dataclass
class Stats:
    """Counters since the last `reset_emulation`.

    Attributes:
        launches: recorded launches executed by replays.
        replays: graph replays.
        captures: captures that succeeded.
    """

    launches: int = 0
    replays: int = 0
    captures: int = 0


class EmulatedState:
    """All that is mutable; `renew` makes a new one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.arena = Arena(self.lock)
        self.thread = threading.local()
        self.numbers = itertools.count(1)
        # Per stream id, by stream id, the number of the last launch that is known to come before.
        self.clocks: dict[int, dict[int, int]] = {0: {}}
        self.host: dict[int, int] = {}
        self.last_replay: dict[Handle, tuple[int, int]] = {}
        self.captures: dict[int, Recorder] = {}
        self.generator_stuck = False
        self.opaque_ops: set[str] = set()
        self.stats = Stats()
        self.default: Stream | None = None

    def current(self) -> int:
        found = getattr(self.thread, "stream", None)
        return 0 if found is None else found.cuda_stream

    def usable(self) -> bool:
        return not self.generator_stuck

    def mode(self) -> PoolMode | None:
        """The innermost recording or redirection of this thread."""
        modes = getattr(self.thread, "modes", None)
        return modes[-1] if modes else None

    def enter(self, mode: PoolMode) -> None:
        if not hasattr(self.thread, "modes"):
            self.thread.modes = []
        self.thread.modes.append(mode)
        mode.__enter__()

    def exit(self, mode: PoolMode) -> None:
        self.thread.modes.remove(mode)
        leave(mode)

    # -- order; the caller holds the lock --------------------------------------------------------------

    def clock(self, stream_id: int) -> dict[int, int]:
        """The clock of a stream, after what the host has waited for."""
        clock = self.clocks.setdefault(stream_id, {})
        _merge(clock, self.host)
        return clock

    def tick(self, stream_id: int) -> int:
        clock = self.clock(stream_id)
        clock[stream_id] = clock.get(stream_id, 0) + 1
        return clock[stream_id]


def _merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for key, value in other.items():
        if clock.get(key, 0) < value:
            clock[key] = value


_state = EmulatedState()


def state() -> EmulatedState:
    """The state of this process."""
    return _state


def renew() -> None:
    """Start over with a new state."""
    global _state
    _state = EmulatedState()


def synchronize(device: Any = None) -> None:
    """Order all work of all streams before whatever the host does next.

    Raises EmulatedCaptureError, and invalidates the capture, in a thread that captures, and in any thread
    while another one captures with ``capture_error_mode="global"``.
    """
    state = _state
    with state.lock:
        for capture in set(state.captures.values()):
            if capture.error_mode == "global" or capture.thread == threading.get_ident():
                raise capture.forbid("synchronize", "the host can't wait for work that is only being recorded")
        for clock in state.clocks.values():
            _merge(state.host, clock)


class Stream:
    """A queue of work.

    Attributes:
        stream_id: int, 0 for the default stream.
        cuda_stream: the same int, where torch.cuda has the raw handle.
    """

    def __init__(self, device: Any = None, priority: int = 0, *, _id: int | None = None) -> None:
        self.stream_id = next(_state.numbers) if _id is None else _id
        self.cuda_stream = self.stream_id
        self.priority = priority
        self.device = torch.device("cpu")
        self.device_index = 0

    def wait_event(self, event: Event) -> None:
        """See `Event.wait`."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Order what was launched on `stream` so far before what this stream launches next."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event` (a new one by default) on this stream and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait. Raises EmulatedCaptureError, and invalidates, when this stream is capturing."""
        state = _state
        with state.lock:
            self._refuse_in_capture("stream.synchronize")
            _merge(state.host, state.clock(self.stream_id))

    def query(self) -> bool:
        """True: work is done when its call returns. Raises as `synchronize` does."""
        with _state.lock:
            self._refuse_in_capture("stream.query")
        return True

    def _refuse_in_capture(self, what: str) -> None:
        capture = _state.captures.get(self.stream_id)
        if capture is not None:
            raise capture.forbid(what, "the host can't wait for work that is only being recorded")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<emulated stream {self.stream_id}>"


class Event:
    """A point in a stream's work."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._clock: dict[int, int] | None = None
        self._capture: Recorder | None = None
        self._timed, self._seconds = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark what `stream` (the current one by default) has launched so far."""
        state = _state
        with state.lock:
            stream = current_stream() if stream is None else stream
            self._clock = dict(state.clock(stream.stream_id))
            self._capture = state.captures.get(stream.stream_id)
            self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Order the work before this event before what `stream` (default: the current one) launches next.

        A stream that waits for an event of a capture joins that capture. A capturing stream that waits for
        work outside of its capture raises EmulatedCaptureError and invalidates the capture.
        """
        state = _state
        with state.lock:
            stream = current_stream() if stream is None else stream
            if self._clock is None:
                return
            here = state.captures.get(stream.stream_id)
            there = self._capture if self._captured(state) else None
            if here is not None and there is not here:
                raise here.forbid("stream.wait_event", "the event marks work that isn't part of this capture")
            joins = there is not None and here is None
            if joins:
                there.streams.add(stream.stream_id)
                state.captures[stream.stream_id] = there
            _merge(state.clock(stream.stream_id), self._clock)
            if joins:
                state.tick(stream.stream_id)  # so that it must be waited for, whether or not it gets work

    def synchronize(self) -> None:
        """Make the host wait. Raises EmulatedCaptureError, and invalidates, if recorded in an open capture."""
        state = _state
        with state.lock:
            self._refuse_in_capture(state, "event.synchronize")
            _merge(state.host, self._clock or {})

    def query(self) -> bool:
        """True: work is done when its call returns. Raises as `synchronize` does."""
        with _state.lock:
            self._refuse_in_capture(_state, "event.query")
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time from this event's record to the other's.

        Raises RuntimeError unless both have been recorded and were made with enable_timing=True.
        """
        if not all(event._timed and event._clock is not None for event in (self, end_event)):
            raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        return (end_event._seconds - self._seconds) * 1e3

    def _captured(self, state: EmulatedState) -> bool:
        return self._capture is not None and self._capture in state.captures.values()

    def _refuse_in_capture(self, state: EmulatedState, what: str) -> None:
        if self._captured(state):
            assert self._capture is not None
            raise self._capture.forbid(what, "the host can't wait for work that is only being recorded")


def default_stream(device: Any = None) -> Stream:
    """The stream with id 0. As on a real device it can't be captured, and nothing waits for it by itself."""
    state = _state
    with state.lock:
        if state.default is None:
            state.default = Stream(_id=0)
        return state.default


def current_stream(device: Any = None) -> Stream:
    """This thread's current stream."""
    found = getattr(_state.thread, "stream", None)
    return default_stream() if found is None else found


def set_stream(stream: Stream | None) -> None:
    """Make `stream` this thread's current one; None changes nothing.

    Raises:
        OptionError: it is neither.
    """
    if stream is not None:
        if not isinstance(stream, Stream):
            raise OptionError(f"the current stream must be a sgc_backend.emulated.Stream, got {stream!r}")
        _state.thread.stream = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make `stream` this thread's current one inside of the block; None changes nothing. Raises: see `set_stream`."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
