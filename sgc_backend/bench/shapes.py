"""Any size in few recordings: random lengths through a decoder, by each peer and by ours recorded at exact sizes.

On a GPU times are measured; on the emulated device what each peer recorded and compiled is counted. The decoder's
attention is torch's, causal over one sequence, which the default options cut.

A peer starts from nothing: it is called with every length until a pass over them records and compiles nothing more.
Then its memory is read, every result is compared with eager's on new inputs, and its calls are timed.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from sgc_backend import OptionError, reset

from .agree import TOLERANCE
from .decoder import ON_GPU, ON_HOST, decoder, dtype_on
from .environment import chosen_device
from .peers import OURS, Make, Ours, Peer, chosen_peers
from .timing import measure, sweep

LENGTHS, SAMPLE, SEED = 200, 24, 0
LONGEST_ON_GPU, LONGEST_ON_HOST = 2048, 256
BUDGET = 240.0  # seconds
MOST_PASSES, TIMED_PASSES, ROUNDS = 4, 5, 10
RECORDINGS_TARGET, RECOMPILED_TARGET, RESERVED_TARGET, SPEED_TARGET = 64, 0, 1.10, 1.15
MIB = 1 << 20
WIDTH = 64


@torch.no_grad()
def run(say: Callable[[str], None], *, peers: str | None = None, seconds: float = BUDGET) -> dict[str, Any]:
    """Measure and print; returns rows, ratios and what failed.

    Args:
        peers: which, separated by commas; None: all that the device can run.
        seconds: how long a peer may be called until it is steady; what it managed by then is measured.

    Raises:
        OptionError: an unknown peer, or ``seconds`` that are none.
    """
    if not seconds > 0:
        raise OptionError(f"--seconds must be a number > 0, got {seconds!r}")
    module, device = chosen_device()
    chosen = chosen_peers(peers, device)
    bench = Shapes(module, device)
    lengths = bench.lengths
    say(
        f"\n{bench.size.layers} layers, hidden {bench.size.hidden}, {dtype_on(device)}; {len(lengths)} random lengths "
        f"in 1..{bench.longest}, up to {seconds:g} s a peer until steady"
    )
    rows, ratios = [], []
    for name, make in chosen.items():
        try:
            row, found = bench.peer(name, make, seconds)
        finally:
            bench.clear()
        rows.append(row)
        ratios += found
        if row["lengths"] < len(lengths):
            say(f"{name}: {seconds:g} s were over after {row['lengths']} of {len(lengths)} lengths; those are measured")
    _table(rows, say)
    say(f"\n{'ratios':{WIDTH}} {'value':>14}  target")
    for ratio in ratios:
        value = " / ".join(f"{v:.4g}" for v in ratio["values"])
        verdict = "reached" if ratio["reached"] else "missed"
        say(f"{ratio['name']:{WIDTH}} {value:>14}  <= {ratio['target']:g}: {verdict}")
    failed = [
        f"{r['peer']} differs from eager by {r['difference']:.3g} x the tolerance; its other figures mean nothing"
        for r in rows
        if not r["difference"] <= 1
    ]
    for what in failed:
        say(f"FAILED: {what}")
    size = {"layers": bench.size.layers, "hidden": bench.size.hidden}
    return {"size": size, "lengths": lengths, "rows": rows, "ratios": ratios, "failed": failed}


@dataclass
class Settled:
    """How a peer came to rest.

    Attributes:
        lengths: that it was called with in its last pass.
        first, steady: seconds of the first pass, and of all passes up to the one that changed nothing.
        compiled: the length of each call in which Dynamo compiled a graph.
    """

    lengths: list[int]
    first: float
    steady: float
    compiled: list[int]


class Shapes:
    """The decoder, its input and the lengths; what is done with each peer."""

    def __init__(self, module: Any, device: str) -> None:
        self.module, self.times = module, device == "cuda"
        self.size = ON_GPU if self.times else ON_HOST
        self.longest = LONGEST_ON_GPU if self.times else LONGEST_ON_HOST
        self.lengths = random.Random(SEED).sample(range(1, self.longest + 1), LENGTHS)
        self.model = decoder(self.size, device)
        # One row more than the longest, or Dynamo compiles that one apart.
        self.x = torch.randn(self.longest + 1, self.size.hidden, device=device, dtype=dtype_on(device))
        self.model(self.x)  # what the libraries keep for good is no peer's

    def peer(self, name: str, make: Make, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One peer's row, and its ratios if it is ours."""
        alone = self._alone(make, self.longest) if name in OURS else 0
        before = self._reserved()
        peer = make(self.model, self.module)
        settled = self._settle(peer, self.lengths, seconds)
        reserved = self._reserved() - before
        missed = peer.uncaptured()
        row = {
            "peer": name,
            "lengths": len(settled.lengths),
            "recordings": _total(peer.recordings()),
            "reserved MiB": reserved / MIB,
            "graphs": len(settled.compiled),
            # Dynamo takes 1 for a constant, whatever else is dynamic
            "recompiled": max(0, sum(n > 1 for n in settled.compiled) - 1),
            "difference": self._difference(peer, settled.lengths),
            "uncaptured": None if missed is None else (peer.uncaptured() or 0) - missed,
        }
        if self.times:
            row |= {"first pass s": settled.first, "steady s": settled.steady}
            row |= sweep(self._call(peer), settled.lengths, self.module.synchronize, passes=TIMED_PASSES).as_dict()
        ratios = []
        if name in OURS:
            most = max(peer.recordings() or [0])
            ratios = [
                _ratio(f"{name}: recordings of a piece", RECORDINGS_TARGET, most),
                _ratio(f"{name}: compiled again after the first dynamic graph", RECOMPILED_TARGET, row["recompiled"]),
                _ratio(
                    f"{name}: reserved / reserved for {self.longest} alone", RESERVED_TARGET, reserved / (alone or 1)
                ),
            ]
            if self.times:
                ratios.append(self._against_exact(name, peer, settled.lengths[:SAMPLE], seconds))
        return row, ratios

    def clear(self) -> None:
        """Let go of everything compiled and recorded."""
        torch._dynamo.reset()
        reset()

    def _call(self, peer: Peer) -> Callable[[int], torch.Tensor]:
        return lambda n: peer.forward(self.x[:n])

    def _settle(self, peer: Peer, lengths: Sequence[int], seconds: float) -> Settled:
        call, compiled = self._call(peer), []
        reached, taken = list(lengths), []
        begin = time.perf_counter()
        over = False
        while not over and len(taken) < MOST_PASSES:
            state = (len(compiled), _total(peer.recordings()))
            since = time.perf_counter()
            for place, n in enumerate(lengths):
                over = place > 0 and time.perf_counter() - begin > seconds
                if over:
                    reached = reached[:place]
                    break
                graphs = counters["stats"]["unique_graphs"]
                call(n)
                compiled += [n] * (counters["stats"]["unique_graphs"] - graphs)
            self.module.synchronize()
            if taken and state == (len(compiled), _total(peer.recordings())):
                break
            taken.append(time.perf_counter() - since)
        return Settled(reached, taken[0], sum(taken), compiled)

    def _difference(self, peer: Peer, lengths: Sequence[int]) -> float:
        """The largest difference of a row to eager's, as a share of its length and of what the dtype allows."""
        worst = []
        for n in lengths:
            self.x.normal_()
            got = peer.forward(self.x[:n]).double()
            expected = self.model(self.x[:n]).double()
            worst.append(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        return float(torch.stack(worst).max()) / TOLERANCE[self.x.dtype]

    def _alone(self, make: Make, n: int) -> int:
        """Bytes reserved where only length ``n`` is recorded."""
        before = self._reserved()
        peer = make(self.model, self.module)
        self._settle(peer, [n], float("inf"))
        taken = self._reserved() - before
        del peer
        self.clear()
        return taken

    def _against_exact(self, name: str, peer: Peer, lengths: Sequence[int], seconds: float) -> dict[str, Any]:
        """The median over ``lengths`` over that of recordings at just these lengths, in one run."""
        options = {"capture_sizes": None, "pad": "never", "max_recordings": SAMPLE}
        reference = Ours(self.model, self.module, OURS[name], **options)
        lengths = self._settle(reference, lengths, seconds).lengths
        both = {"ours": self._call(peer), "exact": self._call(reference)}
        calls = {f"{who} {n}": functools.partial(call, n) for who, call in both.items() for n in lengths}
        timings = measure(calls, self.module.synchronize, rounds=ROUNDS)

        def p50(who: str, what: str) -> float:
            return statistics.median(getattr(timings[f"{who} {n}"], what) for n in lengths)

        host, wall = (p50("ours", what) / p50("exact", what) for what in ("host", "wall"))
        return _ratio(f"{name}: p50 host / wall of {len(lengths)} lengths to exact sizes", SPEED_TARGET, host, wall)

    def _reserved(self) -> int:
        gc.collect()
        self.module.empty_cache()
        return self.module.memory_reserved()


def _total(recordings: list[int] | None) -> int | None:
    return None if recordings is None else sum(recordings)


def _ratio(name: str, target: float, *values: float) -> dict[str, Any]:
    return {"name": name, "values": values, "target": target, "reached": all(v <= target for v in values)}


def _table(rows: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    columns = [c for c in rows[0] if c not in ("peer", "samples")] if rows else []
    say(f"{'':16} " + " ".join(f"{c:>12}" for c in columns))
    for row in rows:
        say(f"{row['peer']:16} " + " ".join(f"{_text(row[c]):>12}" for c in columns))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) and value < 1000 else f"{value:.0f}"
