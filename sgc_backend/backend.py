"""The Dynamo entry: options -> facts -> split -> compiled pieces -> plans by key. Owns reset()."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .builder import build_plan
from .capturable import Marks, why_not_capturable
from .config import Options, emulation_asked_for
from .device import Device, default_module, device_of, pointer_check
from .errors import OptionError, SgcError, StrictError
from .facts import example, gather_facts, is_wrapped_number
from .inputs import classify
from .piece import compile_group, compile_whole
from .plan import Plan
from .pool import GraphPool, enroll, pool_of, recorders, release_everything
from .report import Explanation, explained
from .split import NotSplittableError, Ref, Split, split_graph
from .stats import Counters, key_text
from .symbols import Symbols, UnboundSymbolError, expression
from .walk import CutResult, Walk

log = logging.getLogger(__name__)
_serial = itertools.count()
KEYS_REMEMBERED = 256  # keys warmed up or failed that are remembered besides the recorded ones
ADDRESS_SETS = 8  # plans kept for one key whose static inputs lie at different addresses


def sgc_piecewise(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The ``torch.compile`` backend: pieces captured as graphs, cuts run eagerly between them.

    Args:
        gm, example_inputs: what Dynamo hands over.
        options: see `Options`; unknown names and bad values raise.
        mode: refused: every mode of ``torch.compile`` belongs to inductor.

    Raises:
        OptionError: a bad option, or ``mode=`` was given.
        CutOpError: a name in ``cut_ops`` or ``capturable_ops`` resolves to no operator.

    What can't be captured runs compiled: graphs on the CPU (unless emulated), on two devices, that compute gradients,
    or that can't be split. `stats()` and `explain()` say which and why.
    """
    try:
        return _compile(gm, example_inputs, options, mode)
    except SgcError as error:
        raise _seen_by_users(error) from error.__cause__


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    if mode is not None:
        raise OptionError(
            f"mode={mode!r} is not supported by sgc_piecewise; modes configure inductor. Use options=, for example "
            f'options={{"capture_sizes": [1, 2, 4, 8]}}'
        )
    checked = Options.of(options)
    marks = Marks.of(checked.cut_ops, checked.capturable_ops)
    device, cause = _device_for(gm, checked)
    if device is None:
        return WholeGraph(gm, example_inputs, checked, cause)
    try:
        return PiecewiseGraph(gm, checked, marks, device)
    except (NotSplittableError, UnboundSymbolError) as error:
        return WholeGraph(gm, example_inputs, checked, f"not captured: {error}")


def _seen_by_users(error: SgcError) -> SgcError:
    """``error`` as Dynamo lets it through: anything else that a backend raises is wrapped in BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    def init(self: Any, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    kind = type(error)
    shown = type(kind.__name__, (kind, ShortenTraceback), {"__init__": init, "__module__": kind.__module__})
    return shown(str(error)).with_traceback(error.__traceback__)


def reset() -> None:
    """Release every recording and give every pool's memory back. Idempotent; later captures start afresh.

    Wrappers and compiled models stay usable: they record again. A recording held by hand refuses to replay.
    """
    release_everything()


def explain(fn: Callable[..., Any], *example_args: Any, **example_kwargs: Any) -> Explanation:
    """Run ``fn`` on an example and tell how it is split, cut, recorded and run.

    Args:
        fn: a model or function, compiled with this backend already or not; an uncompiled one is compiled with the
            default options.
        example_args, example_kwargs: passed to it, twice: the first call warms up, the second records. State that
            ``fn`` writes is written twice.

    Returns:
        An `Explanation`; print it, or read its ``graphs`` and ``breaks``. Breaks are seen when Dynamo compiles, so
        explain a fresh compilation to see them.

    Raises:
        Exception: whatever ``fn`` raises.
    """
    compiled = hasattr(fn, "_torchdynamo_orig_callable") or isinstance(fn, torch._dynamo.OptimizedModule)
    target = fn if compiled else torch.compile(fn, backend=sgc_piecewise)
    with torch.no_grad():
        return explained(lambda: target(*example_args, **example_kwargs), 2)


def _reset_compiled() -> None:
    """What torch._dynamo.reset() calls: compiled graphs let go of their recordings, wrappers keep theirs."""
    for recorder in recorders():
        if recorder.kind == "compiled":
            recorder.release()


sgc_piecewise.reset = _reset_compiled  # type: ignore[attr-defined]


class WholeGraph:
    """A Dynamo graph that is left whole and uncaptured, with the cause.

    Attributes:
        cause: why; empty where there is simply nothing to capture.
        calls: how often it ran.
    """

    kind = "compiled"

    def __init__(self, gm: fx.GraphModule, examples: Sequence[Any], options: Options, cause: str) -> None:
        if options.strict and cause:
            raise StrictError(f"strict=True, and this graph can't be captured: {cause}")
        self.name = f"graph {next(_serial)}"
        self.cause = cause
        self.counters = Counters()
        self._fn = compile_whole(gm, examples, options.inner)
        enroll(self)

    def __call__(self, *args: Any) -> Any:
        self.counters.uncaptured[self.cause] += 1
        return self._fn(*args)

    def release(self) -> None:
        """Nothing is recorded."""


class PiecewiseGraph:
    """One Dynamo graph: its split, its compiled pieces, and its plans by key.

    A key holds the values of the sizes and wrapped numbers that pieces see. Under one key there may be several plans,
    one for each set of addresses of the static inputs: layers that share code bring their own weights.
    """

    kind = "compiled"

    def __init__(self, gm: fx.GraphModule, options: Options, marks: Marks, device: Device) -> None:
        self.name = f"graph {next(_serial)}"
        self.options = options
        self.device = device
        self.counters = Counters()
        facts = gather_facts(gm, device.type)
        self.split: Split = split_graph(
            gm, facts, lambda node: why_not_capturable(node, facts, marks), wrap_numbers=options.inner != "eager"
        )
        self.symbols = Symbols(gm)
        read = {r.name for g in self.split.pieces for r in g.inputs if isinstance(r, Ref)}
        read |= {name for g in self.split.pieces for name in g.reads}
        self.inputs = classify(gm, read, {name for g in self.split.groups for name in g.writes})
        self.key_symbols = self.symbols.bound(_symbols_in_pieces(self.split))
        self.size_symbols = [s for s in self.key_symbols if s not in self.symbols.numbers]
        self._key = self._key_reader()
        self.compiled = [
            compile_group(g, options.inner) if g.kind == "piece" else g.gm.forward for g in self.split.groups
        ]
        # Emulated recordings can't see into compiled code; in a graph of eager pieces they can.
        self.recordable = [
            device.opaque(fn) if g.kind == "piece" and options.inner != "eager" else fn
            for g, fn in zip(self.split.groups, self.compiled, strict=True)
        ]
        self.walk = Walk(self.split, self.compiled, self.symbols, [i.name for i in self.inputs])
        self.plans: dict[tuple[Any, ...], list[Plan]] = {}
        self._observed: dict[tuple[Any, ...], dict[str, CutResult]] = {}
        self._failed: dict[tuple[Any, ...], str] = {}
        self._lock = threading.RLock()
        self._same_addresses = pointer_check()
        enroll(self)

    # -- the call ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        key = self._key(args)
        plans = self.plans.get(key)
        if plans is not None:
            for plan in plans:
                if self._same_addresses(list(args), plan.static_addresses, plan.static_indices):
                    if plan.aliased(args):
                        return self._uncaptured(args, "inputs share memory with what the graph writes")
                    self.counters.replayed[key] += 1
                    return self._nested(plan.run(args))
        return self._cold(key, args)

    def _cold(self, key: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """A call that no plan serves yet: warm up, record, or run compiled with its cause counted."""
        with self._lock:
            cause = self._why_not_now(key)
            if cause is not None:
                return self._uncaptured(args, cause)
            pool = self._pool()
            if key not in self._observed:
                out = self._warm_up(key, args)
                if self.options.capture == "session" or pool.session_depth:
                    self._record(key, args)
                return out
            plan = self._record(key, args)
            if plan is None:
                return self._uncaptured(args, self._failed[key])
            if plan.aliased(args):
                return self._uncaptured(args, "inputs share memory with what the graph writes")
            self.counters.replayed[key] += 1
            return self._nested(plan.run(args))

    def _why_not_now(self, key: tuple[Any, ...]) -> str | None:
        if not self.split.pieces:
            return "nothing to capture: no piece has a kernel"
        if key in self._failed:
            return self._failed[key]
        sizes = [v for s, v in zip(self.key_symbols, key, strict=True) if s not in self.symbols.numbers]
        if any(size == 0 for size in sizes):
            return "size 0 launches nothing"
        for size in sizes:
            if not self.options.is_capture_size(size):
                return "not a capture size"
        if self.options.capture == "session" and not self._pool().session_depth:
            return 'capture="session" and no capture session is open'
        if sum(map(len, self.plans.values())) >= self.options.max_recordings:
            self._drop_dead_plans()
            if sum(map(len, self.plans.values())) >= self.options.max_recordings:
                return "max_recordings reached"
        return None

    def _uncaptured(self, args: Sequence[Any], cause: str) -> Any:
        if self.options.strict:
            raise StrictError(f"strict=True, and this call of {self.name} would run uncaptured: {cause}")
        self.counters.uncaptured[cause] += 1
        return self._nested(self.walk.run(args))

    def _warm_up(self, key: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Answer the call compiled, on the capture stream: libraries and autotuners settle there for this size."""
        pool = self._pool()
        current = self.device.current_stream()
        observed: dict[str, CutResult] = {}
        with pool.warming_up():
            out = self.walk.run(args, observed)
        for value in out:
            if isinstance(value, torch.Tensor) and self.device.type != "cpu" and self.device.owns(value):
                value.record_stream(current)
        self.counters.uncaptured["warm-up"] += 1
        self._observed[key] = observed
        for settled in (self._observed, self._failed):
            while len(settled) > self.options.max_recordings + KEYS_REMEMBERED:
                del settled[next(iter(settled))]  # the oldest: keys that come once must not pile up
        return self._nested(out)

    def _record(self, key: tuple[Any, ...], args: Sequence[Any]) -> Plan | None:
        """Record for ``key``; None where it failed, with the cause kept in ``_failed``."""
        self._drop_dead_plans()
        pool = self._pool()
        try:
            if not pool.session_depth:
                self.device.synchronize()  # warm-up work on side streams must not own memory that a capture reuses
            plan = build_plan(
                pool,
                self.split,
                self.recordable,
                self.inputs,
                self.symbols,
                frozenset(self.key_symbols),
                self._observed[key],
                args,
                clone=self.options.outputs == "clone",
                what=f"{self.name}, key {key_text(key)}",
            )
        except Exception as error:
            cause = f"capture failed: {type(error).__name__}: {error}"
            self._failed[key] = cause
            self.counters.failures[cause] += 1
            if self.options.strict:
                raise
            log.warning("%s runs uncaptured for key %s: %s", self.name, key_text(key), error)
            return None
        plans = self.plans.setdefault(key, [])
        plans.insert(0, plan)
        for old in plans[ADDRESS_SETS:]:
            old.release()
        del plans[ADDRESS_SETS:]
        self.counters.captured[key] += 1
        return plan

    def _drop_dead_plans(self) -> None:
        """Plans whose static inputs are gone can never match again."""
        for key, plans in list(self.plans.items()):
            alive = [p for p in plans if not any(s.expired() for s in p.storages)]
            for plan in plans:
                if plan not in alive:
                    plan.release()
            if alive:
                self.plans[key] = alive
            else:
                del self.plans[key]

    def release(self) -> None:
        """Drop every recording; later calls warm up and record again."""
        with self._lock:
            for plans in self.plans.values():
                for plan in plans:
                    plan.release()
            self.plans.clear()
            self._observed.clear()
            self._failed.clear()

    # -- keys and results --------------------------------------------------------------------------------------------

    def _key_reader(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        symbols, read = self.key_symbols, self.symbols.read
        if not symbols:
            return lambda args: ()
        if all(s in self.symbols.sizes for s in symbols):
            indices = [self.symbols.sizes[s] for s in symbols]
            if len(indices) == 1:
                only = indices[0]
                return lambda args: (args[only],)
            return lambda args: tuple(args[i] for i in indices)
        return lambda args: tuple(read(s, args) for s in symbols)

    def _pool(self) -> GraphPool:
        return pool_of(self.device, self.options.lane)

    def _nested(self, outputs: list[Any]) -> Any:
        if self.split.spec is None:
            return outputs
        return torch.utils._pytree.tree_unflatten(outputs, self.split.spec)


def _symbols_in_pieces(split: Split) -> set[Any]:
    """Every symbol that a piece's inputs or results are shaped by."""
    found: set[Any] = set()
    for group in split.pieces:
        for node in group.gm.graph.nodes:
            value = example(node)
            for leaf in torch.utils._pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    sizes = [*leaf.shape, *leaf.stride(), leaf.storage_offset()] if leaf.layout is torch.strided else []
                else:
                    sizes = [leaf]
                for size in sizes:
                    found |= getattr(expression(size), "free_symbols", set())
    return found


def _device_for(gm: fx.GraphModule, options: Options) -> tuple[Device | None, str]:
    """The device that the graph can be captured on, or None and the cause."""
    found: dict[tuple[str, int | None], None] = {}
    needs_grad = False
    for node in gm.graph.nodes:
        for leaf in torch.utils._pytree.tree_leaves(example(node)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not is_wrapped_number(node):
                found[(leaf.device.type, leaf.device.index)] = None
            # Inside, gradients may be on although they are off around the call, and the other way round.
            needs_grad |= leaf.requires_grad and (torch.is_grad_enabled() or node.op != "placeholder")
    accelerators = [d for d in found if d[0] not in ("cpu", "meta")]
    if needs_grad:
        warnings.warn(
            "sgc_piecewise captures inference only; this graph computes gradients and runs uncaptured. "
            "Call the model under torch.no_grad() or torch.inference_mode() to have it captured",
            stacklevel=2,
        )
        return None, "gradients are wanted; call under torch.no_grad() or torch.inference_mode()"
    if len(accelerators) > 1:
        names = ", ".join(f"{kind}:{index}" for kind, index in accelerators)
        return None, f"the graph uses several devices ({names})"
    kind, index = accelerators[0] if accelerators else ("cpu", None)
    module = options.device_module
    if module is None:
        module = default_module(kind, emulated=emulation_asked_for())
    if module is None:
        return None, f"no graphs on device type {kind}; SGC_DEVICE=emulated emulates them on the host"
    device = device_of(module, index)
    if device.type != kind:
        return None, f"device_module is for {device.type} tensors, the graph computes on {kind}"
    return device, ""
