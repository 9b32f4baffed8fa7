"""How long a decoder takes to compile, by its number of identical layers.

Rows: Dynamo into an empty backend; torch's inductor on the whole graph; ours with inductor on the pieces. Each in turn
for few layers and for many, without caches on disk; the first call, until the device is done. On the emulated device
pieces are counted, and the programs that were compiled for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sgc_backend import reset, sgc_piecewise
from sgc_backend.recorders import recorders

from .attention import Prefill, attend
from .decoder import ON_GPU, ON_HOST, decoder
from .environment import chosen_device

LAYERS = (8, 64)
TARGET = 1.3


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns seconds (on a GPU) and counts by row and number of layers."""
    module, device = chosen_device()
    size = replace(ON_GPU, hidden=512, heads=8) if device == "cuda" else ON_HOST
    few, many = LAYERS
    backends: dict[str, dict[str, Any]] = {
        "Dynamo alone": {"backend": lambda gm, example_inputs: gm.forward},
        "ours": {
            "backend": sgc_piecewise,
            "options": {"device_module": module, "inner": _inner(device), "cut_ops": [attend]},
        },
    }
    if device == "cuda":
        backends["inductor"] = {"backend": "inductor"}
    seconds: dict[str, dict[int, float]] = {}
    counts: dict[int, dict[str, int]] = {}
    for name, options in backends.items():
        for layers in (few, *LAYERS):  # the first pays for imports
            before = set(recorders())
            seconds.setdefault(name, {})[layers] = _first_call(
                decoder(replace(size, layers=layers), device, Prefill(attend)), size.hidden, device, options
            )
            if name == "ours":
                counts[layers] = _counted(set(recorders()) - before)
            torch._dynamo.reset()
            reset()
    say(f"\nhidden {size.hidden}; first call with dynamic=True")
    say(f"{'':24} " + " ".join(f"{f'{n} layers':>12}" for n in LAYERS) + f" {'ratio':>7}")
    for what in ("pieces", "programs"):
        say(f"{what:24} " + " ".join(f"{counts[n][what]:12}" for n in LAYERS))
    if device != "cuda":
        return {"counts": counts}
    ratios = {name: row[many] / row[few] for name, row in seconds.items()}
    rest = {n: seconds["ours"][n] - seconds["Dynamo alone"][n] for n in LAYERS}
    for name, row in seconds.items():
        verdict = f"  <= {TARGET}: {'reached' if ratios[name] <= TARGET else 'missed'}" if name == "ours" else ""
        say(f"{name + ', s':24} " + " ".join(f"{row[n]:12.2f}" for n in LAYERS) + f" {ratios[name]:7.2f}{verdict}")
    say(
        f"{'ours less Dynamo, s':24} "
        + " ".join(f"{rest[n]:12.2f}" for n in LAYERS)
        + f" {rest[many] / rest[few]:7.2f}"
    )
    return {"hidden": size.hidden, "seconds": seconds, "counts": counts, "ratios": ratios, "target": TARGET}


def _inner(device: str) -> str:
    return "inductor" if device == "cuda" else "aot_eager"  # inductor needs a C++ compiler on the host


def _first_call(model: Any, hidden: int, device: str, options: dict[str, Any]) -> float:
    x = torch.randn(96, hidden, device=device, dtype=next(model.parameters()).dtype)
    call = torch.compile(model, dynamic=True, **options)
    with torch._inductor.config.patch(force_disable_caches=True):
        start = time.perf_counter()
        call(x)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def _counted(made: set[Any]) -> dict[str, int]:
    (graph,) = (r for r in made if r.kind == "compiled")
    pieces = [fn for g, fn in zip(graph.split.groups, graph.compiled, strict=True) if g.kind == "piece"]
    return {"pieces": len(pieces), "programs": len(set(map(id, pieces)))}
