"""CudaGraphBackend: the interface of the wrappers that record callables under shape keys."""

from __future__ import annotations

import abc
import contextlib
import importlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import torch

from .config import check_bool, checked_name, emulation_asked_for
from .device import Device
from .devices import device_of, present_module
from .errors import CaptureError, NotCapturedError, OptionError, ReplayError
from .pool import GraphPool
from .pools import checked_lane, pool_of, pools
from .reached import Reached
from .recorders import enroll
from .shape_key import ShapeKey
from .stats import Counters
from .tree import flatten, is_unrun

log = logging.getLogger(__name__)

Forward = Callable[[], Any]


class CudaGraphBackend(abc.ABC):
    """Records zero-argument callables under shape keys and replays them.

    A callable reads its inputs from tensors that its owner keeps at fixed addresses, and returns any pytree. Python
    runs at capture only: side effects such as attribute writes do not happen again at replay, and tensors that the
    callable finds for itself are read at the address that they had. Where those are weights or buffers of modules, or
    attributes of objects and classes that its code names (or lists of tensors there, or entries of dicts whose keys it
    spells out), a replay checks that they still lie there, and that floats among them are still the same. It must not
    read a static output of a recording of the same pool directly: copy that into a buffer of your own first. What it
    has other threads do is not recorded, and they must not read what it makes.

    A copy (copy.copy, copy.deepcopy, pickle) is a wrapper with the same settings and nothing recorded: a recording is
    bound to the addresses that it was made with.

    Args:
        device_module: ``torch.cuda`` or ``sgc_backend.emulated``, or its name; None picks CUDA where there is one, or
            the emulated device under ``SGC_DEVICE=emulated``.
        lane: see `get_or_create_global_graph_memory_pool`.
        name: what reports call this wrapper.
        check_addresses: look at each replay whether the weights, buffers and attributes that the callable finds lie
            where they lay (about 0.1 µs for each). False: you promise to update them in place, or to capture again; a
            replay then notices only where a tensor's storage is gone, not where one was resized, as in a sleep.

    Raises:
        OptionError: a bad argument; or no device module was given and none can be picked.
    """

    kind: str

    def __init__(
        self,
        device_module: Any = None,
        *,
        lane: str | None = None,
        name: str | None = None,
        check_addresses: bool = True,
    ) -> None:
        self.name = self.kind if name is None else checked_name(name)
        check_bool(f"{self.name}: check_addresses", check_addresses)
        self.lane = checked_lane(lane)
        self.check_addresses = check_addresses
        self.device: Device = device_of(_picked(device_module))
        self.counters = Counters()
        self._pool: GraphPool | None = None
        self._sessions = 0
        self._counting: set[str] = set()  # ints that the callable was seen to change
        self._recordings: dict[Any, Any] = {}  # by `ShapeKey.plain`: an int is looked up without a call into Python
        enroll(self)

    @contextlib.contextmanager
    def capture_session(self, *, any_order: bool = False, measure: bool = False) -> Iterator[CudaGraphBackend]:
        """Open a capture session: `capture_one` is only allowed inside. Capture the largest size first.

        The device is synchronised and cached memory is given back once, at the session's start and at its end.

        Args:
            any_order: set where sizes can't come largest first. The pool then grows in place, so that every order takes
                the memory of the largest; on CUDA it can't be given back under its handle, which changes when
                everything recorded is gone.
            measure: record everything twice, the second time each wrapper and compiled graph in a pool of its own, so
                that `memory_report` can tell what separate pools would take.

        Raises:
            OptionError: ``any_order`` or ``measure`` is no bool.
            CaptureNestedError, StalePoolError: see `capture_one`.
        """
        check_bool(f"{self.name}: any_order", any_order)
        check_bool(f"{self.name}: measure", measure)
        pool = pool_of(self.device, self.lane)
        with pool.session(any_order=any_order, measure=measure):
            self._sessions += 1
            self._pool = pool
            try:
                yield self
            finally:
                self._sessions -= 1

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[CudaGraphBackend]:
        """Keep other threads from replaying from the pool while open, so that static outputs stay valid to read."""
        with pool_of(self.device, self.lane).lock:
            yield self

    @abc.abstractmethod
    def capture_one(
        self, key: ShapeKey | int, forward_fn: Forward, *, post_warmup_hook: Callable[[], None] | None = None
    ) -> Any:
        """Warm ``forward_fn`` up on the capture stream, record it under ``key`` and return its static output.

        ``forward_fn`` is called twice for real, which writes what it writes, then once to be recorded, which executes
        nothing: the output holds values after the first replay. A recording that ``key`` had is replaced where the new
        one succeeds.

        Args:
            key: what it is filed under; an int is a `ShapeKey` without a variant.
            forward_fn: the callable, without arguments.
            post_warmup_hook: called once, without arguments, between the warm-up and the recording: to put back state
                that the warm-up wrote, say.

        Raises:
            OptionError: ``forward_fn`` or the hook is no callable, or ``key`` is none.
            CaptureError: outside a capture session, or the callable can't be captured; ``__cause__`` says why.
            CaptureNestedError: inside a capture or a replay of the same pool.
            Exception: what ``forward_fn`` itself raised, unchanged.
        """

    def can_run(self, key: ShapeKey | int) -> bool:
        """Whether something is recorded under ``key``."""
        return ShapeKey.of(key).plain in self._recordings

    @abc.abstractmethod
    def replay(self, key: ShapeKey | int) -> Any:
        """Replay on the current stream and return the static output, valid until the next replay from the pool.

        Raises:
            NotCapturedError: nothing is recorded under ``key``.
            StalePoolError: the pool was reset after the recording was made.
            NestedReplayError: inside a replay or a capture of the same pool.
            ReplayError: a weight, a buffer or an attribute that the callable reads lies elsewhere than when it was
                captured, or a float among them is another.
        """

    def __reduce__(self) -> Any:
        return made_again, (type(self), self.device.module.__name__, self._settings())

    def _settings(self) -> dict[str, Any]:
        """What a copy is made with, besides the device module."""
        return {"lane": self.lane, "name": self.name, "check_addresses": self.check_addresses}

    @abc.abstractmethod
    def release(self) -> None:
        """Drop every recording; capturing again is possible. Idempotent."""

    def cleanup(self) -> None:
        """Drop every recording and give unused memory back. Idempotent."""
        self.release()
        for pool in pools():
            pool.settle()
        if self._pool is None:
            self.device.empty_cache()
        else:
            self._pool.empty_cache()

    def _found(self, key: ShapeKey | int) -> Any:
        """The recording under ``key``; raises NotCapturedError where there is none."""
        recording = self._recordings.get(key if type(key) is int else ShapeKey.of(key).plain)
        if recording is None:
            have = ", ".join(map(str, self._recordings)) or "none"
            raise NotCapturedError(
                f"{self.name}: nothing is recorded under key {ShapeKey.of(key)}; recorded: {have}. Capture it first, "
                f"or again if reset() or cleanup() dropped it"
            )
        return recording

    def hold(self, key: ShapeKey | int) -> Any:
        """Take the pool for staging what ``key`` reads, replaying it and reading its output, as one step.

        The current stream is behind the last replay's.

        Returns:
            The recording, for `replay_held`. Call ``recording.pool.let_go()`` afterwards.

        Raises: see `replay`.
        """
        while True:
            recording = self._recordings.get(key) if type(key) is int else None
            if recording is None:
                recording = self._found(key)
            pool = recording.pool
            pool.hold(recording.generation)
            try:
                if self._recordings.get(recording.key.plain) is recording:
                    return recording
            except BaseException:  # an interrupt, or a variant's __eq__
                pool.let_go()
                raise
            pool.let_go()  # it was replaced while this thread waited for the pool

    def replay_held(self, recording: Any) -> Any:
        """Replay what `hold` took; returns the static output, or the `StaticOutput` that makes it. Raises: see
        `replay`."""
        return self.replay(recording.key)

    def _check_in_place(self, recording: Any) -> None:
        moved = recording.reached.moved()
        if moved is not None:
            raise ReplayError(
                f"{self.name}: {moved} since key {recording.key} was captured, and the recording goes on with what was "
                f"there; update a tensor in place, or capture the key again"
            )

    def _reached(self, fn: Callable[..., Any]) -> Reached:
        return Reached(fn, self.device, check=self.check_addresses)

    def _settle(self, reached: Reached, what: str) -> None:
        """See `Reached.settle`; says once of each int that the callable changes that replays don't."""
        for label, old, new in reached.settle(what):
            if label not in self._counting:
                self._counting.add(label)
                log.warning(
                    "%s: the callable changed %s from %s to %s. Replays run no Python: they leave it as it is, and do "
                    "what was recorded while it was %s. Where results depend on it, keep it in a tensor, or have a "
                    "variant of the key for each of its values",
                    what,
                    label,
                    old,
                    new,
                    old,
                )

    def _session_pool(self, key: ShapeKey, forward_fn: Any, hook: Any) -> GraphPool:
        for what, fn in (("forward_fn", forward_fn), ("post_warmup_hook", hook)):
            if not callable(fn) and (what == "forward_fn" or fn is not None):
                raise OptionError(f"{self.name}: {what} must be a callable without arguments, got {type(fn).__name__}")
        if not self._sessions or self._pool is None:
            raise CaptureError(
                f"{self.name}: capture_one({key}) outside a capture session; write `with backend.capture_session():`"
            )
        self._pool.check_free()
        return self._pool

    def _warm_up(self, pool: GraphPool, forward_fn: Forward, runs: int) -> None:
        """Run on the capture stream, so that libraries, autotuners and lazily made state settle there first."""
        with pool.warming_up(), torch.no_grad():
            for _ in range(runs):
                for leaf in flatten(forward_fn())[0]:
                    if is_unrun(leaf):
                        refuse_unrun(leaf, self.name)


def refuse_unrun(leaf: Any, name: str) -> NoReturn:
    """Raises CaptureError: ``leaf`` of a callable's result is code that was not run."""
    if isinstance(leaf, Coroutine):
        leaf.close()  # or Python warns that nobody awaited it
    raise CaptureError(
        f"{name}: the callable returns a {type(leaf).__name__}, whose code runs as it is iterated or awaited, behind "
        f"the capture; return a list, or the awaited result"
    )


def made_again(kind: type[Any], device_module: str, settings: dict[str, Any]) -> Any:
    """A wrapper, or what owns one, as a copy is made; the device module by its name."""
    return kind(device_module=importlib.import_module(device_module), **settings)


def _picked(module: Any) -> Any:
    if module is not None:
        return module
    found = present_module(emulated=emulation_asked_for())
    if found is None:
        raise OptionError(
            "no CUDA device, and no device module was given; pass device_module=sgc_backend.emulated or set "
            "SGC_DEVICE=emulated to try without one"
        )
    return found
