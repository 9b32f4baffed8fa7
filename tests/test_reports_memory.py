"""Reported cases: the memory pool."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import (
    device,
    module,
    pool_on,
    usable,
)
from test_reports import _scratch, a_clean_model_works, captured, gpu

import sgc_backend
from sgc_backend import FullCudaGraphBackend
from sgc_backend.capture import record
from sgc_backend.errors import CaptureError

__all__ = ["only_graphs_of_this_test"]


# MP01
@device
@pytest.mark.parametrize("kind", ["compiled", "whole", "recorded", "aborted first"])
def test_the_handle_outlives_every_graph_while_outputs_live(kind: str, device: str) -> None:
    where = module(device)
    pool = pool_on(device)
    kept: list[Any] = []
    if kind == "aborted first":
        x = torch.ones(64, device=device)
        try:
            record(pool, lambda: (x * 2).sum().item(), "aborted")
        except CaptureError as error:
            kept.append(error)
    for cycle in range(3):
        model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
        x = torch.randn(4, D, device=device)
        with torch.no_grad():
            if kind == "compiled":
                call = compiled(model, dynamic=False, outputs="static" if cycle else "clone")
                for _ in range(3):
                    out = call(x)
                same(out, model(x))
                del call
            elif kind == "whole":
                backend = captured(device, lambda model=model, x=x: model(x))
                out = backend.replay(4)
                same(out, model(x))
                del backend
            else:
                graph, out = record(pool, lambda model=model, x=x: model(x), "test")  # really holds pool memory
                graph.replay()
                same(out, model(x))
                pool.drop(graph)
                del graph
        kept.append(out)
        del model, out
        gc.collect()
        torch._dynamo.reset()
        where.empty_cache()
    usable(device)


# MP03
@device
def test_a_recording_survives_the_death_of_the_one_before_it(device: str) -> None:
    n, dtype = (2048, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) / n**0.5 for _ in range(2))
    first = captured(device, lambda: a @ b @ a)
    second = captured(device, lambda: b @ a @ b)
    expected = b @ a @ b
    same(second.replay(4), expected)
    first.cleanup()
    del first
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # what torch's own graph trees do when one of theirs dies
    module(device).empty_cache()
    junk = [torch.full((1 << 20,), 7.0, device=device) for _ in range(64)]
    for _ in range(20):
        same(second.replay(4), expected)
    assert all((j == 7).all() for j in junk)
    second.cleanup()


# MP04
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_scratch_that_an_op_caches_stays_its_own(kind: str, device: str) -> None:
    _scratch.clear()
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.counts_in_scratch(m.a(x))), a=lin(), b=lin()).to(device)
    x = torch.randn(64, D, device=device)

    def expected(n: int) -> torch.Tensor:
        return model.b(model.a(x[:n]) + 1)

    with torch.no_grad():
        if kind == "whole":
            backend = FullCudaGraphBackend(module(device))
            with backend.capture_session():
                for n in (64, 32, 8):
                    backend.capture_one(n, lambda n=n: model(x[:n]))
            call = backend.replay
        else:
            run = compiled(model)
            call = lambda n: run(x[:n])  # noqa: E731
        for n in (64, 32, 8, 8, 64, 32, 64, 8, 32):
            same(call(n), expected(n))
    assert _scratch
    assert all((counter == 0).all() for counter in _scratch.values())
    if kind == "whole":
        backend.cleanup()
    _scratch.clear()


# MP06
@device
@pytest.mark.parametrize("sizes", [(64, 32, 16, 8), (8, 16, 32, 64)])
def test_many_sizes_of_three_models_replay_right_in_any_order(sizes: tuple[int, ...], device: str) -> None:
    bodies: list[Callable[[Any, torch.Tensor], Any]] = [
        lambda m, x: m.b(ops.double(m.a(x))),
        lambda m, x: (m.a(x).relu(), ops.double(m.b(x)).sum(0)),
        lambda m, x: m.a(x).cumsum(0),
    ]
    models = [Model(fn, a=lin(), b=lin()).to(device) for fn in bodies]
    calls = [compiled(model) for model in models]
    decode = FullCudaGraphBackend(module(device))
    x = torch.randn(64, D, device=device)
    with torch.no_grad():
        for n in sizes:
            for call in calls:
                call(torch.randn(n, D, device=device))
                call(torch.randn(n, D, device=device))
            with decode.capture_session():
                decode.capture_one(n, lambda n=n: models[0](x[:n]))
        rng = random.Random(0)
        held = []
        for _ in range(200):
            k, n = rng.randrange(4), rng.choice(sizes)
            if k == 3:
                got, wanted = decode.replay(n), models[0](x[:n])
                same(got, wanted)
                continue
            y = torch.randn(n, D, device=device)
            got, wanted = calls[k](y), models[k](y)
            same(got, wanted)
            held.append((got, wanted))
        for got, wanted in held:
            same(got, wanted)
    assert total("captured") >= 12
    assert total("replayed") >= len(held)
    decode.cleanup()


def wide(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.repeat(1, 64)
    for _ in range(4):
        h = h * 1.01 + 1
    return h.sum(1, keepdim=True)


# MP07
@device
def test_phases_and_sizes_reserve_the_largest_and_not_the_sum(device: str) -> None:
    sizes = [1024 - 80 * k for k in range(12)]
    x = torch.randn(1024, D, device=device)

    def capture(lane: str | None, which: Iterable[int]) -> int:
        backend = FullCudaGraphBackend(module(device), lane=lane)
        with torch.no_grad(), backend.capture_session():
            for n in which:
                backend.capture_one(n, lambda n=n: wide(None, x[:n]))
        kept.append(backend)
        return sgc_backend.pools.pool_of(backend.device, lane).reserved_bytes()

    kept: list[FullCudaGraphBackend] = []
    first = capture(None, sizes[:1])
    assert capture(None, sizes[1:]) <= 1.2 * first
    assert capture(None, sizes) <= 1.2 * first  # another model of the same size
    model = Model(lambda m, x: wide(m, ops.double(x))).to(device)
    call = compiled(model)
    decode_session = FullCudaGraphBackend(module(device))
    with torch.no_grad(), decode_session.capture_session():
        for n in sizes:
            call(x[:n])
    assert total("captured") == 12
    shared = pool_on(device).reserved_bytes()
    assert shared <= 1.2 * first
    apart = sum(capture(f"apart {n}", [n]) for n in sizes[:4])
    assert shared < 0.5 * apart
    for n in reversed(sizes):
        with torch.no_grad():
            same(kept[1].replay(n) if n != 1024 else kept[0].replay(n), wide(None, x[:n]))
            same(call(x[:n]), model(x[:n]))
    for backend in kept:
        backend.cleanup()


# MP08
@device
def test_outputs_of_every_size_share_memory_and_stay_the_callers(device: str) -> None:
    model = Model(lambda m, x: ops.double(x).repeat(1, 500) * 3).to(device)
    call = compiled(model, max_recordings=100)
    opener = FullCudaGraphBackend(module(device))
    x = torch.randn(256, D, device=device)
    with torch.no_grad():
        with opener.capture_session():
            call(x)
            largest = pool_on(device).reserved_bytes()
            for n in range(248, 1, -8):
                call(x[:n])
        assert total("captured") == 32
        assert pool_on(device).reserved_bytes() <= 1.1 * largest
        held = [(n, call(x[:n])) for n in (8, 256, 64, 128, 8)]
        for n, got in held:
            same(got, model(x[:n]))


# MP10
@device
@pytest.mark.parametrize("pad", ["auto", "never"])
@pytest.mark.parametrize("capture_sizes", ["auto", (32, 64, 128)])
def test_lengths_that_come_once_do_not_record_without_limit(capture_sizes: Any, pad: str, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=None, capture_sizes=capture_sizes, pad=pad)
    reserved = []
    with torch.no_grad():
        for _ in range(3):
            for n in range(1, 301):
                x = torch.randn(n, D, device=device)
                torch.testing.assert_close(call(x), model(x))
            reserved.append(pool_on(device).reserved_bytes())
        x = torch.randn(66000, D, device=device)  # over every size
        for _ in range(3):
            same(call(x), model(x))
    assert reserved[2] == reserved[1]
    assert total("captured") <= (3 if capture_sizes != "auto" else 64) + 1  # and one of the graph for the first size
    causes = ("not a capture size", "no capture size holds it within max_padding_ratio")
    uncaptured = sum(g.counters.uncaptured[cause] for g in graphs() for cause in causes)
    if pad == "never":
        assert uncaptured > 600
    else:
        assert (
            uncaptured == (0 if capture_sizes == "auto" else 3 * (14 + 172)) + 3
        )  # a length of 1 has a graph of its own


@contextlib.contextmanager
def little_memory() -> Any:
    gc.collect()
    torch.cuda.empty_cache()
    everything = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / everything)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# MP12
@gpu
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_out_of_memory_inside_a_capture_gives_everything_back(kind: str) -> None:
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.grabs(m.a(x))), a=lin(), b=lin()).cuda()
    x = torch.randn(4, D, device="cuda")
    pool = pool_on("cuda")
    reserved = pool.reserved_bytes()
    with little_memory(), torch.no_grad():
        if kind == "whole":
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    captured("cuda", lambda: model(x))
        else:
            call = compiled(model, dynamic=False)
            for _ in range(3):
                same(call(x), model(x))
            assert any("OutOfMemoryError" in c for g in graphs() for c in g.counters.failures)
        assert abs(pool.reserved_bytes() - reserved) <= 2 << 20
        usable("cuda")
        model(x)
        a_clean_model_works("cuda")


# MP13
@device
def test_twenty_failed_captures_leak_nothing_and_keep_the_users_error(device: str) -> None:
    where = module(device)
    x = torch.ones(4, device=device)
    capturing: list[bool] = []

    def forward() -> torch.Tensor:
        if where.is_current_stream_capturing():
            big = torch.empty((200 << 20) // 4, device=device)
            raise ValueError(f"the user's own, {big.shape[0]}")
        return x + 1

    a_clean_model_works(device)
    gc.collect()
    where.empty_cache()
    before = where.memory_reserved()
    for _ in range(20):
        with pytest.raises(ValueError, match="the user's own"):
            captured(device, forward)
        capturing.append(where.is_current_stream_capturing())
    gc.collect()
    where.empty_cache()
    assert where.memory_reserved() <= before + (2 << 20)
    assert not any(capturing)
    usable(device)
    assert torch.ones(1 << 20, device=device).sum() == 1 << 20
    a_clean_model_works(device)


@device
def test_rounds_of_compile_capture_replay_and_delete_do_not_grow_the_pool(device: str) -> None:
    pool = pool_on(device)
    x = torch.randn(4, D, device=device)
    rounds = 200 if device == "cuda" else 40
    reserved = []
    with torch.no_grad():
        for k in range(rounds):
            model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
            call = compiled(model, dynamic=False)
            call(x)
            call(x)
            same(call(x), model(x))
            backend = captured(device, lambda model=model: model(x))
            same(backend.replay(4), model(x))
            del model, call, backend
            torch._dynamo.reset()
            if k % 10 == 9:
                gc.collect()
                reserved.append(pool.reserved_bytes())
    assert max(reserved) == reserved[0]
