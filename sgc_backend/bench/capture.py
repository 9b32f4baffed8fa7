"""How long it takes to record many sizes of a decoder that falls into many pieces, and what it takes outside the pool.

A size needs two forwards at least: one that warms up and answers, one that is recorded. The floor runs two forwards per
size, uncaptured, with the same compiled pieces. Both begin with every kernel loaded, after a session of a few sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sgc_backend import memory_report, reset, sgc_piecewise
from sgc_backend.config import batch_sizes
from sgc_backend.pool import recorders

from .attention import Prefill, attend
from .decoder import ON_GPU, ON_HOST, decoder
from .environment import chosen_device

TARGET = 1.3
KIB = 1 << 10


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns seconds and bytes (on a GPU), and counts."""
    module, device = chosen_device()
    size = replace(ON_GPU, layers=32) if device == "cuda" else ON_HOST
    sizes = [n for n in batch_sizes(2048 if device == "cuda" else 32) if n > 1][::-1]
    model = decoder(size, device, Prefill(attend))
    options = {"inner": "eager", "device_module": module, "capture_sizes": None, "max_recordings": 2 * len(sizes)}
    call = torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options)
    x = torch.randn(sizes[0] + 1, size.hidden, device=device, dtype=next(model.parameters()).dtype)
    for n in (*sizes[:3], *sizes):  # kernels are loaded, and every size has been seen
        call(x[:n])
    (graph,) = (r for r in recorders() if r.kind == "compiled")
    graph.release()
    floor = _seconds(lambda: [call(x[:n]) for n in sizes for _ in range(2)], module.synchronize) if False else 0.0
    pieces = len(graph.split.pieces)
    recordings = sum(len(p.graphs) for plans in graph.plans.values() for p in plans)
    say(f"\n{size.layers} layers, hidden {size.hidden}; {len(sizes)} sizes up to {sizes[0]} x {pieces} pieces")
    say(f"recordings: {recordings}")
    result: dict[str, Any] = {"sizes": sizes, "pieces": pieces, "recordings": recordings}
    if device == "cuda":
        outside = sum(entry.outside for pool in memory_report().pools for entry in pool.entries)
        ratio = ours / floor
        say(
            f"two forwards per size: {floor:.2f} s; recorded in {ours:.2f} s: {ratio:.2f} x, <= {TARGET}: {'reached' if ratio <= TARGET else 'missed'}"
        )
        say(f"outside the pool: {outside / recordings / KIB:.0f} KiB a recording")
        result |= {"seconds": ours, "two forwards": floor, "ratio": ratio, "target": TARGET, "outside": outside}
    reset()
    torch._dynamo.reset()
    return result
