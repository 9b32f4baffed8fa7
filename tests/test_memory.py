"""memory_report: its sums are the allocator's, and its rows name who took what."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops

import sgc_backend
from sgc_backend import FullCudaGraphBackend, emulated, memory_report

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


def body(x: torch.Tensor, depth: int = 4) -> torch.Tensor:
    """Needs about two tensors like ``x`` at once, beside its result."""
    for _ in range(depth):
        x = x * 1.5 + 1
    return x


def record_phases(device: str, order: list[tuple[str, int]], **session: Any) -> dict[str, FullCudaGraphBackend]:
    where = module(device)
    wrappers = {name: FullCudaGraphBackend(where, name=name) for name in ("prefill", "decode")}
    x = torch.randn(4096, 256, device=device)
    with wrappers["prefill"].capture_session(**session), wrappers["decode"].capture_session():
        for name, n in order:
            wrappers[name].capture_one(n, lambda n=n: body(x[:n]))
    return wrappers


PREFILL = [("prefill", n) for n in (4096, 2048, 1024, 512)]
DECODE = [("decode", n) for n in (256, 64, 16)]


@device
def test_the_sums_are_those_of_the_allocators_snapshot(device: str) -> None:
    wrappers = record_phases(device, PREFILL + DECODE)
    (pool,) = memory_report().pools
    handle = sgc_backend.get_or_create_global_graph_memory_pool(module(device))
    segments = [s for s in module(device).memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(handle)]
    assert pool.reserved == sum(s["total_size"] for s in segments)
    assert pool.live == sum(s["active_size"] for s in segments)
    assert pool.reserved == pool.base + sum(o.added for o in pool.owners)
    assert pool.largest_free <= pool.reserved - pool.live
    assert [(o.owner, o.key) for o in pool.owners] == [(name, str(n)) for name, n in PREFILL + DECODE]
    assert pool.owners[0].added > 0
    # the largest came first, the others fit into it; CUDA keeps blocks under 1 MiB in segments of their own, of 2 MiB
    assert sum(o.added for o in pool.owners[1:]) <= (4 << 20 if device == "cuda" else 0)
    for wrapper in wrappers.values():
        wrapper.cleanup()
    (pool,) = memory_report().pools
    assert not pool.owners


@device
def test_what_a_later_and_larger_key_adds_is_its_own(device: str) -> None:
    width = torch.nn.Parameter(
        torch.ones(64, device=device), requires_grad=False
    )  # else it were a dynamic size as well
    call = torch.compile(
        lambda x: torch.tanh(torch.relu(x * width) + 1) * 3,
        backend=sgc_backend.sgc_piecewise,
        dynamic=True,
        options={
            "inner": "eager",
            "cut_ops": [torch.relu],
            "capture_sizes": [4096, 32768, 65536, 131072],
            "device_module": module(device),
        },
    )
    x = torch.randn(131073, 64, device=device)
    with torch.no_grad():
        for n in (32768, 4096, 131072, 65536):  # the second fits into the first's memory, so the third isn't expected
            call(x[:n])
            call(x[:n])
    (pool,) = memory_report().pools
    added = {o.key: o.added for o in pool.owners}
    small = 4 << 20 if device == "cuda" else 0  # see above
    assert added["4096"] + added["65536"] <= small
    assert small < added["32768"] < added["131072"]


@device
def test_what_a_later_and_larger_key_of_a_wrapper_adds_is_its_own(device: str) -> None:
    wrappers = record_phases(device, [("decode", n) for n in (256, 64, 4096, 2048)])
    (pool,) = memory_report().pools
    added = {o.key: o.added for o in pool.owners}
    assert added["64"] <= (4 << 20 if device == "cuda" else 0)
    assert added["4096"] >= 4096 * 256 * 4
    for wrapper in wrappers.values():
        wrapper.cleanup()


@device
def test_a_measuring_session_tells_what_separate_pools_would_take(device: str) -> None:
    wrappers = record_phases(device, PREFILL + DECODE, measure=True)
    assert all(w.can_run(64) or w.can_run(512) for w in wrappers.values())
    (pool,) = memory_report().pools
    assert set(pool.alone) == {"prefill", "decode"}
    assert pool.pool_each == sum(pool.alone.values())
    assert pool.reserved <= 1.02 * pool.alone["prefill"]
    assert pool.reserved < pool.pool_each


@device
def test_what_was_measured_is_told_as_long_as_it_is_all_that_an_owner_recorded(device: str) -> None:
    wrapper = FullCudaGraphBackend(module(device), name="phase")
    x = torch.randn(512, D, device=device)

    def record(size: int, **session: Any) -> Any:
        with wrapper.capture_session(**session):
            wrapper.capture_one(size, lambda: body(x[:size]))
        (pool,) = memory_report().pools
        return pool.pool_each

    assert record(4, measure=True)
    assert record(512) is None  # which is not measured
    assert record(8, measure=True) is None  # nor does this session see the one before
    wrapper.cleanup()
    assert record(512, measure=True)
    wrapper.cleanup()
    assert record(4) is None


@device
@pytest.mark.parametrize("order", ["decode first", "ascending", "mixed"])
def test_any_order_takes_the_memory_of_the_largest(order: str, device: str) -> None:
    orders = {
        "decode first": DECODE + PREFILL,
        "ascending": sorted(PREFILL + DECODE, key=lambda p: p[1]),
        "mixed": [PREFILL[2], DECODE[0], PREFILL[0], DECODE[2], PREFILL[1], DECODE[1], PREFILL[3]],
    }
    alone = record_phases(device, PREFILL[:1], any_order=True)
    largest = memory_report().pools[0].reserved
    sgc_backend.reset()
    every = record_phases(device, orders[order], any_order=True)
    assert memory_report().pools[0].reserved <= 1.10 * largest
    del alone, every


@device
def test_sizes_of_a_compiled_model_in_the_order_of_traffic_take_the_memory_of_the_largest(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(body(m.a(x)))), a=lin(), b=lin()).to(device)
    options = {"inner": "eager", "cut_ops": CUTS, "capture_sizes": None, "device_module": module(device)}

    def reserved(sizes: list[int]) -> int:
        compiled = torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
        with torch.no_grad():
            for n in sizes:
                for _ in range(2):
                    compiled(torch.randn(n, D, device=device))
        found = memory_report().pools[0].reserved
        torch._dynamo.reset()
        sgc_backend.reset()
        return found

    largest = 1 << 16
    alone = reserved([largest])
    assert reserved([largest >> 3, largest >> 1, largest >> 5, largest, largest >> 2]) <= 1.10 * alone


def test_a_lane_is_a_pool_of_its_own() -> None:
    x = torch.randn(64, D)
    wrappers = [FullCudaGraphBackend(emulated, lane=lane, name=str(lane)) for lane in (None, "draft")]
    for wrapper in wrappers:
        with wrapper.capture_session():
            wrapper.capture_one(64, lambda: body(x))
    report = memory_report()
    assert {p.lane for p in report.pools} == {None, "draft"}
    assert all(len(p.owners) == 1 for p in report.pools)
    handles = {sgc_backend.get_or_create_global_graph_memory_pool(emulated, lane=lane) for lane in (None, "draft")}
    assert len(handles) == 2
    # lanes may overlap: no order is made between their replays
    for wrapper in wrappers:
        with emulated.stream(emulated.Stream()):
            wrapper.replay(64)


def test_the_report_is_a_table_and_plain_data() -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    options = {"inner": "eager", "cut_ops": CUTS, "capture_sizes": None}
    compiled = torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.randn(4096, D))
    report = memory_report()
    data = json.loads(report.to_json())
    (row,) = data["pools"][0]["owners"]
    assert row["key"] == "4096"
    assert row["recordings"] == 2
    assert row["added"] == sum(row["parts"].values()) > 0
    text = str(report)
    assert "4096" in text
    assert "with a pool each: not measured" in text
    sgc_backend.reset()
    assert str(memory_report()) == "no pool"
