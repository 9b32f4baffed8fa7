"""One Dynamo graph, split, compiled and recorded: which plan serves a call, and what happens where none does."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .builder import build_plan
from .by_address import PlansByAddress
from .capturable import Marks, is_kept, why_not_capturable
from .config import Options
from .device import Device
from .errors import CaptureError, CaptureNestedError, StrictError
from .facts import example, gather_facts
from .groups import PIECE, HostRef, Ref, Split
from .inputs import PASSED, STAGED, STATIC, Input, classify
from .padding import padding_of, split_for_padding
from .piece import compile_pieces
from .plan import Plan, PlanReleasedError, copy_of
from .pool import GraphPool, enroll, pool_of
from .probe import Probe
from .recording import Bucket, PaddingError
from .stats import Counters, key_text
from .symbols import Symbols, expression
from .walk import CutResult, Walk

log = logging.getLogger(__name__)
serial = itertools.count()  # numbers graphs in the order in which they were compiled
KEYS_REMEMBERED = 256  # keys warmed up or failed that are remembered besides the recorded ones
ADDRESS_SETS = 128  # plans kept for one key, each for static inputs at other addresses (layers that share their code)
RETRY_AFTER = (2, 8, 32)  # calls that run uncaptured before a capture that failed is tried again, each time
WRITES_STATIC_RESULT = "the graph writes to an argument that is a static result; pass a copy of it"
TRIED_AT = 2  # buckets at which pieces are tried before the rest is taken for granted
LOOK_EVERY = 32  # calls without room, at least, between two looks for recordings that nobody uses
WASTE_ALLOWED = 8  # recordings of one key in a row that may be let go after one replay at most
MOVES = (
    "static inputs (parameters, buffers, tensor attributes) lie elsewhere at every call; "
    "update them in place, or pass them as arguments"
)

Key = tuple[Any, ...]  # values of the sizes (int) and numbers (their hex text) that pieces see


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


@dataclass(frozen=True)
class Replayed:
    """One replay as `calls_seen` saw it: the graph, the plan, its arguments, outputs and real sizes."""

    graph: PiecewiseGraph
    plan: Plan
    args: tuple[Any, ...]
    outputs: list[Any]
    sizes: Key | None  # the call's, where the plan is made for larger ones


@dataclass
class Seen:
    """What `calls_seen` collected.

    Attributes:
        replayed: replays.
        recorded: (graph, key, plan) of what was recorded.
        uncaptured: (graph, cause) of calls that ran uncaptured.
        failures: why captures failed.
    """

    replayed: list[Replayed] = field(default_factory=list)
    recorded: list[tuple[PiecewiseGraph, Key, Plan]] = field(default_factory=list)
    uncaptured: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def undo(self) -> None:
        """Let go of what was recorded."""
        for graph, key, plan in self.recorded:
            graph.forget(key, plan, wasted=False)


_seen: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("calls seen", default=None)


@contextlib.contextmanager
def calls_seen() -> Iterator[Seen]:
    """Collect the calls of compiled graphs that this thread makes while open."""
    found = Seen()
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


class PiecewiseGraph:
    """One Dynamo graph: its split, its compiled pieces, and its plans by key.

    A key holds the values of the sizes and wrapped numbers that pieces see. Under one key there may be several plans,
    one for each set of addresses of the static inputs: layers that share code bring their own weights.
    """

    kind = "compiled"

    def __init__(self, gm: fx.GraphModule, options: Options, marks: Marks, device: Device) -> None:
        self.name = f"graph {next(serial)}"
        self.options = options
        self.device = device
        # What a graph in front of a graph break returns is used behind it, when the next graph has been replayed.
        reason = getattr(gm, "compile_subgraph_reason", None)
        self.clones = options.outputs == "clone" or bool(getattr(reason, "graph_break", False))
        self.counters = Counters()
        facts = gather_facts(gm, device.type)
        self.symbols = Symbols(gm)
        found = split_for_padding(
            gm,
            facts,
            lambda node: why_not_capturable(node, facts, marks),
            self.symbols,
            options,
            keep=lambda node: is_kept(node, facts, marks),
            wrap_numbers=options.inner != "eager",
        )
        self.split: Split = found.split
        read = {r.name for g in self.split.pieces for r in g.inputs if isinstance(r, Ref)}
        read |= {name for g in self.split.pieces for name in g.reads}
        self.inputs = classify(gm, read, {name for g in self.split.groups for name in g.writes})
        self.key_symbols = self.symbols.bound(
            _symbols_in_pieces(self.split) | _symbols_around_pieces(gm, self.split, self.inputs)
        )
        self.padding, self.not_padded = None, found.why_not
        if found.prefix is not None:
            self.padding = padding_of(
                gm, self.split, found.prefix, self.symbols, self.key_symbols, self.inputs, options
            )
        self._sizes = [k for k, s in enumerate(self.key_symbols) if s in self.symbols.dimensions]
        self._key = self._key_reader()
        self.compiled = compile_pieces(self.split.groups, options.inner)
        # Emulated recordings can't see into compiled code; in a graph of eager pieces they can.
        self.recordable = [
            device.opaque(fn) if g.kind == PIECE and options.inner != "eager" else fn
            for g, fn in zip(self.split.groups, self.compiled, strict=True)
        ]
        self.walk = Walk(self.split, self.compiled, self.symbols, [i.name for i in self.inputs])
        self.plans: dict[Key, PlansByAddress] = {}
        # Of each key's warm-up: what its cuts returned, its real sizes, and which outputs were arguments themselves.
        self._observed: dict[Key, tuple[dict[str, CutResult], Key, dict[str, int]]] = {}
        self._detached: frozenset[str] = frozenset()  # outputs that carry no gradient, whatever they are views of
        self._failed: dict[Key, Failure] = {}
        self._inference: frozenset[str] = frozenset()  # outputs that were inference tensors
        self._seen_once: dict[
            Key, dict[tuple[int, ...], None]
        ] = {}  # addresses of static inputs, while they are doubted
        self._wasted: dict[Key, int] = {}  # recordings in a row that were let go after one replay at most
        self._agreed = 0  # buckets at which the pieces were tried
        self._crowded = 0  # calls that found no room for their key
        self._idle: list[Key] = []
        self._runs_before: dict[Key, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        enroll(self)

    # -- the call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        real = self._key(args)
        padding = self.padding
        key = real if padding is None else padding.buckets.of(real)
        if key is None:
            return self._uncaptured(args, "no capture size holds it within max_padding_ratio")
        plan = self._plan(key, args)
        if plan is None or (plan.geometry is None and key != real):  # padding was given up since the key was made
            return self._cold(key, real, args)
        return self._replay(key, real, plan, args)

    def _plan(self, key: Key, args: Sequence[Any]) -> Plan | None:
        plans = self.plans.get(key)
        return None if plans is None else plans.find(args)

    def _replay(self, key: Key, real: Key, plan: Plan, args: Sequence[Any]) -> Any:
        if plan.aliased(args):
            return self._uncaptured(args, "inputs share memory with what the graph writes")
        if plan.writes_into_pool(args):
            return self._uncaptured(args, WRITES_STATIC_RESULT)
        try:
            sizes = None if plan.geometry is None else real
            out = plan.run(args, sizes)
        except PlanReleasedError:
            return self._cold(key, real, args)
        self.counters.replayed[key] += 1
        seen = _seen.get()
        if seen is not None:
            seen.replayed.append(Replayed(self, plan, tuple(args), out, sizes))
        return self._nested(out)

    def _cold(self, key: Key, real: Key, args: Sequence[Any]) -> Any:
        """A call that no plan serves yet: warm up, record, or run compiled with its cause counted."""
        with self._pool().lock, self._lock:  # always in this order: a replay session holds the pool's around calls
            if self.padding is None:
                key = real  # it may have been given up meanwhile
            plan = self._plan(key, args)  # another thread may have recorded it meanwhile
            if plan is not None and not plan.released:
                return self._replay(key, real, plan, args)
            cause = self._why_not_now(key)
            if cause is not None:
                return self._uncaptured(args, cause)
            pool = self._pool()
            if key not in self._observed:
                out = self._warm_up(key, real, args)
                if (self.options.capture == "session" or pool.session_depth) and key in self._observed:
                    self._record(key, real, args)
                return out
            if self._writes_into_pool(args):
                return self._uncaptured(args, WRITES_STATIC_RESULT)
            if not pool.session_depth and self._moves(key, args):
                return self._uncaptured(args, MOVES)
            args, padding = self._out_of_the_pool(args), self.padding
            plan = self._record(key, real, args)
            if plan is None:
                failure = self._failed.get(key)
                cause = failure.cause if failure else "a capture is in progress around this call"
                return self._uncaptured(args, cause if padding is self.padding else f"not padded: {self.not_padded}")
            return self._replay(key, real, plan, args)

    def _why_not_now(self, key: Key) -> str | None:
        if not self.split.pieces:
            return "nothing to capture: no piece has a kernel"
        failure = self._failed.get(key)
        if failure is not None and not failure.due():
            return failure.cause
        sizes = [key[k] for k in self._sizes]
        if any(size == 0 for size in sizes):
            return "size 0 launches nothing"
        if self.padding is None and not all(map(self.options.is_capture_size, sizes)):
            return "not a capture size"
        if self.options.capture == "session" and not self._pool().session_depth:
            return 'capture="session" and no capture session is open'
        # The dead are counted out here and dropped when the next key is recorded: until then the caller may still hold,
        # or hand in with this call, a static result that lies in their memory.
        if key not in self.plans and len(self.plans) >= self.options.max_recordings:
            alive = sum(not all(map(_is_dead, plans)) for plans in self.plans.values())
            if alive >= self.options.max_recordings and not self._unused():
                return "max_recordings reached"
        return None

    def _unused(self) -> list[Key]:
        """Keys that may make room for another: not replayed while so many calls came for which there was none.

        A look is taken now and then, not at each call: recording costs far more than a call that runs uncaptured, so
        keys that take turns must not push each other out.
        """
        self._crowded += 1
        self._idle = [key for key in self._idle if self._runs(key) == self._runs_before.get(key)]
        if self._idle or self._crowded % max(self.options.max_recordings, LOOK_EVERY):
            return self._idle
        runs = {key: self._runs(key) for key in self.plans}
        self._idle = [key for key, count in runs.items() if self._runs_before.get(key) == count]
        self._runs_before = runs
        return self._idle

    def _runs(self, key: Key) -> int:
        return sum(plan.runs for plan in self.plans.get(key, ()))

    def _make_room(self, key: Key) -> None:
        """Give up the recordings that `_unused` found, one key's, where ``key`` needs the place."""
        while self._idle and key not in self.plans and len(self.plans) >= self.options.max_recordings:
            idle = self._idle.pop(0)
            for plan in tuple(self.plans.get(idle, ())):
                self.forget(idle, plan, wasted=False)
            self._observed.pop(idle, None)
            self.counters.evicted[idle] += 1

    def _uncaptured(self, args: Sequence[Any], cause: str) -> Any:
        if self.options.strict:
            raise StrictError(f"strict=True, and this call of {self.name} would run uncaptured: {cause}")
        self.counters.uncaptured[cause] += 1
        seen = _seen.get()
        if seen is not None:
            seen.uncaptured.append((self.name, cause))
        return self._nested(self.walk.run(args))

    def _warm_up(self, key: Key, real: Key, args: Sequence[Any]) -> Any:
        """Answer the call compiled, on the capture stream: libraries and autotuners settle there for this size, and in
        a bucket's for the bucket's as well, where the pieces are tried."""
        pool = self._pool()
        current = self.device.current_stream()
        observed: dict[str, CutResult] = {}
        probe = self._probe(key, real, args)
        with pool.warming_up():
            out = self.walk.run(args, observed, None if probe is None else probe.run)
        for value in out:
            if isinstance(value, torch.Tensor) and self.device.type != "cpu" and self.device.owns(value):
                value.record_stream(current)
        self.counters.uncaptured["warm-up"] += 1
        named = [(r.name, v) for r, v in zip(self.split.outputs, out, strict=True) if isinstance(r, Ref)]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        if probe is not None and probe.disagreed:
            self._give_up_padding(probe.disagreed[0])
        else:
            self._agreed += probe is not None and probe.compare
            at = {id(value): k for k, value in enumerate(args) if isinstance(value, torch.Tensor)}
            itself = {name: at[id(value)] for name, value in tensors if id(value) in at}
            self._observed[key] = observed, real, itself
        self._detached = frozenset(name for name, value in tensors if not value.requires_grad)
        self._inference = frozenset(name for name, value in tensors if value.is_inference())
        for settled in (self._observed, self._failed):
            while len(settled) > self.options.max_recordings + KEYS_REMEMBERED:
                del settled[next(iter(settled))]  # the oldest: keys that come once must not pile up
        return self._nested(out)

    def _probe(self, key: Key, real: Key, args: Sequence[Any]) -> Probe | None:
        padding = self.padding
        if padding is None or padding.trusted:
            return None
        full = padding.buckets.fills(real, key)
        small = padding.buckets.smaller(key) if full else real
        if small is None:
            return None  # the bucket serves no size but its own
        return Probe(
            padding.extents.at(small),
            padding.extents.at(key),
            lambda ref: self.symbols.evaluate(ref.expr, args, ref.kind, padding.buckets.values(small)),
            lambda ref: self.symbols.evaluate(ref.expr, args, ref.kind, padding.buckets.values(key)),
            self.device.generator(),
            self.split,
            compare=self._agreed < TRIED_AT,
            given_wide=full,
        )

    def _give_up_padding(self, cause: str) -> None:
        """From here on, exact sizes are recorded; cuts stay where they are."""
        self.padding, self.not_padded = None, cause
        log.warning("%s is not padded: %s", self.name, cause)
        self.release()

    def _writes_into_pool(self, args: Sequence[Any]) -> bool:
        inside = self._pool().contains()
        return any(inside(args[i.index]) for i in self.inputs if i.written and i.kind in (STAGED, PASSED))

    def _out_of_the_pool(self, args: Sequence[Any]) -> Sequence[Any]:
        """``args`` with copies of those that lie in the pool: recording may take the memory that they lie in."""
        inside = self._pool().contains()
        moved = list(args)
        for spec in self.inputs:
            value = args[spec.index]
            if spec.kind not in (STAGED, PASSED) or spec.written or not isinstance(value, torch.Tensor):
                continue
            if inside(value):
                moved[spec.index] = copy_of(value, whole=spec.name in self.split.reached_around)
        return moved

    def _record(self, key: Key, real: Key, args: Sequence[Any]) -> Plan | None:
        """Record for ``key``; None where it failed, with the cause kept in ``_failed``."""
        self._drop_dead_plans()
        self._make_room(key)
        pool = self._pool()
        try:
            self._check_use(key)
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
            self._failed.setdefault(key, Failure(cause)).again(cause)
            self.counters.failures[cause] += 1
            seen = _seen.get()
            if seen is not None:
                seen.failures.append(error)
            if self.options.strict:
                raise
            level = logging.DEBUG if type(error).__name__ in self._warned else logging.WARNING
            self._warned.add(type(error).__name__)
            log.log(level, "%s runs uncaptured for key %s: %s", self.name, key_text(key), error)
            return None
        self._failed.pop(key, None)
        self._keep(key, plan)
        seen = _seen.get()
        if seen is not None:
            seen.recorded.append((self, key, plan))
        return plan

    def _build(self, pool: GraphPool, key: Key, real: Key, args: Sequence[Any]) -> Plan:
        observed, seen, itself = self._observed[key]
        bucket = None
        if self.padding is not None:
            buckets = self.padding.buckets
            moving = frozenset(buckets.values(key))
            bucket = Bucket(self.padding.extents, buckets.symbols, key, seen, real, moving)
        return build_plan(
            pool,
            self.split,
            self.recordable,
            self.inputs,
            self.symbols,
            frozenset(self.key_symbols),
            observed,
            args,
            detached=self._detached,
            inference=self._inference,
            itself=itself,
            clone=self.clones,
            name=self.name,
            key=key_text(key),
            bucket=bucket,
        )

    def _check_use(self, key: Key) -> None:
        """Stop recording a key whose recordings are hardly replayed before their static inputs move on."""
        if self._wasted.get(key, 0) >= WASTE_ALLOWED:
            raise CaptureError(MOVES)

    def _moves(self, key: Key, args: Sequence[Any]) -> bool:
        """Whether some static inputs seem to move at every call while what they leave lives on.

        Layers that share a static input look alike, until they come for the second time. So once a few recordings
        wait to be replayed, the next ones are made for addresses that have been seen before.
        """
        plans = self.plans.get(key)
        if plans is None or self.options.strict or plans.unproven_like(args) <= WASTE_ALLOWED:
            return False
        seen, here = self._seen_once.setdefault(key, {}), plans.addresses(args)
        if here in seen:
            del seen[here]
            return False
        seen[here] = None
        if len(seen) > ADDRESS_SETS:
            del seen[next(iter(seen))]
        return True

    def _keep(self, key: Key, plan: Plan) -> None:
        before = self.plans.get(key, PlansByAddress(()))
        outdated = [p for p in before if p.static_addresses == plan.static_addresses]
        kept = [*before.without(*outdated), plan]
        outdated += kept[:-ADDRESS_SETS]
        after = self.plans[key] = PlansByAddress(kept[-ADDRESS_SETS:])
        for old in outdated:
            self._let_go(key, old)
        for watched in after if after.telling != before.telling else (plan,):
            self._watch(key, watched, after.telling)
        self.counters.captured[key] += 1

    def _watch(self, key: Key, plan: Plan, index: int | None) -> None:
        """Have a model that dies take its recordings along, although Dynamo keeps its compiled code.

        It is the static input that tells its plan from others' which must die: it may share the rest with models that
        live on.
        """
        tensor = None if index is None else plan.static_tensors[index]()
        if tensor is not None:
            plan.watch(weakref.finalize(tensor, _forget, weakref.ref(self), key, weakref.ref(plan)))

    def _let_go(self, key: Key, plan: Plan, *, trim: bool = True) -> None:
        self._wasted[key] = self._wasted.get(key, 0) + 1 if plan.runs <= 1 else 0
        plan.release(trim=trim)

    def forget(self, key: Key, plan: Plan, *, trim: bool = True, wasted: bool = True) -> None:
        """Let go of one plan of ``key``; ``wasted``: if it was hardly replayed, that counts."""
        plans = self.plans.get(key, ())
        if not any(p is plan for p in plans):
            return
        left = plans.without(plan)
        if left:
            self.plans[key] = PlansByAddress(left)
        else:
            self.plans.pop(key, None)
        if wasted:
            self._let_go(key, plan, trim=trim)
        else:
            plan.release(trim=trim)

    def _drop_dead_plans(self) -> None:
        """Plans whose static inputs are gone can never match again."""
        for key, plans in list(self.plans.items()):
            for plan in plans:
                if _is_dead(plan):
                    self.forget(key, plan)

    def release(self) -> None:
        """Drop every recording; later calls warm up and record again."""
        with self._lock:
            plans = [plan for by_address in self.plans.values() for plan in by_address]
            self.plans.clear()
            self._observed.clear()
            self._failed.clear()
            self._wasted.clear()
            self._seen_once.clear()
        for plan in plans:
            plan.release()

    # -- keys and results --------------------------------------------------------------------------------------------

    def _key_reader(self) -> Callable[[Sequence[Any]], Key]:
        symbols, read = self.key_symbols, self.symbols.read
        if not symbols:
            return lambda args: ()
        if all(s in self.symbols.sizes for s in symbols):
            indices = [self.symbols.sizes[s] for s in symbols]
            if len(indices) == 1:
                only = indices[0]
                return lambda args: (args[only],)
            return lambda args: tuple(args[i] for i in indices)
        return lambda args: tuple(_key_part(read(s, args)) for s in symbols)

    def _pool(self) -> GraphPool:
        return pool_of(self.device, self.options.lane)

    def _nested(self, outputs: list[Any]) -> Any:
        if self.split.spec is None:
            return outputs
        return torch.utils._pytree.tree_unflatten(outputs, self.split.spec)


def _is_dead(plan: Plan) -> bool:
    return any(s.expired() for s in plan.storages)


def _key_part(value: Any) -> Any:
    # Floats by their exact text: 0.0 and -0.0 are equal numbers and different values, NaN is not equal to itself.
    return value.hex() if isinstance(value, float) else value


def _forget(graph: weakref.ref[PiecewiseGraph], key: Key, plan: weakref.ref[Plan]) -> None:
    alive, dead = graph(), plan()
    if alive is not None and dead is not None:
        # A weight may die between a call and the reading of its static results.
        alive.forget(key, dead, trim=alive.clones)


def _symbols_in_pieces(split: Split) -> set[Any]:
    """Every symbol that shapes a value inside a piece, or that a piece takes as a number.

    Not those of storage offsets: a recording sees each input at an address of its own.
    """
    found: set[Any] = set()
    for group in split.pieces:
        for ref in group.inputs:
            if isinstance(ref, HostRef):
                found |= getattr(ref.expr, "free_symbols", set())
        for node in group.gm.graph.nodes:
            found |= _symbols_of(example(node))
    return found


def _symbols_around_pieces(gm: fx.GraphModule, split: Split, inputs: Sequence[Input]) -> set[Any]:
    """Every symbol that shapes what a recording has at an address of its own although no piece sees that shape: an
    input of which pieces see a cut's view, and what cuts return of memory that pieces read or make."""
    kept = {i.name for i in inputs if i.kind in (STAGED, STATIC)}
    in_pieces = {name for g in split.pieces for name in (*g.outputs, *(r.name for r in g.inputs if isinstance(r, Ref)))}
    memory = frozenset().union(*(split.storages.get(name, frozenset()) for name in in_pieces | kept))
    results = {name for g in split.cuts for name in g.outputs}
    shaped = kept | {
        n for n in results if split.roots.get(n, frozenset()) & kept or split.storages.get(n, memory) & memory
    }
    return {s for node in gm.graph.nodes if node.name in shaped for s in _symbols_of(example(node))}


def _symbols_of(value: Any) -> set[Any]:
    found: set[Any] = set()
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            sizes = [*leaf.shape, *leaf.stride()] if leaf.layout is torch.strided else []
        else:
            sizes = [leaf]
        for size in sizes:
            found |= getattr(expression(size), "free_symbols", set())
    return found
