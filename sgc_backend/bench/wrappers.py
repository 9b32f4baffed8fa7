"""What each way to run a decoder costs per forward, against floors that are measured in the same run.

On a GPU host and wall times are measured; on the emulated device, where times would mean nothing, what each way does is
counted. Every row's result is compared with eager's, before and after it was measured.

Rows: ``eager``; ``full`` copies the input into its buffer and replays; ``breakable`` and ``tc_piecewise`` replay on
buffers that are filled already, the breaks are ops, or functions around them where the row says so; ``piecewise`` is
the compiled module's call with the default options but ``inner``, Dynamo's guards, staging and the clone of its output
included; ``breakable-cuda-graphs``, where that package is installed, is what it replays on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgc_backend import reset

from .attention import CONTEXT
from .breakable_peer import NAME as PEER
from .counting import count
from .decoder import ON_GPU, ON_HOST, dtype_on
from .environment import chosen_device
from .forwards import COPY_IN_TURN, FUNCTIONS, IN_TURN, UNCHECKED, Forwards, piecewise
from .tables import WIDTH, say_counts, say_ratios, say_timings
from .timing import Ratio, Timing, measure, ratio

PHASES = {"decode": (256, 16, 1), "prefill": (256,)}  # largest first, as a capture session wants it
FULL_TARGET, CUT_TARGET = 1.30, 1.05


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts, by phase and size."""
    module, device = chosen_device()
    size = ON_GPU if device == "cuda" else ON_HOST
    inners = ("eager", "inductor") if device == "cuda" else ("eager",)  # inductor needs a C++ compiler on the host
    say(f"\n{size.layers} layers, hidden {size.hidden}, {dtype_on(device)}; decode over {CONTEXT} positions a request")
    found = []
    for phase, sizes in PHASES.items():
        try:
            forwards = Forwards(phase, sizes, size, module, device, inners)
            found += [_times(forwards, n, say) if device == "cuda" else _counts(forwards, n, say) for n in sizes]
        finally:
            torch._dynamo.reset()
            reset()
    return {"size": vars(size), "context": CONTEXT, "forwards": found}


def _times(forwards: Forwards, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    errors = forwards.check(n)
    checks = forwards.checks(n)
    timings = measure({**forwards.rows(n), **forwards.floors(n), **checks}, forwards.synchronize)
    forwards.check(n)
    say_timings(say, f"{forwards.phase} {n}", timings)
    ratios = say_ratios(say, _ratios(timings))
    for name in checks:
        share = timings[name].host / timings["piecewise"].host
        say(f"{'share of the piecewise row, ' + name:{WIDTH + 34}} {share:6.1%}")
    rows = [t.as_dict() for t in timings.values()]
    return {"phase": forwards.phase, "size": n, "rows": rows, "ratios": ratios, "relative error": errors}


def _ratios(timings: dict[str, Timing]) -> list[tuple[Ratio, float | None]]:
    """Ratios with their targets. The sum of rows counts what overlaps twice, so the floors in turn stand beside."""
    t = timings
    found: list[tuple[Ratio, float | None]] = [
        (ratio(t["full"], t["bare replay"], t["one packed copy"]), FULL_TARGET),
        (ratio(t["full"], t[COPY_IN_TURN]), None),
        (ratio(t[UNCHECKED], t["bare replay"], t["one packed copy"]), FULL_TARGET),
        (ratio(t[UNCHECKED], t[COPY_IN_TURN]), None),
    ]
    for name in (name for name in timings if f"bare replays of {name}" in timings):
        # inductor runs fewer kernels: its floors are its own, and no target was set for it
        target = CUT_TARGET if name != piecewise("inductor") else None
        found.append((ratio(t[name], t["cut ops alone"], t[f"bare replays of {name}"]), target))
        found.append((ratio(t[name], t[f"{IN_TURN} of {name}"]), None))
    if PEER in timings:  # its graphs are as many as ours, of the same kernels
        found.append((ratio(t[PEER], t["cut ops alone"], t["bare replays of breakable"]), None))
        found += [(ratio(t[name], t[PEER]), None) for name in ("breakable", FUNCTIONS)]
    found += [(ratio(t["eager"], t[name]), None) for name in ("full", "breakable", "piecewise", "tc_piecewise")]
    return found


def _counts(forwards: Forwards, n: int, say: Callable[[str], None]) -> dict[str, Any]:
    errors = forwards.check(n)
    calls = {**forwards.rows(n), **forwards.plans(n), **forwards.floors(n)}
    counted = {name: count(call).as_dict() for name, call in calls.items()}
    forwards.check(n)
    say_counts(say, f"{forwards.phase} {n}", counted)
    return {"phase": forwards.phase, "size": n, "counts": counted, "relative error": errors}
