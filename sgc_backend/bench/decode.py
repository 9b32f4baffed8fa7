"""What a decode step takes until the device is done, at every batch size, against the bare replay of its graph.

A decoder takes six small integers a request. Rows: the runner's call with inputs of the device, the wrapper's replay,
and the bare graph. The runner copies its six inputs in front of the same graph, so what a step takes longer is theirs.
Every result is compared with eager's, before and after it was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgc_backend import DecodeRunner, reset

from .agree import must_agree
from .counting import count
from .decoder import ON_GPU, ON_HOST, Size, dtype_on
from .environment import chosen_device
from .overhead import NAMES, SPECS, VOCABULARY, Served
from .tables import say_counts, say_ratios, say_timings
from .timing import Timing, measure, ratio

BATCHES_ON_GPU, BATCHES_ON_HOST = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4)
TARGET, ROUNDS = 1.02, 40
Call = Callable[[], Any]


class Batches:
    """A decoder behind a `DecodeRunner`, recorded at every batch size."""

    def __init__(self, size: Size, batches: tuple[int, ...], module: Any, device: str) -> None:
        self.batches, self.synchronize, most = batches, module.synchronize, max(batches)
        served = Served(size, device, most).eval()
        self.runner = DecodeRunner(served, SPECS, sizes=batches, outputs="static", device_module=module)
        self.runner.capture()
        self.given = {name: torch.zeros(most, dtype=torch.int64, device=device) for name in NAMES}

    def rows(self) -> dict[str, Call]:
        """The ways to run a step, and the bare graph, by batch size."""
        rows: dict[str, Call] = {}
        for n in self.batches:
            given = {name: value[:n] for name, value in self.given.items()}
            rows[f"runner, batch {n}"] = lambda given=given: self.runner(**given)
            rows[f"full, batch {n}"] = lambda n=n: self.runner.backend.replay(n)
            rows[f"bare replay, batch {n}"] = self.runner.backend.graph(n).replay
        return rows

    def check(self) -> None:
        """Compare every step with eager, bit for bit, on new inputs.

        Raises:
            RuntimeError: one differs.
        """
        for value in self.given.values():
            value.random_(0, VOCABULARY)
        rows = self.rows()
        for n in self.batches:
            expected = self.runner.eager(**{name: value[:n] for name, value in self.given.items()})
            # the wrapper replays what the runner's call has staged
            must_agree(expected, {name: rows[name] for name in (f"runner, batch {n}", f"full, batch {n}")})


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts."""
    module, device = chosen_device()
    size, batches = (ON_GPU, BATCHES_ON_GPU) if device == "cuda" else (ON_HOST, BATCHES_ON_HOST)
    say(f"\n{size.layers} layers, hidden {size.hidden}, {dtype_on(device)}; six inputs a request")
    try:
        steps = Batches(size, batches, module, device)
        found = _times(steps, say) if device == "cuda" else _counts(steps, say)
    finally:
        reset()
    return {"size": vars(size), "batches": batches, **found}


def _times(steps: Batches, say: Callable[[str], None]) -> dict[str, Any]:
    steps.check()
    timings = measure(steps.rows(), steps.synchronize, rounds=ROUNDS)
    steps.check()
    say_timings(say, "decode", timings)
    ratios = say_ratios(say, [(ratio(*pair), TARGET) for pair in _pairs(steps, timings)], of=("wall",))
    return {"rows": [t.as_dict() for t in timings.values()], "ratios": ratios}


def _pairs(steps: Batches, t: dict[str, Timing]) -> list[tuple[Timing, Timing]]:
    return [(t[f"{way}, batch {n}"], t[f"bare replay, batch {n}"]) for way in ("runner", "full") for n in steps.batches]


def _counts(steps: Batches, say: Callable[[str], None]) -> dict[str, Any]:
    steps.check()
    counted = {name: count(call).as_dict() for name, call in steps.rows().items()}
    steps.check()
    say_counts(say, "decode", counted)
    return {"counts": counted}
