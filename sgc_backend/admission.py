"""Which keys are recorded: what failed waits, what nobody replays makes room, what moves at every call stays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .buckets import Key
from .config import Options
from .errors import CaptureError
from .kept_plans import ADDRESS_SETS, KeptPlans
from .stats import Counters

RETRY_AFTER = (2, 8, 32)  # calls that run uncaptured before a capture that failed is tried again, each time
LOOK_EVERY = 32  # calls without room, at least, between two looks for recordings that nobody uses
WASTE_ALLOWED = 8  # recordings of one key in a row that may be let go after one replay at most
MOVES = (
    "static inputs (parameters, buffers, tensor attributes) lie elsewhere at every call; "
    "update them in place, or pass them as arguments"
)


@dataclass
class Failure:
    """Why a key can't be captured, and when it is worth another try: what broke it may have been passing by.

    Attributes:
        cause: of the last try.
        tries: how often it failed.
        wait: calls to go before the next try.
    """

    cause: str
    tries: int = 0
    wait: int = 0

    def again(self, cause: str) -> None:
        """Note another failed try."""
        self.cause = cause
        self.wait = RETRY_AFTER[self.tries] if self.tries < len(RETRY_AFTER) else 0
        self.tries += 1

    def due(self) -> bool:
        """Count a call; whether it should try again."""
        self.wait -= 1
        return self.wait < 0 and self.tries <= len(RETRY_AFTER)


class Admission:
    """Decides for a compiled graph which keys are recorded.

    Args:
        kept: the graph's plans.
        options, counters: the graph's.
        remembered: keys whose failure is remembered, at most.
    """

    def __init__(self, kept: KeptPlans, options: Options, counters: Counters, remembered: int) -> None:
        self._kept, self._options, self._counters, self._remembered = kept, options, counters, remembered
        self._failed: dict[Key, Failure] = {}
        # By key, addresses of static inputs, while they are doubted.
        self._seen_once: dict[Key, dict[tuple[int, ...], None]] = {}
        self._crowded = 0  # calls that found no room for their key
        self._idle: list[Key] = []
        self._runs_before: dict[Key, int] = {}

    def why_not(self, key: Key, sizes: Sequence[int], *, padded: bool, in_session: bool) -> str | None:
        """Why ``key``, whose sizes are ``sizes``, is not to be recorded at this call; None where it may be."""
        failure = self._failed.get(key)
        if failure is not None and not failure.due():
            return failure.cause
        if any(size == 0 for size in sizes):
            return "size 0 launches nothing"
        if not padded and not all(map(self._options.is_capture_size, sizes)):
            return "not a capture size"
        if self._options.capture == "session" and not in_session:
            return 'capture="session" and no capture session is open'
        # The dead are counted out here and dropped when the next key is recorded: until then the caller may still hold,
        # or hand in with this call, a static result that lies in their memory.
        most, plans = self._options.max_recordings, self._kept.by_key
        if key not in plans and len(plans) >= most and self._kept.alive() >= most and not self._unused():
            return "max_recordings reached"
        return None

    def _unused(self) -> list[Key]:
        """Keys that may make room for another: not replayed while so many calls came for which there was none.

        A look is taken now and then, not at each call: recording costs far more than a call that runs uncaptured, so
        keys that take turns must not push each other out.
        """
        self._crowded += 1
        self._idle = [key for key in self._idle if self._kept.runs(key) == self._runs_before.get(key)]
        if self._idle or self._crowded % max(self._options.max_recordings, LOOK_EVERY):
            return self._idle
        runs = {key: self._kept.runs(key) for key in self._kept.by_key}
        self._idle = [key for key, count in runs.items() if self._runs_before.get(key) == count]
        self._runs_before = runs
        return self._idle

    def make_room(self, key: Key) -> list[Key]:
        """Give up the recordings that `_unused` found, one key's, where ``key`` needs the place. The keys given up."""
        plans, gone = self._kept.by_key, []
        while self._idle and key not in plans and len(plans) >= self._options.max_recordings:
            idle = self._idle.pop(0)
            for plan in tuple(plans.get(idle, ())):
                self._kept.forget(idle, plan, wasted=False)
            self._counters.evicted[idle] += 1
            gone.append(idle)
        return gone

    def check_use(self, key: Key) -> None:
        """Stop recording a key whose recordings are hardly replayed before their static inputs move on.

        Raises:
            CaptureError: it is such a key.
        """
        if self._kept.wasted.get(key, 0) >= WASTE_ALLOWED:
            raise CaptureError(MOVES)

    def moves(self, key: Key, args: Sequence[Any]) -> bool:
        """Whether some static inputs seem to move at every call while what they leave lives on.

        Layers that share a static input look alike, until they come for the second time. So once a few recordings
        wait to be replayed, the next ones are made for addresses that have been seen before.
        """
        plans = self._kept.by_key.get(key)
        if plans is None or self._options.strict or plans.unproven_like(args) <= WASTE_ALLOWED:
            return False
        seen, here = self._seen_once.setdefault(key, {}), plans.addresses(args)
        if here in seen:
            del seen[here]
            return False
        seen[here] = None
        if len(seen) > ADDRESS_SETS:
            del seen[next(iter(seen))]
        return True

    # -- failures ----------------------------------------------------------------------------------------------------

    def failed(self, key: Key, cause: str) -> None:
        """Note that ``key`` could not be recorded: `why_not` gives the cause until it is time for another try."""
        self._failed.setdefault(key, Failure(cause)).again(cause)
        while len(self._failed) > self._remembered:
            del self._failed[next(iter(self._failed))]  # the oldest: keys that come once must not pile up

    def succeeded(self, key: Key) -> None:
        """Note that ``key`` was recorded."""
        self._failed.pop(key, None)

    def why_failed(self, key: Key) -> str | None:
        """The cause of the last try for ``key``, where that failed."""
        failure = self._failed.get(key)
        return failure.cause if failure else None

    def clear(self) -> None:
        """Forget failures and doubts: everything may be tried again."""
        self._failed.clear()
        self._seen_once.clear()
