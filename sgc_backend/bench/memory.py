"""Memory reserved for prefill and decode graphs: a pool each, one pool on two streams, and ours in every order.

Every figure is read from the allocator's snapshot in this process. Replays of every recording are compared with eager
before its figure counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sgc_backend import (
    FullCudaGraphBackend,
    get_or_create_global_graph_memory_pool,
    memory_report,
    reset,
    sgc_piecewise,
)

from .decoder import ON_GPU, ON_HOST, Size, decoder
from .environment import chosen_device

Phase = tuple[str, int]
MIB = 1 << 20
EAGER, TARGET = "eager, peak activations at the largest size", 1.10
EAGER_RESERVED = "eager, reserved for that in a pool of its own"


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns MiB by row, and the ratios to the larger phase alone."""
    module, device = chosen_device()
    size = ON_GPU if device == "cuda" else ON_HOST
    model = decoder(size, device)
    x = torch.randn(max(size.prefill), size.hidden, device=device, dtype=next(model.parameters()).dtype)
    prefill = [("prefill", n) for n in size.prefill]
    decode = [("decode", n) for n in size.decode]
    rows: dict[str, float] = {}
    if device == "cuda":
        rows[EAGER], rows[EAGER_RESERVED] = _eager_peak(model, x), _eager_reserved(module, model, x)
    rows["prefill alone"] = _full(module, model, x, prefill)
    rows["decode alone"] = _full(module, model, x, decode)
    rows["a pool each"] = _separate(module, model, x, prefill + decode)
    rows["one pool, a stream each"] = _two_streams(module, model, x, prefill + decode)
    interleaved = [p for pair in zip(prefill, decode, strict=False) for p in pair]
    interleaved += [p for p in prefill + decode if p not in interleaved]
    for name, order in {
        "prefill first": prefill + decode,
        "decode first": decode + prefill,
        "interleaved": interleaved,
        "ascending": sorted(prefill + decode, key=lambda p: p[1]),
    }.items():
        rows[f"ours, {name}"] = _full(module, model, x, order)
        rows[f"ours, {name}, any_order"] = _full(module, model, x, order, any_order=True)
    rows["ours, piecewise prefill and full decode"] = _piecewise(module, model, x, size)
    rows["ours, piecewise prefill alone"] = _piecewise(module, model, x, size, decode=False)
    larger = max(rows["prefill alone"], rows["decode alone"])
    say(f"\n{size.layers} layers, hidden {size.hidden}; prefill {size.prefill}, decode {size.decode}")
    say(f"{'reserved':48} {'MiB':>9} {'x larger phase':>15}")
    for name, value in rows.items():
        say(f"{name:48} {value:9.1f} {value / larger:15.2f}")
    ratios = _against_eager(rows)
    for ratio in ratios:
        verdict = "reached" if ratio["reached"] else "missed"
        say(f"{ratio['name']:58} {ratio['values'][0]:5.2f}  <= {ratio['target']}: {verdict}")
    return {"size": vars(size), "MiB": rows, "larger phase MiB": larger, "ratios": ratios}


def _against_eager(rows: dict[str, float]) -> list[dict[str, Any]]:
    """Ours with every size of both phases over what eager takes for the largest, where that was measured."""
    eager = rows.get(EAGER)
    ours = {name: value for name, value in rows.items() if name.startswith("ours, ") and not name.endswith("alone")}
    return [
        {
            "name": f"{name} / eager's peak",
            "values": [value / eager],
            "target": TARGET,
            "reached": value <= TARGET * eager,
        }
        for name, value in ours.items()
        if eager
    ]


def _full(module: Any, model: nn.Module, x: torch.Tensor, order: list[Phase], **session: Any) -> float:
    wrappers = {name: FullCudaGraphBackend(module, name=name) for name, _ in order}
    with next(iter(wrappers.values())).capture_session(**session):
        for name, n in order:
            with wrappers[name].capture_session():
                wrappers[name].capture_one(n, lambda n=n: model(x[:n]))
    for name, n in order:
        _must_equal(wrappers[name].replay(n), model(x[:n]), f"{name} {n}")
    return _reserved(module, wrappers)


def _separate(module: Any, model: nn.Module, x: torch.Tensor, order: list[Phase]) -> float:
    wrappers = {name: FullCudaGraphBackend(module, name=name) for name, _ in order}
    with next(iter(wrappers.values())).capture_session(measure=True):
        for name, n in order:
            with wrappers[name].capture_session():
                wrappers[name].capture_one(n, lambda n=n: model(x[:n]))
    each = memory_report().pools[0].pool_each
    _reserved(module, wrappers)
    return (each or 0) / MIB


def _two_streams(module: Any, model: nn.Module, x: torch.Tensor, order: list[Phase]) -> float:
    """What sharing the handle alone gives: each phase captures on a stream of its own."""
    device = FullCudaGraphBackend(module).device
    handle = device.new_pool_handle()
    streams = {name: device.new_stream() for name, _ in order}
    graphs = []
    for name, n in order:
        streams[name].wait_stream(device.current_stream())
        with device.use_stream(streams[name]):
            model(x[:n])
            device.synchronize()
            graph = device.new_graph()
            device.capture_begin(graph, handle)
            model(x[:n])
            device.capture_end(graph)
        graphs.append(graph)
    reserved = device.reserved_bytes(handle) / MIB
    for graph in graphs:
        graph.reset()
    device.empty_cache()
    return reserved


def _piecewise(module: Any, model: nn.Module, x: torch.Tensor, size: Size, *, decode: bool = True) -> float:
    options = {"inner": "eager", "capture_sizes": size.prefill, "capture": "session", "device_module": module}
    compiled = torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options)
    wrapper = FullCudaGraphBackend(module, name="decode")
    rows = torch.cat([x, x[:1]])  # more than the largest size, or Dynamo compiles that one apart
    with wrapper.capture_session():
        for n in size.prefill:
            compiled(rows[:n])
        for n in size.decode if decode else ():
            wrapper.capture_one(n, lambda n=n: model(x[:n]))
    for n in size.prefill:
        _must_equal(compiled(rows[:n]), model(rows[:n]), f"piecewise {n}")
    found = _reserved(module, wrapper)
    torch._dynamo.reset()
    return found


def _eager_peak(model: nn.Module, x: torch.Tensor) -> float:
    model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _eager_reserved(module: Any, model: nn.Module, x: torch.Tensor) -> float:
    """What one eager forward takes from the device in a pool of its own, where nothing of others' is free."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        model(x)
    torch.cuda.synchronize()
    return FullCudaGraphBackend(module).device.reserved_bytes(pool.id) / MIB


def _must_equal(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        raise RuntimeError(f"{what}: the replay differs from eager; its memory figure would mean nothing")


def _reserved(module: Any, keep: Any) -> float:
    """MiB of the pool, which is given back for the next row; ``keep`` holds the recordings until then."""
    device = FullCudaGraphBackend(module).device
    reserved = device.reserved_bytes(get_or_create_global_graph_memory_pool(module)) / MIB
    del keep
    reset()
    gc.collect()
    return reserved
