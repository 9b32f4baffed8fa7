"""What one call through torch.compile costs where everything is captured and nothing is staged.

A stack of simple layers, without an op that is cut, and an input whose address is marked static. What nobody can do
without: Dynamo's guards and its call into a backend that does nothing but return a tensor that it has, and the bare
replay of the one graph. Rows: that empty backend, torch's own graphs (mode="reduce-overhead"), and ours; those of few
layers and of many in one run. Every result but the empty backend's is compared with eager's, before and after it was
measured. On the emulated device, where times would mean nothing, what ours does behind Dynamo is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sgc_backend import reset, sgc_piecewise
from sgc_backend.executables import plain
from sgc_backend.seen import calls_seen

from .agree import must_agree
from .counting import count
from .decoder import dtype_on
from .environment import chosen_device
from .peers import why_not_captured
from .tables import say_counts, say_ratios, say_timings
from .timing import Ratio, Timing, measure, ratio

LAYERS_ON_GPU, LAYERS_ON_HOST = (16, 80), (2, 4)
HIDDEN_ON_GPU, HIDDEN_ON_HOST, TOKENS = 1024, 32, 16
FLOOR_TARGET, PEER_TARGET = 1.25, 0.7
EMPTY, PEER = "empty backend", "reduce-overhead"
Call = Callable[[], Any]


class Simple(nn.Module):
    """Layers that are small and many; [n, E] in and out."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Calls:
    """One model, called through Dynamo in every way.

    Attributes:
        ways: whose results are compared, by name.
        floors: what ours can't go below, by name.
    """

    def __init__(self, layers: int, module: Any, device: str, say: Callable[[str], None]) -> None:
        hidden = HIDDEN_ON_GPU if device == "cuda" else HIDDEN_ON_HOST
        with torch.device(device):
            self.model = Simple(layers, hidden).to(dtype_on(device)).eval()
            self.given = torch.randn(TOKENS, hidden, dtype=dtype_on(device))
        torch._dynamo.mark_static_address(self.given)
        self.inners = ("eager", "inductor") if device == "cuda" else ("eager",)  # inductor needs a C++ compiler
        self.ways: dict[str, Call] = {}
        self.floors: dict[str, Call] = {EMPTY: self._through(self._empty_backend())}
        self.floors[EMPTY]()
        if device == "cuda":
            self._add_peer(layers, say)
        for inner in self.inners:
            self._add_ours(inner, module)

    def _through(self, backend: Any, **settings: Any) -> Call:
        return partial(torch.compile(self.model, backend=backend, dynamic=False, **settings), self.given)

    def _empty_backend(self) -> Callable[..., Any]:
        had = (torch.zeros_like(self.given),)
        return lambda gm, example_inputs: lambda *args: had

    def _add_peer(self, layers: int, say: Callable[[str], None]) -> None:
        call = partial(torch.compile(self.model, mode="reduce-overhead", dynamic=False), self.given)
        cause = why_not_captured(call)
        if cause is None:
            self.ways[PEER] = call
        else:
            say(f"{PEER}, {layers} layers: skipped, {cause}")

    def _add_ours(self, inner: str, module: Any) -> None:
        name = ours(inner)
        options = {"inner": inner, "outputs": "static", "device_module": module}
        call = self.ways[name] = self._through(sgc_piecewise, options=options)
        for _ in range(2):  # warms up; records
            call()
        with calls_seen() as seen:
            call()
        found = [(len(r.plan.graphs), len(r.plan.staged)) for r in seen.replayed]
        if found != [(1, 0)]:
            raise RuntimeError(
                f"{name}: replayed (graphs, staged inputs) {found}, expected one graph and none staged; uncaptured: "
                f"{seen.uncaptured}"
            )
        (replayed,) = seen.replayed
        bare, empty = plain(replayed.plan.graphs[0]).replay, self.floors[EMPTY]
        self.ways[f"{name}, behind Dynamo"] = lambda: replayed.graph(*replayed.args)[0]
        self.floors[bare_of(name)] = bare
        self.floors[in_turn_of(name)] = lambda: (empty(), bare())

    def check(self) -> None:
        """Compare every way with eager on new inputs: bit for bit where eager's kernels run.

        Raises:
            RuntimeError: one differs.
        """
        self.given.normal_()
        expected, layers = self.model(self.given), len(self.model.layers)
        must_agree(expected, self.ways, inexact=(PEER, "inductor"), layers=layers)


def ours(inner: str) -> str:
    """The name of the row of ours."""
    return f"ours ({inner})"


def bare_of(name: str) -> str:
    """The name of its bare graph's row."""
    return f"bare replay of {name}"


def in_turn_of(name: str) -> str:
    """The name of the row of its floors in turn."""
    return f"{EMPTY}, then {bare_of(name)}"


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts."""
    module, device = chosen_device()
    layers = LAYERS_ON_GPU if device == "cuda" else LAYERS_ON_HOST
    say(f"\n{layers} simple layers, {TOKENS} rows, {dtype_on(device)}, input at a static address")
    try:
        # Dynamo keeps all of them for one piece of code
        with torch._dynamo.config.patch(recompile_limit=32):
            calls = {n: Calls(n, module, device, say) for n in layers}
            found = _times(calls, module, say) if device == "cuda" else _counts(calls, say)
    finally:
        torch._dynamo.reset()
        reset()
    return {"layers": layers, "rows of the input": TOKENS, **found}


def _named(calls: dict[int, Calls], kind: str) -> dict[str, Call]:
    return {f"{n} layers, {name}": call for n, one in calls.items() for name, call in getattr(one, kind).items()}


def _check(calls: dict[int, Calls]) -> None:
    for one in calls.values():
        one.check()


def _times(calls: dict[int, Calls], module: Any, say: Callable[[str], None]) -> dict[str, Any]:
    _check(calls)
    eager = {f"{n} layers, eager": partial(one.model, one.given) for n, one in calls.items()}
    rows = {**eager, **_named(calls, "ways"), **_named(calls, "floors")}
    timings = measure(rows, module.synchronize)
    _check(calls)
    say_timings(say, "dynamo", timings)
    ratios = say_ratios(say, _ratios(timings, calls), of=("host",))
    return {"rows": [t.as_dict() for t in timings.values()], "ratios": ratios}


def _ratios(t: dict[str, Timing], calls: dict[int, Calls]) -> list[tuple[Ratio, float | None]]:
    """Ratios with their targets. The sum of rows counts what overlaps twice, so the floors in turn stand beside."""
    found: list[tuple[Ratio, float | None]] = []
    for n, one in calls.items():

        def row(name: str, n: int = n) -> Timing:
            return t[f"{n} layers, {name}"]

        for name in map(ours, one.inners):
            found.append((ratio(row(name), row(EMPTY), row(bare_of(name))), FLOOR_TARGET))
            found.append((ratio(row(name), row(in_turn_of(name))), None))
            if PEER in one.ways:
                found.append((ratio(row(name), row(PEER)), PEER_TARGET))
        if PEER in one.ways:
            found.append((ratio(row(PEER), row(EMPTY), row(bare_of(ours(one.inners[-1])))), None))
    return found


def _counts(calls: dict[int, Calls], say: Callable[[str], None]) -> dict[str, Any]:
    _check(calls)
    behind = {name: call for name, call in _named(calls, "ways").items() if name.endswith("behind Dynamo")}
    bare = {name: call for name, call in _named(calls, "floors").items() if ", bare replay" in name}
    # `count` must not enter Dynamo
    counted = {name: count(call).as_dict() for name, call in {**behind, **bare}.items() if "then" not in name}
    _check(calls)
    say_counts(say, "dynamo", counted)
    return {"counts": counted}
