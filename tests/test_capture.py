"""One callable into one graph: what was recorded is right, and a failure leaves the process as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sgc_backend
from sgc_backend import emulated
from sgc_backend.capture import record, unowned_like
from sgc_backend.devices import device_of
from sgc_backend.errors import CaptureError
from sgc_backend.pools import pool_of

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


def pool_on(device: str) -> Any:
    return pool_of(device_of(module(device)))


@device
def test_recording_executes_nothing_and_replay_executes_everything(device: str) -> None:
    pool = pool_on(device)
    x, state = torch.ones(8, device=device), torch.zeros(8, device=device)
    graph, out = record(pool, lambda: state.add_(x) * 2, "test")
    assert state.sum() == 0
    graph.replay()
    graph.replay()
    assert torch.equal(state, x * 2)
    assert torch.equal(out, x * 4)
    pool.drop(graph)


@device
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)])
def test_inference_mode_and_its_absence_capture_in_any_order(modes: tuple[bool, ...], device: str) -> None:
    pool = pool_on(device)
    for inference in modes:
        with torch.inference_mode(inference), torch.no_grad():
            x = torch.ones(64, device=device)
            graph, out = record(pool, lambda x=x: torch.nn.functional.dropout(x) + torch.rand_like(x), "test")
            graph.replay()
            first = out.clone()
            graph.replay()
            assert not torch.equal(first, out)
            pool.drop(graph)


@device
def test_nothing_is_recorded_into_a_pool_that_was_made_in_inference_mode(device: str) -> None:
    sgc_backend.reset()
    with torch.inference_mode():
        pool = pool_on(device)
    graph, out = record(pool, lambda: None, "nothing")
    assert out is None
    graph.replay()
    pool.drop(graph)
    x = torch.ones(8, device=device)
    graph, out = record(pool, lambda: x + 1, "something")  # the stream is not stuck in a capture
    graph.replay()
    assert torch.equal(unowned_like(pool.device, out), x + 1)
    del out
    pool.drop(graph)


def failing(kind: str, device: str) -> Callable[[], Any]:
    where = module(device)
    x = torch.rand(64, 64, device=device)

    def fn() -> Any:
        y = x @ x + torch.rand_like(x)
        big = torch.cat([y] * 64)
        if kind == "raise":
            raise KeyError("mine")
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "sync":
            return big.sum().item()
        if kind == "mask":
            return big[big > 0]
        if kind == "synchronize":
            where.synchronize()
        if kind == "unjoined":
            side = where.Stream()
            side.wait_stream(where.current_stream())
            with where.stream(side):
                return y * 2
        if kind == "memory":
            return torch.empty(1 << 60, device=device)
        return y

    return fn


EXPECTED = {
    "raise": (KeyError, "mine"),
    "interrupt": (KeyboardInterrupt, None),
    "sync": (CaptureError, "not permitted"),
    "mask": (CaptureError, "not permitted"),
    "synchronize": (CaptureError, "not permitted"),
    "unjoined": (CaptureError, "unjoined work"),
}


@device
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_failed_capture_leaves_everything_working(kind: str, device: str) -> None:
    pool = pool_on(device)
    where = module(device)
    x = torch.rand(64, 64, device=device)
    warm, _ = record(pool, lambda: torch.cat([torch.nn.functional.dropout(x @ x)] * 64), "test")
    pool.drop(warm)
    gc.collect()
    before = pool.reserved_bytes()
    error, message = EXPECTED[kind]
    for _ in range(3):
        with pytest.raises(error, match=message) as raised:
            record(pool, failing(kind, device), "test")
        if error is CaptureError:
            assert raised.value.__cause__ is not None
        del raised
    gc.collect()
    assert not where.is_current_stream_capturing()
    assert pool.reserved_bytes() <= before + (2 << 20)
    torch.manual_seed(3)
    first = torch.randn(4, device=device)
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device=device))
    graph, out = record(pool, lambda: torch.nn.functional.dropout(x @ x), "test")
    graph.replay()
    once = out.clone()
    graph.replay()
    assert not torch.equal(once, out)
    pool.drop(graph)


@pytest.mark.gpu
def test_running_out_of_memory_in_a_capture_is_an_out_of_memory_error() -> None:
    pool = pool_on("cuda")
    with pytest.raises(torch.OutOfMemoryError):
        record(pool, failing("memory", "cuda"), "test")
    x = torch.ones(4, device="cuda")
    graph, out = record(pool, lambda: x + torch.rand_like(x), "test")
    graph.replay()
    assert (out >= 1).all()
    pool.drop(graph)


@device
def test_an_unowned_tensor_reads_the_same_bytes_and_holds_nothing(device: str) -> None:
    pool = pool_on(device)
    x = torch.arange(24.0, device=device).view(4, 6)
    graph, out = record(pool, lambda: (x * 2).t()[1:, ::2], "test")
    view = unowned_like(pool.device, out)
    assert view.stride() == out.stride()
    del out
    graph.replay()
    assert torch.equal(view, (x * 2).t()[1:, ::2])
    pool.drop(graph)


@device
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1)])
def test_unowned_tensors_of_odd_shapes(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device)
    assert torch.equal(unowned_like(device_of(module(device)), x), x)


def test_the_wrappers_synchronise_before_they_begin_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    backend = sgc_backend.FullCudaGraphBackend(emulated)
    dev = backend.device
    sync, begin = dev.synchronize, dev.capture_begin
    x = torch.ones(3)
    with backend.capture_session():
        pool = pool_of(dev)
        monkeypatch.setattr(dev, "synchronize", lambda: (order.append("sync"), sync()))
        monkeypatch.setattr(pool.device, "capture_begin", lambda g, h: (order.append("begin"), begin(g, h)))
        backend.capture_one(3, lambda: (order.append("forward"), x + 1)[1])
    assert order[:5] == ["forward", "forward", "sync", "begin", "forward"]


@device
def test_a_capture_that_fails_under_autocast_leaves_autocast_as_it_was(device: str) -> None:
    pool = pool_on(device)

    def fn() -> None:
        torch.amp.autocast_mode._enter_autocast(device, torch.bfloat16, True, True)  # as in a graph of Dynamo's
        raise KeyError("mine")

    with torch.autocast(device, dtype=torch.float16, enabled=False):
        torch.autocast_increment_nesting()
        depth = torch.autocast_decrement_nesting()
        with pytest.raises(KeyError):
            record(pool, fn, "test")
        assert not torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) == torch.float16
        torch.autocast_increment_nesting()
        assert torch.autocast_decrement_nesting() == depth
