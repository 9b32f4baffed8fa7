"""What finding the recording costs: the same call where one size is captured, and where many are.

A small decoder, so that nothing hides the way to its recording. Every way is called at one size; what differs is how
many other sizes were recorded beside it. Both are measured in one run, and their results compared with eager's, before
and after. On the emulated device, where times would mean nothing, what each does is counted, with the functions of this
package that it enters. What one more piece costs is told by the case piecewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sgc_backend import (
    BreakableCudaGraphBackend,
    DecodeRunner,
    FullCudaGraphBackend,
    TcPiecewiseCudaGraphBackend,
    reset,
    sgc_piecewise,
)
from sgc_backend.seen import calls_seen

from .agree import must_agree
from .attention import Prefill, attend, attend_as_break
from .counting import count, functions
from .decoder import ON_GPU, ON_HOST, Size, decoder, dtype_on
from .environment import chosen_device
from .overhead import NAMES, SPECS, VOCABULARY, Served
from .tables import say_counts, say_ratios, say_timings
from .timing import Timing, measure, ratio

MANY = 32
CALLED = 16  # the size of every call
TARGET = 1.05
WAYS = ("full", "breakable", "runner", "by key", "compiled, behind Dynamo", "compiled")
Call = Callable[[], Any]


class Recorded:
    """A decoder, recorded in every way at each of ``sizes``.

    Attributes:
        calls: of size `CALLED`, by name.
    """

    def __init__(self, size: Size, sizes: tuple[int, ...], module: Any, device: str) -> None:
        # One row more than the largest size, or Dynamo compiles that one apart.
        self.given = torch.zeros(MANY + 2, size.hidden, device=device, dtype=dtype_on(device))
        self.model, marked = (decoder(size, device, Prefill(into)) for into in (attend, attend_as_break))
        marked.load_state_dict(self.model.state_dict(), assign=True)
        self.full, self.breakable = FullCudaGraphBackend(module), BreakableCudaGraphBackend(module)
        options = {"inner": "eager", "cut_ops": [attend]}
        self.by_key = TcPiecewiseCudaGraphBackend(
            self.model, capture_sizes=sizes, options=options, device_module=module
        )
        settings = {**options, "capture_sizes": sizes, "device_module": module}
        compiled = torch.compile(self.model, backend=sgc_piecewise, dynamic=True, options=settings)
        self.runner = DecodeRunner(
            Served(size, device, 2 * MANY).eval(), SPECS, sizes=sizes, outputs="static", device_module=module
        )
        self.integers = {name: torch.zeros(CALLED, dtype=torch.int64, device=device) for name in NAMES}
        with (
            self.runner.capture_session(),
            self.full.capture_session(),
            self.breakable.capture_session(),
            self.by_key.capture_session(),
        ):
            self.runner.capture()
            for n in sorted(sizes, reverse=True):
                held = self.given[:n]
                self.full.capture_one(n, partial(self.model, held))
                self.breakable.capture_one(n, partial(marked, held))
                self.by_key.capture_one(n, partial(self.by_key.compiled, held))
                compiled(held)
        self.calls = self._calls(compiled)

    def _calls(self, compiled: Callable[..., Any]) -> dict[str, Call]:
        through = partial(compiled, self.given[:CALLED])
        with calls_seen() as seen:
            through()
        if len(seen.replayed) != 1:
            raise RuntimeError(f"compiled: {len(seen.replayed)} replays of size {CALLED}; uncaptured {seen.uncaptured}")
        (replayed,) = seen.replayed
        calls = (
            partial(self.full.replay, CALLED),
            partial(self.breakable.replay, CALLED),
            partial(self.runner, **self.integers),
            partial(self.by_key.replay, CALLED),
            lambda: replayed.graph(*replayed.args)[0],
            through,
        )
        return dict(zip(WAYS, calls, strict=True))

    def check(self) -> None:
        """Compare every way with eager, bit for bit, on new inputs.

        Raises:
            RuntimeError: one differs.
        """
        self.given.normal_()
        for value in self.integers.values():
            value.random_(0, VOCABULARY)
        ways = dict(self.calls)
        must_agree(self.runner.eager(**self.integers), {"runner": ways.pop("runner")})
        must_agree(self.model(self.given[:CALLED]), ways)


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts."""
    module, device = chosen_device()
    size = replace(ON_GPU, layers=2, hidden=256, heads=4) if device == "cuda" else ON_HOST
    say(f"\n{size.layers} layers, hidden {size.hidden}, {dtype_on(device)}; calls of {CALLED} rows")
    sizes = (CALLED,), tuple(range(2, MANY + 2))  # not 1, which Dynamo compiles apart
    try:
        # Dynamo keeps all of them for one piece of code
        with torch._dynamo.config.patch(recompile_limit=32):
            recorded = {len(s): Recorded(size, s, module, device) for s in sizes}
            found = _times(recorded, module, say) if device == "cuda" else _counts(recorded, say)
    finally:
        torch._dynamo.reset()
        reset()
    return {"size": vars(size), "sizes": list(recorded), **found}


def _check(recorded: dict[int, Recorded]) -> None:
    for one in recorded.values():
        one.check()


def _named(recorded: dict[int, Recorded]) -> dict[str, Call]:
    return {f"{way}, {n} size{'s' * (n > 1)} captured": one.calls[way] for way in WAYS for n, one in recorded.items()}


def _times(recorded: dict[int, Recorded], module: Any, say: Callable[[str], None]) -> dict[str, Any]:
    _check(recorded)
    bare = {f"bare replay, {n} captured": one.full.graph(CALLED).replay for n, one in recorded.items()}
    timings = measure({**_named(recorded), **bare}, module.synchronize)
    _check(recorded)
    say_timings(say, "dispatch", timings)
    ratios = say_ratios(say, [(ratio(many, one), TARGET) for one, many in _pairs(timings)], of=("host",))
    return {"rows": [t.as_dict() for t in timings.values()], "ratios": ratios}


def _pairs(timings: dict[str, Timing]) -> list[tuple[Timing, Timing]]:
    """Of each way the row with one size captured and the one with many."""
    rows = list(timings.values())
    return list(zip(rows[0 : 2 * len(WAYS) : 2], rows[1 : 2 * len(WAYS) : 2], strict=True))


def _counts(recorded: dict[int, Recorded], say: Callable[[str], None]) -> dict[str, Any]:
    _check(recorded)
    counted = {
        # `count` must not enter Dynamo
        name: count(call).as_dict() | {"functions": sum(functions(call).values())}
        for name, call in _named(recorded).items()
        if not name.startswith("compiled, ") or "behind" in name
    }
    _check(recorded)
    say_counts(say, "dispatch", counted)
    return {"counts": counted}
