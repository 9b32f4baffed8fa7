"""A program run in two worlds, eager and compiled, and the first difference between them.

Compared after every call, bit by bit: outputs, every tensor that the caller has (inputs whole, parameters, buffers,
held outputs), which output lies in which memory, and the random generator.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from program_lines import ROWS, D
from program_trace import ByHand, UntraceableError
from torch import nn

import sgc_backend

STATE = ("w", "b", "tied", "cache", "ring", "count")
HELD = 6  # results and inputs of as many calls stay the caller's


class Difference(AssertionError):
    """What eager does and what the compiled program does are not the same."""


@dataclass(frozen=True)
class Call:
    """One call: its size, how its inputs lie in memory, its mode, and what happens in front of it.

    Attributes:
        before: "", or the name of one of `World`'s or `Compiled`'s events.
    """

    n: int
    x: str = "fresh"
    y: str = "fresh"
    z: bool = False
    k: int = 2
    f: float = 0.5
    mode: str = "no_grad"
    before: str = ""
    session: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A program and its calls.

    Attributes:
        lines: the function's body.
        returned: expressions that it returns.
        options: of the backend.
        dynamo: compiled by torch.compile, otherwise its graph is made by program_trace.
        dynamic: as torch.compile's.
        grad: whether the parameters want gradients.
        ring: "own", or "cache" where m.ring is a part of m.cache.
    """

    lines: tuple[str, ...]
    returned: tuple[str, ...]
    calls: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dynamo: bool = False
    dynamic: bool | None = True
    grad: bool = False
    ring: str = "own"

    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def fn(m, x, y, idx, z, k, f):\n{body}    return ({', '.join(self.returned)},)\n"

    def text(self) -> str:
        """The whole case, as code that can be read and run again."""
        calls = "".join(f"    {call},\n" for call in self.calls)
        rest = {k: getattr(self, k) for k in ("options", "dynamo", "dynamic", "grad", "ring")}
        more = "".join(f"    {k}={v!r},\n" for k, v in rest.items())
        return f"{self.source()}Case(\n    {self.lines!r},\n    {self.returned!r},\n    ({calls}),\n{more})"


class Program(nn.Module):
    """The function over its state."""

    def __init__(self, fn: Any, grad: bool, ring: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.w = nn.Parameter(torch.randn(D, D, generator=generator) * 0.3, requires_grad=grad)
        self.b = nn.Parameter(torch.randn(D, generator=generator), requires_grad=grad)
        self.tied = self.w
        self.register_buffer("cache", torch.randn(ROWS, D, generator=generator))
        own = torch.randn(4, D, generator=generator)
        self.register_buffer("ring", self.cache[3:7] if ring == "cache" else own)
        self.register_buffer("count", torch.zeros(()))
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


class World:
    """What one side's caller has.

    Attributes:
        roots: tensors over whole storages, by a name that both sides share.
        held: results of earlier calls.
    """

    def __init__(self, case: Case, device: str) -> None:
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(case.source(), "<program>", "exec"), space)
        self.device = device
        self.model = Program(space["fn"], case.grad, case.ring)
        if device != "cpu":
            self.model.to(device)
            if case.ring == "cache":
                self.model.ring = self.model.cache[3:7]
        self.bases: dict[str, torch.Tensor] = {}
        self.held: list[list[Any]] = []
        self.last_x: torch.Tensor | None = None
        self.calls = 0

    def roots(self) -> dict[str, torch.Tensor]:
        found = {f"m.{name}": getattr(self.model, name) for name in STATE}
        found |= self.bases
        for age, outputs in enumerate(self.held):
            found |= {f"held {age}.{i}": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
        return found

    def arguments(self, call: Call) -> list[Any]:
        self.calls += 1
        generator = torch.Generator().manual_seed(call.seed)
        x = self._rows("x", call.x, call.n, generator)
        y = x if call.y == "x" else self._rows("y", call.y, call.n, generator)
        if call.y in ("over", "halves"):
            step = 1 if call.y == "over" else call.n
            base = self._base("xy", torch.randn(call.n + step, D, generator=generator))
            x, y = base[: call.n], base[step : step + call.n]
        self.last_x = x
        idx = self._base("idx", torch.randperm(ROWS, generator=generator)[: call.n])
        z = self._base("z", torch.randn((), generator=generator)) if call.z else None
        for name in list(self.bases)[: max(0, len(self.bases) - 4 * HELD)]:
            del self.bases[name]
        return [x, y, idx, z, call.k, call.f]

    def _base(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        self.bases[f"{name} of call {self.calls}"] = tensor
        return tensor

    def _rows(self, name: str, kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
        if kind == "prev":
            for output in reversed(self.held[-1] if self.held else []):
                if isinstance(output, torch.Tensor) and output.shape == (n, D) and output.dtype == torch.float32:
                    return output.detach()
        if kind == "again" and self.last_x is not None and self.last_x.shape[0] == n:
            return self.last_x
        if kind == "cache":
            return self.model.cache[2 : 2 + n]
        if kind == "t":
            return self._base(name, torch.randn(D, n, generator=generator)).t()
        if kind in ("offset", "wide", "strided", "expanded"):
            shape = {"offset": (n + 3, D), "expanded": (1, D)}.get(kind, (n, 2 * D))
            base = self._base(name, torch.randn(shape, generator=generator))
            views = {"offset": base[2 : 2 + n], "wide": base[:, 4:12], "strided": base[:, ::2]}
            return views[kind] if kind in views else base.expand(n, D)
        return self._base(name, torch.randn(n, D, generator=generator))

    # -- what happens between calls, alike on both sides --------------------------------------------------------------

    def write_weight(self) -> None:
        with torch.no_grad():
            self.model.w.mul_(-0.75)
            self.model.b.add_(0.25)

    def data_weight(self) -> None:
        self.model.w.data = self.model.w.data.clone() * 0.5

    def new_weight(self) -> None:
        self.model.b = nn.Parameter(self.model.b.detach() + 1, requires_grad=self.model.b.requires_grad)

    def new_cache(self) -> None:
        self.model.cache = self.model.cache.detach() * 0.5

    def write_cache(self) -> None:
        with torch.no_grad():
            self.model.cache.add_(0.5)

    def write_held(self) -> None:
        with torch.inference_mode():
            for output in (o for outputs in self.held for o in outputs):
                if isinstance(output, torch.Tensor) and output.is_floating_point() and 0 not in output.stride():
                    output.fill_(0.125)


EVENTS = ("write_weight", "data_weight", "new_weight", "new_cache", "write_cache", "write_held")
COMPILED_EVENTS = ("reset", "decode")


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(case, device, tolerance)
        finally:
            if case.dynamo:
                torch._dynamo.reset()
            sgc_backend.reset()


def _run(case: Case, device: str, tolerance: float) -> str:
    eager, ours = World(case, device), World(case, device)
    compiled = Compiled(case, ours)
    static = case.options.get("outputs") == "static"
    for number, call in enumerate(case.calls):
        what = f"call {number} ({call})"
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
            if isinstance(error, sgc_backend.StrictError) and case.options.get("strict"):
                if case.dynamo:
                    return "refused"  # a graph in front of a graph break may have run
                compare_roots(eager, ours, f"{what}, refused by strict", tolerance)
                continue
            expected, wanted_error = _outcome(lambda args=expected_args: eager.model(*args), call)
        if error is not None or wanted_error is not None:
            if error is not None and wanted_error is not None:
                return "both raise"
            if isinstance(error, sgc_backend.ReplayError) and "pass a copy of it" in str(error):
                return "refused"
            raise Difference(f"{what}: eager raised {wanted_error!r}, compiled {error!r}") from error
        if not torch.equal(generator, torch.get_rng_state()):
            raise Difference(f"{what}: the random generator went on differently")
        compare_outputs(eager, ours, list(expected), list(got), borrowed, what, tolerance)
        eager.held.append([_kept(o) for o in expected])
        ours.held.append([_kept(o) for o in got])
        for world in (eager, ours):
            del world.held[:-HELD]
        compare_roots(eager, ours, what, tolerance)
    return "equal"


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
    results = [_storage(o) for outputs in world.held for o in outputs if isinstance(o, torch.Tensor)]
    owned = [_storage(t) for name, t in world.roots().items() if not name.startswith("held")]
    given = [_storage(a) for a in args if isinstance(a, torch.Tensor)]
    return [span for span in given if span in results and span not in owned]


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# -- comparing --------------------------------------------------------------------------------------------------------


def compare_roots(eager: World, ours: World, what: str, tolerance: float) -> None:
    wanted, got = eager.roots(), ours.roots()
    for name, value in wanted.items():
        compare_tensor(value, got[name], f"{what}: the caller's {name}", tolerance)


def compare_outputs(
    eager: World,
    ours: World,
    wanted: list[Any],
    got: list[Any],
    borrowed: list[tuple[int, int]],
    what: str,
    tolerance: float,
) -> None:
    if len(wanted) != len(got):
        raise Difference(f"{what}: {len(wanted)} outputs expected, {len(got)} came")
    skipped = {
        i
        for i, w in enumerate(wanted)
        if isinstance(w, torch.Tensor) and any(a <= w.data_ptr() < b for a, b in borrowed)
    }
    for i, (w, g) in enumerate(zip(wanted, got, strict=True)):
        if i not in skipped:
            if isinstance(w, torch.Tensor) and isinstance(g, torch.Tensor):
                compare_tensor(w, g, f"{what}: output {i}", tolerance, layout=True)
            elif type(w) is not type(g) or w != g:
                raise Difference(f"{what}: output {i} is {g!r}, expected {w!r}")
    pairs = [(i, w, g) for i, (w, g) in enumerate(zip(wanted, got, strict=True)) if _has_bytes(w) and i not in skipped]
    for i, w, g in pairs:
        if _home(w, eager) != _home(g, ours):
            raise Difference(f"{what}: output {i} lies in {_home(g, ours)}, expected {_home(w, eager)}")
    for i, w, g in pairs:
        for j, w2, g2 in pairs[:i]:
            if j < i and _storage(w) == _storage(w2) and g.data_ptr() - g2.data_ptr() != w.data_ptr() - w2.data_ptr():
                raise Difference(f"{what}: outputs {j} and {i} share memory, and do not when compiled")
            if j < i and _storage(w) != _storage(w2) and _overlap(_span(g), _span(g2)):
                raise Difference(f"{what}: outputs {j} and {i} share memory when compiled, and should not")


def _has_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _home(tensor: torch.Tensor, world: World) -> tuple[str, int] | None:
    """The caller's tensor that ``tensor`` lies in, and the offset of its first byte to that one's."""
    at = tensor.data_ptr()
    for name, root in world.roots().items():
        start, end = _storage(root)
        if start <= at < end:
            return name, at - root.data_ptr()
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def compare_tensor(wanted: torch.Tensor, got: torch.Tensor, what: str, tolerance: float, layout: bool = False) -> None:
    if (wanted.shape, wanted.dtype, wanted.requires_grad) != (got.shape, got.dtype, got.requires_grad):
        describe = [f"{tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for t in (got, wanted)]
        raise Difference(f"{what} is {describe[0]}, expected {describe[1]}")
    if layout and wanted.numel():
        strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (got, wanted)]
        if strides[0] != strides[1]:
            raise Difference(f"{what} has strides {got.stride()}, expected {wanted.stride()}")
        if (wanted.is_conj(), wanted.is_neg()) != (got.is_conj(), got.is_neg()):
            raise Difference(f"{what} has other conjugate or negative bits")
    with torch.no_grad():
        a, b = (t.detach().resolve_conj().resolve_neg() for t in (wanted, got))
        if tolerance:
            equal = torch.allclose(a.cpu(), b.cpu(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            equal = _same_bits(a, b)
    if not equal:
        raise Difference(f"{what} is\n{got}\nexpected\n{wanted}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return not a.is_floating_point() or torch.equal(torch.signbit(a), torch.signbit(b))
    if not (a.is_floating_point() or a.is_complex()):
        return False
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])
