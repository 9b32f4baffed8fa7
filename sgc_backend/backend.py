"""The Dynamo entry: options -> facts -> split -> compiled pieces -> plans by key. Owns reset()."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .checks import drop_checks_that_hold
from .config import Options, emulation_asked_for
from .constants import lift_constants
from .device import Device
from .devices import default_module, device_of
from .errors import OptionError, SgcError, StrictError
from .facts import attribute, example, is_wrapped_number
from .layout import Layout
from .marks import Marks
from .piece import compile_whole
from .piecewise import PiecewiseGraph, serial
from .pools import release_everything
from .recorders import enroll, recorders
from .regions import inline_regions
from .report import Explanation, explained
from .split import NotSplittableError
from .stats import Counters
from .symbols import UnboundSymbolError


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
        options: see `sgc_backend.config.Options` and the README's table; unknown names and bad values raise.
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
    cause = inline_regions(gm, marks)
    if cause:
        return WholeGraph(gm, example_inputs, checked, f"not captured: {cause}")
    lift_constants(gm, device.type)
    drop_checks_that_hold(gm)
    try:
        return PiecewiseGraph(Layout(gm, checked, marks, device))
    except (NotSplittableError, UnboundSymbolError) as error:
        return WholeGraph(gm, example_inputs, checked, f"not captured: {error}")


def _seen_by_users(error: SgcError) -> SgcError:
    """``error`` as Dynamo lets it through: anything else that a backend raises is wrapped in BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)

    def init(self: Any, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    def reduce(self: Any) -> Any:  # engines send errors between processes
        return kind, (str(error),)

    namespace: dict[str, Any] = {"__init__": init, "__reduce__": reduce, "__module__": kind.__module__}
    if error.__cause__ is not None:
        cause = error.__cause__
        namespace["__cause__"] = property(lambda self: cause)  # Dynamo raises such an error once more, "from None"
    shown = type(kind.__name__, (kind, ShortenTraceback), namespace)
    return shown(str(error)).with_traceback(error.__traceback__)


def reset() -> None:
    """Release every recording and give every pool's memory back. Idempotent; later captures start afresh.

    Compiled models record again as they are called; wrappers stay usable, and what they had recorded is to be captured
    again. Pool handles and capture streams change.

    Raises:
        CaptureNestedError: inside a capture session, a capture or a replay; nothing was released then.
    """
    release_everything()


def explain(fn: Callable[..., Any], *example_args: Any, **example_kwargs: Any) -> Explanation:
    """Run ``fn`` on an example and tell how it is split, cut, recorded and run.

    Args:
        fn: a model or function, compiled with this backend already (in place too, by ``model.compile(...)`` or as its
            ``forward``) or not; an uncompiled one is compiled with the default options.
        example_args, example_kwargs: passed to it, twice: the first call warms up, the second records. State that
            ``fn`` writes is written twice.

    Returns:
        An `Explanation`; print it, or read its ``graphs`` and ``breaks``. Breaks are seen when Dynamo compiles, so
        explain a fresh compilation to see them.

    Raises:
        OptionError: ``fn`` is no callable.
        Exception: whatever ``fn`` raises.
    """
    if not callable(fn):
        raise OptionError(f"explain: fn must be a model or function, got {type(fn).__name__}")
    target = fn if _is_compiled(fn) else torch.compile(fn, backend=sgc_piecewise)
    with torch.no_grad():
        return explained(lambda: target(*example_args, **example_kwargs), 2)


def _is_compiled(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is what torch.compile returned, or a module that is compiled in place."""
    if isinstance(fn, torch.nn.Module):
        in_place = getattr(fn, "_compiled_call_impl", None) is not None
        return in_place or isinstance(fn, torch._dynamo.OptimizedModule) or _is_compiled(fn.forward)
    return hasattr(fn, "_torchdynamo_orig_callable")


def _reset_compiled() -> None:
    """What torch._dynamo.reset() calls: compiled graphs let go of their recordings, wrappers keep theirs."""
    for recorder in recorders():
        if recorder.kind == "compiled":
            recorder.release()


sgc_piecewise.reset = _reset_compiled  # type: ignore[attr-defined]


class WholeGraph:
    """A Dynamo graph that is left whole and uncaptured, with the cause.

    Attributes:
        cause: why.
    """

    kind = "compiled"

    def __init__(self, gm: fx.GraphModule, examples: Sequence[Any], options: Options, cause: str) -> None:
        if options.strict and cause:
            raise StrictError(f"strict=True, and this graph can't be captured: {cause}")
        self.name = f"graph {next(serial)}"
        self.cause = cause
        self.counters = Counters()
        self._fn = compile_whole(gm, examples, options.inner)
        enroll(self)

    def __call__(self, *args: Any) -> Any:
        self.counters.uncaptured[self.cause] += 1
        return self._fn(*args)

    def release(self) -> None:
        """Nothing is recorded."""


def _device_for(gm: fx.GraphModule, options: Options) -> tuple[Device | None, str]:
    """The device that the graph can be captured on, or None and the cause."""
    found: dict[tuple[str, int | None], None] = {}
    for node in gm.graph.nodes:
        for leaf in torch.utils._pytree.tree_leaves(example(node)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if is_traceable_wrapper_subclass(leaf):
                return None, f"{node.name} is a tensor subclass ({type(leaf).__name__})"
            if not is_wrapped_number(node):
                found[(leaf.device.type, leaf.device.index)] = None
    accelerators = [d for d in found if d[0] not in ("cpu", "meta")]
    if _computes_gradients(gm, torch.is_grad_enabled()):
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


def _computes_gradients(gm: fx.GraphModule, on: bool) -> bool:
    """Whether a value wants a gradient where gradients are on, here or in a body of an operator.

    Args:
        gm: the graph.
        on: whether they are on in front of it.

    They may be on inside although they are off around the call, and the other way round. Where they are off, only views
    of parameters still say that they want one, and nothing is computed for them.
    """
    outer: list[bool] = []
    for node in gm.graph.nodes:
        switch = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if switch == "_set_grad_enabled":
            on = bool(node.args[0])
        elif switch == "_enter_inference_mode":
            outer.append(on)
            on = not node.args[0]
        elif switch == "_exit_inference_mode":
            on = outer.pop()
        bodies = [attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr"]
        if any(_computes_gradients(body, on) for body in bodies if isinstance(body, fx.GraphModule)):
            return True
        leaves = torch.utils._pytree.tree_leaves(example(node))
        if on and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            return True
    return False
