"""One Dynamo graph, split, compiled and recorded: which plan serves a call, and what happens where none does."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .admission import MOVES, Admission
from .blame import blamed
from .buckets import Key
from .builder import build_plan
from .errors import CaptureNestedError, StrictError
from .inputs import PASSED, STAGED
from .kept_plans import KeptPlans
from .layout import Layout
from .plan import Plan, PlanReleasedError
from .pool import GraphPool
from .pools import pool_of
from .recorders import enroll
from .recording import Bucket, PaddingError
from .seen import Replayed, seeing
from .spans import copy_of
from .static_inputs import StaticInputs
from .stats import Counters, key_text
from .warm_up import WarmUps

log = logging.getLogger(__name__)
serial = itertools.count()  # numbers graphs in the order in which they were compiled
KEYS_REMEMBERED = 256  # keys warmed up or failed that are remembered besides the recorded ones
NESTS = "an op in which a capture failed replays from the pool itself, and can't do that within a replay from it"
FORWARD_GRADIENTS = "inside torch.autograd.forward_ad.dual_level(); a recording computes no forward-mode gradients"
WRITES_STATIC_RESULT = "the graph writes to an argument that is a static result; pass a copy of it"


class PiecewiseGraph:
    """One Dynamo graph: its split, its compiled pieces, and its plans by key.

    A key holds the values of the sizes and wrapped numbers that pieces see. Under one key there may be several plans,
    one for each set of addresses of the static inputs: layers that share code bring their own weights.
    """

    kind = "compiled"

    def __init__(self, layout: Layout) -> None:
        self.name = f"graph {next(serial)}"
        self.layout = layout
        self.options, self.device = layout.options, layout.device
        self.split, self.inputs, self.symbols = layout.split, layout.inputs, layout.symbols
        self.compiled, self.uncompiled, self.recordable = layout.compiled, layout.uncompiled, layout.recordable
        self.padding, self.not_padded = layout.padding, layout.not_padded
        # Once a capture failed in an op, takes the calls that nothing was recorded for until then, and cuts the op.
        self.after: PiecewiseGraph | None = None
        self.counters = Counters()
        layout.tell_uncompiled(self.name)
        for found in self.uncompiled.values():
            self.counters.uncompiled[found.cause] += 1
        self._key = layout.key
        remembered = self.options.max_recordings + KEYS_REMEMBERED
        self._statics = StaticInputs(self.device)
        self._kept = KeptPlans(self.counters, trim_when_dead=layout.clones)
        self.plans = self._kept.by_key
        self._warm_ups = WarmUps(layout.walk, self.device, remembered)
        self._admission = Admission(self._kept, self.options, self.counters, remembered)
        self._warned: set[str] = set()
        self._nests = False  # an op that was cut because a capture failed in it was seen to replay from the pool
        self._lock = threading.RLock()
        enroll(self)

    # -- the call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        if self.after is not None and not self.plans:
            return self.after(*args)
        if forward_ad._current_level >= 0:  # which Dynamo guards inside of its graphs alone
            return self._uncaptured(args, FORWARD_GRADIENTS)
        real = self._key(args)
        padding = self.padding
        key = real if padding is None else padding.buckets.of(real)
        if key is None:
            if self.after is not None:
                return self.after(*args)
            return self._uncaptured(args, "no capture size holds it within max_padding_ratio")
        plans = self.plans.get(key)
        plan = None if plans is None else plans.find(args)
        if plan is None or (plan.geometry is None and key != real):  # padding was given up since the key was made
            return self._cold(key, real, args)
        return self._replay(key, real, plan, args)

    def _plan(self, key: Key, args: Sequence[Any]) -> Plan | None:
        plans = self.plans.get(key)
        return None if plans is None else plans.find(args)

    def _replay(self, key: Key, real: Key, plan: Plan, args: Sequence[Any]) -> Any:
        if plan.writes:
            if plan.aliased(args):
                return self._uncaptured(args, "inputs share memory with what the graph writes")
            if plan.writes_into_pool(args):
                return self._uncaptured(args, WRITES_STATIC_RESULT)
        try:
            sizes = None if plan.geometry is None else real
            out = plan.run(args, sizes)
        except PlanReleasedError:
            if self.after is not None:  # nothing is recorded here any more that would take its place
                with self._taken():
                    self._kept.forget(key, plan, wasted=False)
            return self._cold(key, real, args)
        self.counters.replayed[key] += 1
        seen = seeing.get()
        if seen is not None:
            seen.replayed.append(Replayed(self, plan, tuple(args), out, sizes))
        return out if self.split.spec is None else self._nested(out)

    def _cold(self, key: Key, real: Key, args: Sequence[Any]) -> Any:
        """A call that no plan serves yet: warm up, record, or run compiled with its cause counted."""
        if self.after is not None:
            return self.after(*args)
        with self._taken() as pool:
            if self.padding is None:
                key = real  # it may have been given up meanwhile
            plan = self._plan(key, args)  # another thread may have recorded it meanwhile
            if plan is None or plan.released or plan.pool is not pool:  # reset() came while it was recorded
                if self.after is not None:  # another thread's capture may have failed meanwhile
                    return self.after(*args)
                cause = self._why_not_now(key, pool)
                if cause is not None:
                    return self._uncaptured(args, cause)
                if key not in self._warm_ups.observed:
                    out = self._warm_up(pool, key, real, args)
                    now = self.options.capture == "session" or pool.session_depth
                    if now and not self._nests and key in self._warm_ups.observed:
                        self._record(pool, key, real, args)
                    return out
                if self._writes_into_pool(pool, args):
                    return self._uncaptured(args, WRITES_STATIC_RESULT)
                if not pool.session_depth and self._admission.moves(key, args):
                    return self._uncaptured(args, MOVES)
                args, padding = self._out_of_the_pool(pool, args), self.padding
                plan = self._record(pool, key, real, args)
                if plan is None:
                    cause = self._admission.why_failed(key) or "a capture is in progress around this call"
                    return self._uncaptured(
                        args, cause if padding is self.padding else f"not padded: {self.not_padded}"
                    )
        # With nothing taken: where the plan is let go of before it runs, the call comes back here.
        return self._replay(key, real, plan, args)

    @contextlib.contextmanager
    def _taken(self) -> Iterator[GraphPool]:
        """Take the pool as it is now, and then this graph: a replay session holds the pool's lock around calls.

        Whoever has both must ask for no other pool: reset() may have put one in its place, which another thread has
        while it waits for this graph.
        """
        while True:
            pool = self._pool()
            with pool.lock:
                if not pool.generation:  # else reset() closed it meanwhile
                    with self._lock:
                        yield pool
                    return

    def _why_not_now(self, key: Key, pool: GraphPool) -> str | None:
        if not self.split.pieces:
            return "nothing to capture: no piece has a kernel"
        if self._nests:
            return NESTS
        sizes = [key[k] for k in self.layout.sizes]
        return self._admission.why_not(key, sizes, padded=self.padding is not None, in_session=pool.session_depth > 0)

    def _uncaptured(self, args: Sequence[Any], cause: str) -> Any:
        if self.options.strict:
            raise StrictError(f"strict=True, and this call of {self.name} would run uncaptured: {cause}")
        self.counters.uncaptured[cause] += 1
        seen = seeing.get()
        if seen is not None:
            seen.uncaptured.append((self.name, cause))
        return self._nested(self.layout.walk.run(args))

    def _warm_up(self, pool: GraphPool, key: Key, real: Key, args: Sequence[Any]) -> Any:
        before = pool.written
        out, disagreed = self._warm_ups.run(pool, key, real, args, self.padding)
        self._nests |= pool.written != before and bool(self.layout.marks.failed)
        self.counters.uncaptured["warm-up"] += 1
        if disagreed is not None:
            self._give_up_padding(disagreed)
        return self._nested(out)

    def _give_up_padding(self, cause: str) -> None:
        """From here on, exact sizes are recorded; cuts stay where they are."""
        self.padding, self.not_padded = None, cause
        log.warning("%s is not padded: %s", self.name, cause)
        self.release()

    def _writes_into_pool(self, pool: GraphPool, args: Sequence[Any]) -> bool:
        inside = pool.contains()
        return any(inside(args[i.index]) for i in self.inputs if i.written and i.kind in (STAGED, PASSED))

    def _out_of_the_pool(self, pool: GraphPool, args: Sequence[Any]) -> Sequence[Any]:
        """``args`` with copies of those that lie in the pool: recording may take the memory that they lie in."""
        inside = pool.contains()
        moved = list(args)
        for spec in self.inputs:
            value = args[spec.index]
            if spec.kind not in (STAGED, PASSED) or spec.written or not isinstance(value, torch.Tensor):
                continue
            if inside(value):
                moved[spec.index] = copy_of(value, whole=spec.name in self.split.reached_around)
        return moved

    def _record(self, pool: GraphPool, key: Key, real: Key, args: Sequence[Any]) -> Plan | None:
        """Record for ``key``; None where it failed, with the cause kept in ``_admission``."""
        self._kept.drop_dead()
        for idle in self._admission.make_room(key):
            self._warm_ups.observed.pop(idle, None)
        try:
            self._admission.check_use(key)
            self.device.synchronize()  # warm-up work on side streams must not own memory that a capture reuses
            plan = self._build(pool, key, real, args)
            shadow = pool.shadow(self.name)
            if shadow is not None:
                try:
                    shadow.kept.append(self._build(shadow, key, real, args))
                except BaseException:
                    plan.release()
                    raise
        except CaptureNestedError:
            return None  # a matter of where this call was made, not of the graph
        except PaddingError as error:
            self._give_up_padding(str(error))
            return None
        except Exception as error:
            cause = f"capture failed: {type(error).__name__}: {error}"
            replaced = not self.options.strict and self._cut_instead(error)
            self._admission.failed(key, cause)
            self.counters.failures[cause] += 1
            seen = seeing.get()
            if seen is not None:
                seen.failures.append(error)
                seen.replaced += replaced
            if self.options.strict:
                raise
            if replaced:
                return None
            level = logging.DEBUG if type(error).__name__ in self._warned else logging.WARNING
            self._warned.add(type(error).__name__)
            log.log(level, "%s runs uncaptured for key %s: %s", self.name, key_text(key), error)
            return None
        self._admission.succeeded(key)
        self._kept.keep(key, plan)
        seen = seeing.get()
        if seen is not None:
            seen.recorded.append((self._kept, key, plan))
        return plan

    def _cut_instead(self, error: Exception) -> bool:
        """Where a capture failed in a custom op, have another graph take the calls to come, in which the op is cut."""
        marks = self.layout.marks
        op = blamed(error, [group.gm for group in self.split.pieces])
        if op is None or marks.wants_captured(op) or op in marks.failed:
            return False
        try:
            after = PiecewiseGraph(self.layout.without(op))
        except Exception as again:
            log.warning("%s can't be split at %s, in which a capture failed: %s", self.name, op, again)
            return False
        log.warning(
            "%s: a capture failed in %s, so %s takes the calls to come, in which it is cut; name it in cut_ops to have "
            "it cut from the start, and all pieces compiled. %s",
            self.name,
            op,
            after.name,
            error,
        )
        # What is recorded stays: it is right, a wrapper may replay it by key, and a static result may lie in it.
        self.after = after
        self._warm_ups.observed.clear()
        return True

    def _build(self, pool: GraphPool, key: Key, real: Key, args: Sequence[Any]) -> Plan:
        observed = self._warm_ups.observed[key]
        bucket = None
        if self.padding is not None:
            buckets = self.padding.buckets
            moving = frozenset(buckets.values(key))
            bucket = Bucket(self.padding.extents, buckets.symbols, key, observed.real, real, moving)
        return build_plan(
            pool,
            self.split,
            self.recordable,
            self.inputs,
            self.symbols,
            frozenset(self.layout.key_symbols),
            observed.cuts,
            args,
            self._statics,
            detached=self._warm_ups.detached,
            inference=self._warm_ups.inference,
            itself=observed.itself,
            clone=self.layout.clones,
            share=self.options.share_executables,
            name=self.name,
            key=key_text(key),
            bucket=bucket,
        )

    def release(self) -> None:
        """Drop every recording; later calls warm up and record again."""
        with self._lock:
            plans = self._kept.clear()
            self._statics.clear()
            self._warm_ups.observed.clear()
            self._admission.clear()
        for plan in plans:
            plan.release()

    # -- pool and results --------------------------------------------------------------------------------------------

    def _pool(self) -> GraphPool:
        return pool_of(self.device, self.options.lane)

    def _nested(self, outputs: list[Any]) -> Any:
        if self.split.spec is None:
            return outputs
        return torch.utils._pytree.tree_unflatten(outputs, self.split.spec)
