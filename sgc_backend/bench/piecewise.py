"""What a piecewise forward costs the host by its number of layers, and what one more piece costs.

Each decoder is run at a capture size, with cuts that write into a buffer of their caller's, and at a size below it,
which is padded, with cuts that return new tensors. Ways: the compiled module's call, with static outputs; the same
behind Dynamo's guards; the replay by key, which enters no Dynamo. The floor is what neither can do without: the cut ops
on tensors of their own, and the bare replays of the recorded graphs.

The few layers and the many are measured in one run, so that what a piece more costs is their difference. Every way's
result is compared with eager's, before and after it was measured. On the emulated device, where times would mean
nothing, what each does is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sgc_backend import TcPiecewiseCudaGraphBackend, reset, sgc_piecewise
from sgc_backend.executables import plain
from sgc_backend.seen import Replayed, calls_seen

from .agree import must_agree
from .attention import Prefill, attend, attend_apart, attention
from .counting import count
from .decoder import ON_GPU, ON_HOST, Size, decoder, dtype_on
from .environment import chosen_device
from .peers import why_not_captured
from .tables import say_counts, say_ratios, say_timings
from .timing import Ratio, Timing, measure, ratio, slope

LAYERS_ON_GPU, LAYERS_ON_HOST = (16, 80), (2, 4)
TOKENS, FEWER = 16, 13  # a capture size, and one that runs in its recordings
EXACT, PADDED = "exact", "padded"
EXACT_TARGET, PADDED_TARGET, PIECE_TARGET = 1.05, 1.25, 1.05
ROUNDS = 20
WAYS = ("compiled", "behind Dynamo", "by key")
CUTS, REPLAYS, IN_TURN = "cut ops alone", "bare replays", "in turn"
OVERHEAD_PEERS = ("reduce-overhead, attention captured", "reduce-overhead, attention cut")
Call = Callable[[], Any]


class Stack:
    """One decoder, recorded for `TOKENS` with either kind of cut.

    Attributes:
        calls: ways, by name.
        floors: what they can't go below, by name.
    """

    def __init__(self, size: Size, module: Any, device: str) -> None:
        self.size, self.module = size, module
        like = {"device": device, "dtype": dtype_on(device)}
        head = size.hidden // size.heads
        # One row more than the capture size, or Dynamo compiles that one apart.
        self.given = torch.zeros(TOKENS + 1, size.hidden, **like)
        self.models = {EXACT: decoder(size, device, Prefill(attend)), PADDED: decoder(size, device, attention)}
        self.models[PADDED].load_state_dict(self.models[EXACT].state_dict(), assign=True)
        self.rows = {EXACT: TOKENS, PADDED: FEWER}
        # of each layer: one set for all would stay in the host's caches
        self._qkv = [torch.zeros(TOKENS, 3, size.heads, head, **like) for _ in range(size.layers)]
        self._out = [torch.zeros(TOKENS, size.heads, head, **like) for _ in range(size.layers)]
        self.calls: dict[str, Call] = {}
        self.floors: dict[str, Call] = {}
        self._record()

    def _record(self) -> None:
        options = {"inner": "eager", "cut_ops": [attend, attention]}
        self.by_key = TcPiecewiseCudaGraphBackend(
            self.models[EXACT], capture_sizes=(TOKENS,), options=options, device_module=self.module
        )
        settings = {**options, "capture_sizes": (TOKENS,), "device_module": self.module, "outputs": "static"}
        compiled = {
            EXACT: self.by_key.compiled,
            PADDED: torch.compile(self.models[PADDED], backend=sgc_piecewise, dynamic=True, options=settings),
        }
        with self.by_key.capture_session():
            held = self.given[:TOKENS]
            self.by_key.capture_one(TOKENS, lambda: compiled[EXACT](held))
            compiled[PADDED](held)
        for kind, call in compiled.items():
            given = self.given[: self.rows[kind]]
            self.calls[f"{kind}, compiled"] = partial(call, given)
            (replayed,) = self._replayed(self.calls[f"{kind}, compiled"], kind)
            self.calls[f"{kind}, behind Dynamo"] = lambda r=replayed: r.graph(*r.args)[0]
            self._add_floors(kind, [plain(graph).replay for graph in replayed.plan.graphs])
        self.calls[f"{EXACT}, by key"] = lambda: self.by_key.replay(TOKENS)

    def _replayed(self, call: Call, kind: str) -> list[Replayed]:
        with calls_seen() as seen:
            call()
        graphs = [len(r.plan.graphs) for r in seen.replayed]
        if graphs != [self.size.layers + 1]:
            raise RuntimeError(
                f"{kind}: replayed {graphs} graphs of {self.size.layers} layers, expected one more, in one plan; "
                f"uncaptured: {seen.uncaptured}"
            )
        return seen.replayed

    def _add_floors(self, kind: str, replays: list[Call]) -> None:
        n = self.rows[kind]
        every_cut: list[Call] = []
        for qkv, out in zip(self._qkv, self._out, strict=True):
            q, k, v = qkv[:n].unbind(1)
            every_cut.append(partial(attend, q, k, v, out[:n]) if kind == EXACT else partial(attention, q, k, v))

        def cuts() -> None:
            for cut in every_cut:
                cut()

        def bare() -> None:
            for replay_graph in replays:
                replay_graph()

        def in_turn() -> None:
            for replay_graph, cut in zip(replays[:-1], every_cut, strict=True):
                replay_graph()
                cut()
            replays[-1]()

        self.floors |= {f"{kind}, {CUTS}": cuts, f"{kind}, {REPLAYS}": bare, f"{kind}, {IN_TURN}": in_turn}

    def eager(self) -> Any:
        """The decoder at the capture size, as it is."""
        return self.models[EXACT](self.given[:TOKENS])

    def check(self, peers: dict[str, Call]) -> None:
        """Compare every way with eager, bit for bit, and ``peers`` within the tolerance, on new inputs.

        Raises:
            RuntimeError: one differs.
        """
        self.given.normal_()
        for kind, model in self.models.items():
            # Padded, a larger product may add up in another order.
            expected = model(self.given[: self.rows[kind]])
            ways = {name: call for name, call in self.calls.items() if name.startswith(kind)}
            must_agree(expected, ways, inexact=(PADDED,), layers=self.size.layers)
        must_agree(self.eager(), peers, inexact=tuple(peers), layers=self.size.layers)

    def peers(self, say: Callable[[str], None]) -> dict[str, Call]:
        """torch's own ways, those that run here; says why the others don't."""
        held = self.given[:TOKENS]
        found: dict[str, Call] = {}
        for name, into in zip(OVERHEAD_PEERS, (attend, attend_apart), strict=True):
            model = decoder(self.size, held.device.type, Prefill(into))
            model.load_state_dict(self.models[EXACT].state_dict(), assign=True)
            call = torch.compile(model, mode="reduce-overhead", dynamic=False)
            cause = why_not_captured(partial(call, held))
            if cause is None:
                found[name] = partial(call, held)
            else:
                say(f"{name}: skipped, {cause}")
        return found


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts."""
    module, device = chosen_device()
    layers = LAYERS_ON_GPU if device == "cuda" else LAYERS_ON_HOST
    size = replace(ON_GPU, hidden=512, heads=8) if device == "cuda" else ON_HOST
    say(f"\nhidden {size.hidden}, {dtype_on(device)}; {layers} layers; {TOKENS} tokens, and {FEWER} padded to {TOKENS}")
    try:
        # Dynamo keeps all of them for one piece of code
        with torch._dynamo.config.patch(recompile_limit=32):
            stacks = {n: Stack(replace(size, layers=n), module, device) for n in layers}
            peers = stacks[layers[0]].peers(say) if device == "cuda" else {}
            found = _times(stacks, peers, say) if device == "cuda" else _counts(stacks, say)
    finally:
        torch._dynamo.reset()
        reset()
    return {"hidden": size.hidden, "layers": layers, "tokens": (TOKENS, FEWER), **found}


def _named(stacks: dict[int, Stack], kind: str) -> dict[str, Call]:
    return {f"{n} layers, {name}": call for n, s in stacks.items() for name, call in getattr(s, kind).items()}


def _check(stacks: dict[int, Stack], peers: dict[str, Call]) -> None:
    for place, stack in enumerate(stacks.values()):
        stack.check({} if place else peers)


def _times(stacks: dict[int, Stack], peers: dict[str, Call], say: Callable[[str], None]) -> dict[str, Any]:
    few, many = stacks
    _check(stacks, peers)
    calls = {f"{n} layers, eager": stack.eager for n, stack in stacks.items()}
    calls |= {f"{few} layers, {name}": call for name, call in peers.items()}
    calls |= {**_named(stacks, "calls"), **_named(stacks, "floors")}
    timings = measure(calls, stacks[few].module.synchronize, rounds=ROUNDS)
    _check(stacks, peers)
    say_timings(say, "piecewise", timings)
    slopes, steps = _slopes(timings, few, many)
    ratios = say_ratios(say, [*_ratios(timings, stacks), *slopes], of=("host",))
    for name, step in steps.items():
        say(f"{name}: {step['host']:.1f} µs, floor {step['floor host']:.1f} µs")
    return {"rows": [t.as_dict() for t in timings.values()], "ratios": ratios, "a piece more": steps}


def _ratios(t: dict[str, Timing], stacks: dict[int, Stack]) -> list[tuple[Ratio, float | None]]:
    """Ratios with their targets. The sum of rows counts what overlaps twice, so the floors in turn stand beside."""
    found: list[tuple[Ratio, float | None]] = []
    for n, stack in stacks.items():
        for name in stack.calls:
            kind = name.split(",")[0]
            row, floor = t[f"{n} layers, {name}"], [t[f"{n} layers, {kind}, {part}"] for part in (CUTS, REPLAYS)]
            found.append((ratio(row, *floor), EXACT_TARGET if kind == EXACT else PADDED_TARGET))
            found.append((ratio(row, t[f"{n} layers, {kind}, {IN_TURN}"]), None))
        for name in OVERHEAD_PEERS:
            if f"{n} layers, {name}" in t:
                found.append((ratio(t[f"{n} layers, {EXACT}, compiled"], t[f"{n} layers, {name}"]), None))
    return found


def _slopes(
    t: dict[str, Timing], few: int, many: int
) -> tuple[list[tuple[Ratio, float | None]], dict[str, dict[str, float]]]:
    """What a piece and its cut more cost, against a bare replay and a cut op more, added up and in turn."""
    found, steps = [], {}
    for kind, ways in ((EXACT, WAYS), (PADDED, WAYS[:2])):
        for way in ways:
            for parts, target in (((CUTS, REPLAYS), PIECE_TARGET if kind == EXACT else None), ((IN_TURN,), None)):
                name = f"a piece more, {kind}, {way} / {' + '.join(parts)}"
                rows = tuple(t[f"{n} layers, {kind}, {way}"] for n in (few, many))
                floors = tuple([t[f"{n} layers, {kind}, {part}"] for part in parts] for n in (few, many))
                one, steps[name] = slope(name, rows, floors, steps=many - few)
                found.append((one, target))
    return found, steps


def _counts(stacks: dict[int, Stack], say: Callable[[str], None]) -> dict[str, Any]:
    _check(stacks, {})
    calls = {**_named(stacks, "calls"), **_named(stacks, "floors")}
    # `count` must not enter Dynamo
    counted = {name: count(call).as_dict() for name, call in calls.items() if not name.endswith(", compiled")}
    _check(stacks, {})
    say_counts(say, "piecewise", counted)
    return {"counts": counted}
