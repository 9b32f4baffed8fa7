"""How long it takes to record many sizes of a decoder that falls into many pieces, and what it takes outside the pool.

A size needs two forwards: one that warms up and answers, one that is recorded. So the floor is two eager forwards per
size. Both sides begin with every kernel loaded: the session is run twice, and its second run is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sgc_backend import FullCudaGraphBackend, memory_report, reset, sgc_piecewise
from sgc_backend.config import batch_sizes
from sgc_backend.recorders import recorders

from .attention import Prefill, attend
from .decoder import ON_GPU, ON_HOST, decoder
from .environment import chosen_device

LONGEST_ON_GPU, LONGEST_ON_HOST = 2048, 32
TARGET = 1.3
KIB = 1 << 10


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns seconds and bytes (on a GPU), and counts."""
    module, device = chosen_device()
    size = replace(ON_GPU, layers=32) if device == "cuda" else ON_HOST
    longest = LONGEST_ON_GPU if device == "cuda" else LONGEST_ON_HOST
    # Dynamo takes a length of 1 apart, so the ladder's smallest size is 2 here.
    sizes = sorted({max(n, 2) for n in batch_sizes(longest)} | {3}, reverse=True)
    model = decoder(size, device, Prefill(attend))
    options = {
        "inner": "eager",
        "device_module": module,
        "cut_ops": [attend],
        "capture_sizes": sizes,
        "capture": "session",
    }
    call = torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options)
    x = torch.randn(longest + 1, size.hidden, device=device, dtype=next(model.parameters()).dtype)
    wrapper = FullCudaGraphBackend(module, name="session")

    def session() -> None:
        with wrapper.capture_session():
            for n in sizes:
                call(x[:n])

    def forwards() -> None:
        for n in sizes:
            model(x[:n])
            model(x[:n])

    call(x[: longest // 2 + 1])  # a length that equals no other size, or Dynamo would take it for the same
    session()
    (graph,) = (r for r in recorders() if r.kind == "compiled")
    graph.release()
    forwards()
    floor, ours = _seconds(forwards, module), _seconds(session, module)
    recordings = sum(len(plan.graphs) for plans in graph.plans.values() for plan in plans)
    pieces = len(graph.split.pieces)
    say(f"\n{size.layers} layers, hidden {size.hidden}: {len(sizes)} sizes up to {longest} x {pieces} pieces")
    say(f"recordings: {recordings}")
    result: dict[str, Any] = {"sizes": sizes, "pieces": pieces, "recordings": recordings}
    if device == "cuda":
        outside = sum(pool.outside for pool in memory_report().pools) / recordings / KIB
        verdict = "reached" if ours <= TARGET * floor else "missed"
        say(f"two eager forwards per size {floor:.2f} s, recorded in {ours:.2f} s")
        say(f"ratio {ours / floor:.2f}  <= {TARGET}: {verdict}; outside the pool {outside:.0f} KiB a recording")
        result |= {"forwards s": floor, "session s": ours, "ratio": ours / floor, "target": TARGET}
        result["KiB outside a recording"] = outside
    reset()
    torch._dynamo.reset()
    return result


def _seconds(call: Callable[[], None], module: Any) -> float:
    module.synchronize()
    start = time.perf_counter()
    call()
    module.synchronize()
    return time.perf_counter() - start
