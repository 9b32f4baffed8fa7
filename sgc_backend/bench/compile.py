"""How long a decoder takes to compile, by its number of identical layers.

Rows: Dynamo into an empty backend; torch's inductor on the whole graph; ours with inductor on the pieces; and the first
and the last with layers that are marked by ``torch.compiler.nested_compile_region``, which Dynamo traces once. Each in
turn for few layers and for many, without caches on disk; the first call, until the device is done. On the emulated
device pieces are counted, and the programs that were compiled for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sgc_backend import reset, sgc_piecewise
from sgc_backend.recorders import recorders

from .attention import Prefill, attend
from .decoder import ON_GPU, ON_HOST, decoder
from .environment import chosen_device

LAYERS = (8, 64)
TARGET = 1.3
ALONE, OURS = "Dynamo alone", "ours"
MARKED = ", marked layers"


class Marked(nn.Module):
    """A layer that Dynamo traces once for all of its kind."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @torch.compiler.nested_compile_region
    def forward(self, x_nE: torch.Tensor) -> torch.Tensor:
        return self.layer(x_nE)


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns seconds (on a GPU) and counts by row and number of layers."""
    module, device = chosen_device()
    size = replace(ON_GPU, hidden=512, heads=8) if device == "cuda" else ON_HOST
    few, many = LAYERS
    ours = {
        "backend": sgc_piecewise,
        "options": {"device_module": module, "inner": _inner(device), "cut_ops": [attend]},
    }
    alone = {"backend": lambda gm, example_inputs: gm.forward}
    backends: dict[str, dict[str, Any]] = {ALONE: alone, OURS: ours, ALONE + MARKED: alone, OURS + MARKED: ours}
    if device == "cuda":
        backends["inductor"] = {"backend": "inductor"}
    seconds: dict[str, dict[int, float]] = {}
    counts: dict[str, dict[int, dict[str, int]]] = {}
    for name, options in backends.items():
        for layers in (few, *LAYERS):  # the first pays for imports
            before = set(recorders())
            model = decoder(replace(size, layers=layers), device, Prefill(attend))
            if name.endswith(MARKED):
                model = nn.Sequential(*map(Marked, model))
            seconds.setdefault(name, {})[layers] = _first_call(model, size.hidden, device, options)
            if name.startswith(OURS):
                counts.setdefault(name, {})[layers] = _counted(set(recorders()) - before)
            torch._dynamo.reset()
            reset()
    say(f"\nhidden {size.hidden}; first call, with a dynamic number of rows")
    say(f"{'':32} " + " ".join(f"{f'{n} layers':>12}" for n in LAYERS) + f" {'ratio':>7}")
    for name, counted in counts.items():
        for what in ("pieces", "programs"):
            say(f"{f'{name}: {what}':32} " + " ".join(f"{counted[n][what]:12}" for n in LAYERS))
    if device != "cuda":
        return {"counts": counts}
    for name in (OURS, OURS + MARKED):
        alone_s = seconds[name.replace(OURS, ALONE)]
        seconds[f"{name}, less Dynamo"] = {n: seconds[name][n] - alone_s[n] for n in LAYERS}
    ratios = {name: row[many] / row[few] for name, row in seconds.items()}
    for name, row in seconds.items():
        verdict = f"  <= {TARGET}: {'reached' if ratios[name] <= TARGET else 'missed'}"
        known = " ".join(f"{row[n]:12.2f}" for n in LAYERS)
        say(f"{name + ', s':32} {known} {ratios[name]:7.2f}{verdict if name in (OURS, OURS + MARKED) else ''}")
    return {"hidden": size.hidden, "seconds": seconds, "counts": counts, "ratios": ratios, "target": TARGET}


def _inner(device: str) -> str:
    return "inductor" if device == "cuda" else "aot_eager"  # inductor needs a C++ compiler on the host


def _first_call(model: Any, hidden: int, device: str, options: dict[str, Any]) -> float:
    x = torch.randn(96, hidden, device=device, dtype=next(model.parameters()).dtype)
    marked = isinstance(model[0], Marked)
    if marked:  # with dynamic=True, torch looks for the hidden size among the sizes that change, and fails
        torch._dynamo.mark_dynamic(x, 0)
    call = torch.compile(model, dynamic=None if marked else True, **options)
    # one thread: how fast a pool of workers starts is no matter of the layers
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        start = time.perf_counter()
        call(x)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def _counted(made: set[Any]) -> dict[str, int]:
    (graph,) = (r for r in made if r.kind == "compiled")
    pieces = [fn for g, fn in zip(graph.split.groups, graph.compiled, strict=True) if g.kind == "piece"]
    return {"pieces": len(pieces), "programs": len(set(map(id, pieces)))}
