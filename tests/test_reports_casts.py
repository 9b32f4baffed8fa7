"""Reported cases: autocast, and models that change dtype or device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D, lin, ops
from routes import Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module, usable
from test_reports import gpu
from test_reports_weights import SIZES, Block
from torch import nn

from sgc_backend import FullCudaGraphBackend, eager_on_graph

__all__ = ["only_graphs_of_this_test"]


# WS06
@device
@routes()
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_casts_that_autocast_keeps_do_not_cross_a_capture(route: str, cache_enabled: bool, device: str) -> None:
    layer = lin().to(device)
    head = lin().to(device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return head(ops.double(layer(x)))

    def cast() -> Any:
        return torch.autocast(device, dtype=torch.bfloat16, cache_enabled=cache_enabled)

    x = torch.randn(26, D, device=device)
    with cast():
        before = layer(x)  # fills the cache with a cast
        call = Recorded(route, device, forward, x, sizes=SIZES)
        with torch.no_grad():
            same(layer(x), before)
            for n in SIZES:
                same(call(n), forward(x[:n]))
    with torch.no_grad():
        for _ in range(3):
            for t in (layer.weight, head.weight, layer.bias):
                t.copy_(torch.randn_like(t))
            with cast():
                for n in SIZES:
                    eager = layer(x)
                    same(call(n), forward(x[:n]))
                    same(layer(x), eager)
                    same(call(n), forward(x[:n]))
        # Without autocast: what was recorded under it stays so; a compiled call goes by its guards.
        if route == "compiled":
            same(call(8), forward(x[:8]))
            with cast():
                same(call(8), forward(x[:8]))


# WS06
@device
@routes("full", "breakable")  # Dynamo would not have the cache cleared
def test_eager_layers_after_a_capture_in_one_autocast_block_read_no_pool_memory(route: str, device: str) -> None:
    layer = lin().to(device)
    x = torch.randn(26, D, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.clear_autocast_cache()  # so that it is the capture that casts the weight
        return ops.double(layer(x))

    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        call = Recorded(route, device, forward, x, sizes=SIZES)
        wanted = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
        other = Recorded("full", device, lambda x: (x * 1e6).repeat(1, 8), x, sizes=SIZES)
        for n in SIZES:
            call(n)
            other(n)
            same(layer(x), wanted)


# WS06
@device
def test_autocast_inside_of_a_break_and_around_it(device: str) -> None:
    layer = lin().to(device)
    x = torch.randn(26, D, device=device)

    def body(y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return layer(y).float()

    marked = eager_on_graph(body)

    def forward(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            h = layer(x)
            return layer(fn(h) + 1)

    call = Recorded("breakable", device, lambda x: forward(marked, x), x, sizes=SIZES)
    with torch.no_grad():
        for n in SIZES * 2:
            layer.weight.copy_(torch.randn(D, D))
            same(call(n), forward(body, x[:n]))


# WS08
@device
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_model_that_changes_its_dtype_between_calls(dynamic: bool, device: str) -> None:
    model = Block().to(device)
    call = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64, torch.half):
            model.to(dtype)
            for n in (8, 8, 8, 12) if dynamic else (8, 8, 8):
                x = torch.randn(n, D, device=device, dtype=dtype)
                got = call(x)
                assert got.dtype == dtype
                same(got, model(x))
    assert total("replayed") > 0


# WS08
@gpu
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_model_that_goes_from_host_to_device_to_half_and_back(inner: str) -> None:
    model = Block()
    call = compiled(model, dynamic=False, inner=inner)
    places: list[tuple[str, torch.dtype]] = [
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.half),
        ("cpu", torch.float32),
        ("cuda", torch.float32),
    ]
    if torch.cuda.device_count() > 1:
        places += [("cuda:1", torch.float32), ("cuda:0", torch.half), ("cuda:1", torch.half)]
    with torch.no_grad():
        for where, dtype in places:
            model.to(where, dtype)
            with torch.cuda.device(where) if where != "cpu" else contextlib.nullcontext():
                for _ in range(4):
                    x = torch.randn(8, D, device=where, dtype=dtype)
                    got = call(x)
                    assert (got.device, got.dtype) == (x.device, dtype)
                    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    causes = {c for g in graphs() for c in g.counters.uncaptured}
    assert any("no graphs on device type cpu" in c for c in causes)
    assert total("replayed") >= 9


# WS08
def test_a_call_on_the_host_runs_without_graphs_where_nothing_emulates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for emulated in ("", "emulated", ""):
            torch._dynamo.reset()
            monkeypatch.setenv("SGC_DEVICE", emulated)
            before = total("replayed")
            for _ in range(3):
                x = torch.randn(8, D)
                same(call(x), model(x))
            assert (total("replayed") > before) == bool(emulated)


# WS08
@device
def test_a_wrapper_captured_again_after_a_change_of_dtype(device: str) -> None:
    model = Block().to(device)
    backend = FullCudaGraphBackend(module(device))
    with torch.no_grad():
        for dtype in (torch.float32, torch.half, torch.float64, torch.float32):
            model.to(dtype)
            x = torch.randn(8, D, device=device, dtype=dtype)
            with backend.capture_session():
                backend.capture_one(8, lambda x=x: model(x))
            for _ in range(2):
                x.copy_(torch.randn(8, D))
                got = backend.replay(8)
                assert got.dtype == dtype
                same(got, model(x))
    backend.cleanup()
    usable(device)
