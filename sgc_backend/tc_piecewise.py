"""TcPiecewiseCudaGraphBackend: a callable compiled with sgc_piecewise for its sizes and replayed without Dynamo."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .backend import sgc_piecewise
from .config import Options, check_bool, checked_name, checked_sizes
from .device import pointer_check
from .errors import CaptureError, NotCapturedError, OptionError, ReplayError, StrictError
from .plan import Plan, PlanReleasedError
from .pool import GraphPool
from .reached import Reached
from .recorders import recorders
from .report import Explanation
from .seen import Replayed, Seen, calls_seen
from .shape_key import ShapeKey
from .tree import is_unrun
from .wrapper import CudaGraphBackend, Forward, refuse_unrun


@dataclass(frozen=True)
class Recording:
    """One key's plan with the arguments that it runs on.

    Attributes:
        plan: what a replay runs.
        args: for each of the graph's arguments what gives it: the caller's own buffers; parameters and other static
            inputs from where ``reached`` looks them up, or by a weak reference, since one that was replaced dies and
            must not be replayed with.
        held: the arguments themselves instead, where ``reached`` keeps the weights among them alive anyway.
        leaves: for each leaf of the callable's result the index of the plan's output that it is, or the value itself
            behind None.
        spec: how the leaves are nested.
        reached: what the callable finds for itself.
        alone: indices of the static arguments that are not among that.
        numbers: what the host read of its own tensors and the plan is made for, by the argument's index.
    """

    plan: Plan
    args: tuple[Callable[[], Any], ...]
    held: list[Any] | None
    leaves: tuple[tuple[int | None, Any], ...]
    spec: Any
    reached: Reached
    alone: list[int]
    key: ShapeKey
    numbers: tuple[tuple[int, Any], ...] = ()

    @property
    def pool(self) -> GraphPool:
        return self.plan.pool

    @property
    def generation(self) -> int:
        return self.plan.generation


class TcPiecewiseCudaGraphBackend(CudaGraphBackend):
    """Compiles a callable once for all sizes, records it piecewise per key, and replays a key's plan on its own.

    `replay` enters neither Dynamo nor its guards: it reads the buffers that the callable was captured with, at their
    addresses, as the other wrappers do. Outputs lie in the pool and are valid until the next replay from it.

    Args:
        fn: the module or function to compile.
        capture_sizes: the sizes that `_run_compile_pass` records; `capture_one` takes any other.
        options: further options of sgc_piecewise; ``capture``, ``capture_sizes``, ``outputs``, ``lane`` and
            ``device_module`` are set here.
        device_module, lane, name, check_addresses: see `CudaGraphBackend`.
        strict: raise where sizes need more than one compilation, instead of warning.

    Raises:
        OptionError: a bad option or capture size, or ``fn`` is no callable.
    """

    kind = "tc_piecewise"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        capture_sizes: Sequence[int],
        options: Mapping[str, Any] | None = None,
        device_module: Any = None,
        lane: str | None = None,
        name: str | None = None,
        check_addresses: bool = True,
        strict: bool = False,
    ) -> None:
        # What is refused must not be enrolled: it may live as long as the error.
        called = self.kind if name is None else checked_name(name)
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"{called}: options must be a dict, got {type(options).__name__}")
        Options.of(options)  # what is wrong is said here, not when the first size is compiled
        own = {"capture", "capture_sizes", "outputs", "lane", "device_module"} & set(options or ())
        if own:
            raise OptionError(f"{called}: {', '.join(sorted(own))} can't be given in options; the wrapper sets them")
        if not callable(fn):
            raise OptionError(f"{called}: fn must be a module or function, got {type(fn).__name__}")
        check_bool(f"{called}: strict", strict)
        self.capture_sizes = checked_sizes(f"{called}: capture_sizes", capture_sizes)[::-1]
        super().__init__(device_module, lane=lane, name=name, check_addresses=check_addresses)
        self._graphs: dict[str, Any] = {}  # Dynamo graphs that the sizes needed, by name
        self.strict = strict
        self._fn, self._options = fn, dict(options or {})
        settings = {
            "max_recordings": max(64, len(self.capture_sizes)),
            **(options or {}),
            "capture": "session",
            "capture_sizes": None,  # what a session calls is recorded: lengths that go with the rows are sizes too
            "outputs": "static",
            "device_module": self.device.module,
            "lane": lane,
        }
        self.compiled = torch.compile(fn, backend=sgc_piecewise, dynamic=True, options=settings)
        self._same_addresses = pointer_check()

    def _settings(self) -> dict[str, Any]:
        own = {"fn": self._fn, "capture_sizes": self.capture_sizes, "options": self._options, "strict": self.strict}
        return {**super()._settings(), **own}

    def _run_compile_pass(
        self,
        example: Callable[[int], tuple[Any, ...] | Mapping[str, Any]],
        *,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """Compile and record every capture size, largest first, inside a capture session.

        Args:
            example: the arguments for a size, a tuple or a dict of keywords: slices of buffers that stay where they
                are. The buffers should have more rows than the largest size, because Dynamo compiles a whole buffer
                apart from its slices.
            progress: called as ``progress(done, of, size)`` behind each size.

        Raises:
            OptionError: ``example`` or ``progress`` is no callable, or ``example`` returned something else.
            CaptureError: see `capture_one`.
            StrictError: strict, and the sizes needed more than one compilation.
        """
        for what, given in (("example", example), ("progress", progress)):
            if not callable(given) and (what == "example" or given is not None):
                raise OptionError(f"{self.name}: {what} must be a callable, got {type(given).__name__}")
        for done, size in enumerate(self.capture_sizes, 1):
            given = example(size)
            if not isinstance(given, (tuple, list, Mapping)):
                raise OptionError(
                    f"{self.name}: example({size}) must return a tuple of arguments or a dict of keywords, got "
                    f"{type(given).__name__}"
                )
            args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
            self.capture_one(size, lambda args=args, kwargs=kwargs: self.compiled(*args, **kwargs))
            if progress is not None:
                progress(done, len(self.capture_sizes), size)
        self.check_compilations(1)

    def check_compilations(self, expected: int) -> None:
        """Warn where what was captured so far needed more compilations than ``expected``.

        Raises:
            StrictError: strict, and it needed more.
        """
        # A graph that took over from another one, in which a capture failed, is no compilation of its own.
        found = {id(graph.layout.gm): name for name, graph in self._graphs.items()}
        if len(found) > expected:
            text = f"{self.name}: the capture sizes needed {len(found)} compilations ({', '.join(found.values())})"
            if self.strict:
                raise StrictError(text)
            warnings.warn(text, stacklevel=3)

    def capture_one(
        self, key: ShapeKey | int, forward_fn: Forward, *, post_warmup_hook: Callable[[], None] | None = None
    ) -> Any:
        """See `CudaGraphBackend.capture_one`; but ``forward_fn``, which calls ``self.compiled`` once, is called twice.

        The first call compiles where needed, warms up and records, and the second, behind the hook, replays: the output
        holds values. Where the capture fails in a custom op, a call more warms up and records with the op cut.

        Raises:
            CaptureError: outside a capture session; or the second call did more or less than to replay one Dynamo
                graph and return its results.
        """
        key = ShapeKey.of(key)
        self._session_pool(key, forward_fn, post_warmup_hook)
        made: list[Seen] = []
        try:
            out, recording, graph = self._record(key, forward_fn, post_warmup_hook, made)
        except BaseException:
            for seen in made:
                seen.undo()
            raise
        replaced = self._recordings.get(key.plain)
        self._recordings[key.plain] = recording
        self._graphs[graph.name] = graph
        self.counters.captured[key.plain] += 1
        if replaced is not None:  # where weights moved, the graph has a plan for each place
            self._let_go([replaced])
        return out

    def _record(
        self, key: ShapeKey, forward_fn: Forward, hook: Callable[[], None] | None, made: list[Seen]
    ) -> tuple[Any, Recording, Any]:
        """The output, the recording and its Dynamo graph. ``made`` gets what was seen meanwhile, errors or not."""
        what = f"{self.name}, key {key}"
        with torch.no_grad():
            first = _watched(forward_fn, made)  # compiles where needed, warms up, and records
            while first.replaced:  # each time at one op less
                first = _watched(forward_fn, made)
            if hook is not None:
                hook()
            reached = self._reached(self._fn)
            with calls_seen() as seen:
                made.append(seen)
                out = forward_fn()
            self._settle(reached, what)
        if len(seen.replayed) != 1 or seen.uncaptured:
            causes = "".join(f"; {graph} ran uncaptured: {cause}" for graph, cause in seen.uncaptured)
            if not seen.replayed and not causes:
                causes = (
                    "; where it does call self.compiled, Dynamo has given that up: at its recompile limit, or since a "
                    "call without tensors (torch._dynamo.reset() lets it compile again)"
                )
            raise CaptureError(
                f"{what}: the callable replayed {len(seen.replayed)} Dynamo graphs{causes}. A replay without Dynamo "
                f"needs exactly one: call self.compiled once and nothing else compiled, and without graph breaks "
                f"(TORCH_LOGS=graph_breaks names them)"
            ) from next(iter(first.failures + seen.failures), None)
        return out, _bound(seen.replayed[0], out, what, reached, key), seen.replayed[0].graph

    def explain(self) -> Explanation:
        """How what was recorded is split, cut, recorded and run. Runs nothing, so it can't tell Dynamo's breaks."""
        return Explanation(list(self._graphs.values()))

    def can_run(self, key: ShapeKey | int) -> bool:
        recording = self._recordings.get(ShapeKey.of(key).plain)
        return recording is not None and not recording.plan.released

    def replay(self, key: ShapeKey | int) -> Any:
        recording = self._found(key)
        plan = recording.plan
        try:
            args = recording.held or [give() for give in recording.args]
        except LookupError:  # a weight that was deleted
            args = [None]
        alone = recording.alone if self.check_addresses else ()
        if any(arg is None for arg in args) or (alone and not self._same_addresses(args, plan.static_addresses, alone)):
            raise ReplayError(
                f"{self.name}: weights moved since key {key} was captured; update them in place, or capture it again"
            )
        self._check_in_place(recording)
        for index, number in recording.numbers:
            if args[index].item() != number:
                raise ReplayError(
                    f"{self.name}: argument {index} of the graph, a host tensor that is read, was {number} when key "
                    f"{key} was captured and is {args[index].item()} now; capture one variant for each value"
                )
        try:
            outputs = plan.run(args)
        except PlanReleasedError:
            if self._recordings.get(recording.key.plain, recording) is not recording:  # replaced by another thread
                return self.replay(key)
            raise NotCapturedError(
                f"{self.name}: the recording under key {key} was released (a reset, or its weights are gone); "
                f"capture it again"
            ) from None
        self.counters.replayed[recording.key.plain] += 1
        leaves = [value if index is None else outputs[index] for index, value in recording.leaves]
        return pytree.tree_unflatten(leaves, recording.spec)

    def release(self) -> None:
        recordings, self._recordings = self._recordings, {}
        self._graphs.clear()
        self._let_go(recordings.values())

    def _let_go(self, recordings: Iterable[Recording]) -> None:
        # Keys may share a plan, and wrappers of one callable with the same settings share its compiled graph.
        wrappers = [r for r in recorders() if r.kind == self.kind]
        shared = {id(recording.plan) for wrapper in wrappers for recording in list(wrapper._recordings.values())}
        for recording in recordings:
            if id(recording.plan) not in shared:
                recording.plan.release()


def _watched(forward_fn: Forward, made: list[Seen]) -> Seen:
    with calls_seen() as seen:
        made.append(seen)
        forward_fn()
    return seen


def _bound(replayed: Replayed, out: Any, what: str, reached: Reached, key: ShapeKey) -> Recording:
    """Where each leaf of the callable's result comes from."""
    leaves, spec = pytree.tree_flatten(out)
    found: list[tuple[int | None, Any]] = []
    for leaf in leaves:
        if is_unrun(leaf):
            refuse_unrun(leaf, what)
        index = next((k for k, value in enumerate(replayed.outputs) if value is leaf), None)
        if index is None and isinstance(leaf, torch.Tensor):
            raise CaptureError(
                f"{what}: the callable returns a tensor that its graph does not; "
                f"return the compiled call's result as it is, and of a weight or an input that is returned a copy"
            )
        found.append((index, None if index is not None else leaf))
    static = set(replayed.plan.static_indices)
    static |= {k for k, a in enumerate(replayed.args) if isinstance(a, torch.nn.Parameter)}
    known = reached.addresses()
    alone = [k for k in replayed.plan.static_indices if replayed.plan.static_addresses[k] not in known]
    held = list(replayed.args) if reached.keeps(replayed.args[k] for k in static) else None
    args: tuple[Callable[[], Any], ...] = ()
    if held is None:
        found_at = reached.finders()
        # What has a weak reference is refused by torch.utils.swap_tensors.
        weak = {k: found_at.get(id(replayed.args[k])) or weakref.ref(replayed.args[k]) for k in static}
        args = tuple(weak.get(k) or _held(a) for k, a in enumerate(replayed.args))
    return Recording(replayed.plan, args, held, tuple(found), spec, reached, alone, key, _numbers(replayed, what))


def _numbers(replayed: Replayed, what: str) -> tuple[tuple[int, Any], ...]:
    layout, read = replayed.graph.layout, {}
    for symbol, index in layout.symbols.items.items():
        if symbol in layout.key_symbols:
            if layout.inputs[index].written:
                raise CaptureError(f"{what}: the graph reads a number of {layout.inputs[index].label} and writes to it")
            read[index] = replayed.args[index].item()
    return tuple(read.items())


def _held(value: Any) -> Callable[[], Any]:
    return lambda: value
