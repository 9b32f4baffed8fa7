"""A program run in two worlds, eager and compiled.

Compared after every call, bit by bit: outputs, every tensor that the caller has (inputs whole, parameters, buffers,
held outputs), which output lies in which memory, and the random generator.

Where they differ and pieces are compiled by one of torch's compilers, the fault may be that one's: it takes inputs that
overlap for views of each other, and a copy between overlapping views for one between tensors apart. So the program runs
again, against that compiler alone in the place of eager: in every call, or only in the call that differed, as the
backend may be right before where that compiler is wrong. What is the same then, errors and their texts included, is no
doing of the backend, but inherited.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import program_ops  # noqa: F401
import torch
from program_compare import Difference, compare_outputs, compare_roots, storage_of
from program_lines import ROWS, D
from program_trace import ByHand, UntraceableError
from program_world import EVENTS, HELD, STATE, Call, Case, World
from torch.utils import _pytree as pytree

import sgc_backend


class Compiled:
    """The program compiled, over the state of one world."""

    def __init__(self, case: Case, world: World) -> None:
        self.case, self.world = case, world
        self.module = torch.cuda if world.device == "cuda" else sgc_backend.emulated
        options = {"device_module": self.module, "capture_sizes": None, "inner": "eager", **case.options}
        backend = functools.partial(sgc_backend.sgc_piecewise, options=options)
        self.wrapper: Any = None
        if case.dynamo:
            self.fn = torch.compile(
                world.model, backend=sgc_backend.sgc_piecewise, dynamic=case.dynamic, options=options
            )
        else:
            static = [True] * len(STATE) + [False] * 6
            self.fn = ByHand(self._flat, static, backend, case.dynamic is not False)

    def _flat(self, *args: Any) -> Any:
        return self.world.model.fn(SimpleNamespace(**dict(zip(STATE, args, strict=False))), *args[len(STATE) :])

    def __call__(self, args: list[Any], call: Call) -> Any:
        with self._session(call):
            if self.case.dynamo:
                return self.fn(*args)
            return self.fn([*(getattr(self.world.model, name) for name in STATE), *args], call.n)

    def _session(self, call: Call) -> Any:
        return self._wrapper().capture_session(any_order=True) if call.session else contextlib.nullcontext()

    def _wrapper(self) -> Any:
        if self.wrapper is None:
            self.wrapper = sgc_backend.FullCudaGraphBackend(self.module)
        return self.wrapper

    def reset(self) -> None:
        sgc_backend.reset()

    def decode(self) -> None:
        """Replay something else from the same pool: it leaves its bytes wherever it may."""
        wrapper = self._wrapper()
        if not wrapper.can_run(1):
            source = torch.full((ROWS, D), float("nan"), device=self.world.device)
            with wrapper.capture_session(any_order=True):
                wrapper.capture_one(1, lambda: [source + i for i in range(12)])
        wrapper.replay(1)


@contextlib.contextmanager
def mode_of(call: Call) -> Iterator[None]:
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[call.mode]():
        yield


def run_case(case: Case, device: str = "cpu", tolerance: float = 0.0) -> str:
    """Run a case; returns how it ended: "equal", or why it ended early with nothing to compare.

    Raises:
        Difference: the two sides differ.
    """
    if device == "cpu" and not case.dynamo:
        torch.set_num_threads(1)
    if case.options.get("inner", "eager") != "eager":
        tolerance = max(tolerance, 1e-3)
    if case.options.get("capture_sizes") is not None and case.dynamic is not False:
        tolerance = max(tolerance, 1e-3)  # a product of more rows may add up in another order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(case, device, tolerance)
        except Difference as difference:
            inner = case.options.get("inner", "eager")
            if inner == "eager" or not case.dynamo:
                raise
            for only in (None, difference.call):
                torch._dynamo.reset()
                sgc_backend.reset()
                try:
                    _run(case, device, tolerance, alone=inner, only=only)
                except Difference as own:
                    difference.__cause__ = own
                else:
                    return "inherited"
            raise
        finally:
            if case.dynamo:
                torch._dynamo.reset()
            sgc_backend.reset()


def _run(case: Case, device: str, tolerance: float, alone: str = "", only: int | None = None) -> str:
    """As `run_case`; ``alone``: the compiler that takes eager's place, in call ``only``, which is the last then."""
    eager, ours = World(case, device), World(case, device)
    compiled = Compiled(case, ours)
    by_alone = torch.compile(eager.model, backend=alone, dynamic=case.dynamic) if alone else None
    for number, call in enumerate(case.calls if only is None else case.calls[: only + 1]):
        what = f"call {number} ({call})"
        try:
            lonely = by_alone is not None and only in (None, number)
            ended = _run_call(case, call, what, eager, ours, compiled, by_alone if lonely else None, tolerance)
        except Difference as difference:
            difference.call = number
            raise
        if ended:
            return ended
    return "equal"


def _run_call(
    case: Case, call: Call, what: str, eager: World, ours: World, compiled: Compiled, alone: Any, tolerance: float
) -> str:
    """Make one call on both sides and compare; returns how it ended the program, or ""."""
    static = case.options.get("outputs") == "static"
    reference = eager.model if alone is None else alone
    with torch.no_grad():
        if call.before in EVENTS:
            for world in (eager, ours):
                getattr(world, call.before)()
        elif call.before:
            if static:
                eager.held, ours.held = [], []
            getattr(compiled, call.before)()
    expected_args, got_args = eager.arguments(call), ours.arguments(call)
    borrowed = _borrowed(eager, expected_args) if static else []
    if static:
        eager.held, ours.held = [], []
    with mode_of(call):
        got, error = _outcome(lambda args=got_args, c=call: compiled(args, c), call)
        generator = torch.get_rng_state()
        if isinstance(error, UntraceableError) or _is_dynamos(error):
            return "untraceable"
        if isinstance(error, (sgc_backend.StrictError, sgc_backend.CaptureError)) and case.options.get("strict"):
            if case.dynamo or call.session:
                return "refused"  # a graph in front of a break, or the warm-up in a session, may have run
            compare_roots(eager, ours, f"{what}, refused by strict", tolerance)
            return ""
        expected, wanted_error = _outcome(lambda args=expected_args: reference(*args), call)
    if error is not None or wanted_error is not None:
        if error is not None and wanted_error is not None and (alone is None or repr(error) == repr(wanted_error)):
            return "both raise"
        if case.dynamo and error is None and alone is None:
            return "both raise"  # but for Dynamo, which leaves out what nothing reads
        raise Difference(f"{what}: eager raised {wanted_error!r}, compiled {error!r}") from error
    if not torch.equal(generator, torch.get_rng_state()):
        raise Difference(f"{what}: the random generator went on differently")
    (expected, spec), (got, got_spec) = pytree.tree_flatten(expected), pytree.tree_flatten(got)
    if spec != got_spec:
        raise Difference(f"{what}: the result is nested as {got_spec}, expected {spec}")
    skipped = compare_outputs(eager, ours, expected, got, borrowed, what, tolerance)
    for world, outputs in ((eager, expected), (ours, got)):
        world.held.append([None if i in skipped else _kept(o) for i, o in enumerate(outputs)])
    for world in (eager, ours):
        del world.held[:-HELD]
    compare_roots(eager, ours, what, tolerance)
    return ""


def _kept(output: Any) -> Any:
    return output.detach() if isinstance(output, torch.Tensor) and output.requires_grad else output


def _outcome(run: Any, call: Call) -> tuple[Any, BaseException | None]:
    torch.manual_seed(call.seed)
    try:
        return run(), None
    except Exception as error:
        return None, error


def _is_dynamos(error: BaseException | None) -> bool:
    kinds = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError, torch._dynamo.exc.InternalTorchDynamoError)
    return isinstance(error, kinds) and not isinstance(error, torch._dynamo.exc.BackendCompilerFailed)


def _borrowed(world: World, args: list[Any]) -> list[tuple[int, int]]:
    """Memory of arguments that are static results of the call before: it is worth nothing after the next replay."""
    results = [storage_of(o) for outputs in world.held for o in outputs if isinstance(o, torch.Tensor)]
    owned = [storage_of(t) for name, t in world.roots().items() if not name.startswith("held")]
    given = [storage_of(a) for a in args if isinstance(a, torch.Tensor)]
    return [span for span in given if span in results and span not in owned]
