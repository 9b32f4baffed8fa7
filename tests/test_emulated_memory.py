"""The emulated device's memory: pools, blocks, and what is given back."""

from __future__ import annotations

import gc

import pytest
import torch
from test_emulated import _fresh, capturing, hidden_double, record, scaled

from sgc_backend import emulated as dev

__all__ = ["_fresh"]


KIB = 1024


def test_a_freed_block_is_overwritten_by_another_recording_of_the_same_pool_and_stream():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    first, a = record(lambda: torch.full((64,), 1.0), pool, stream)
    address = a.data_ptr()
    first.replay()
    del a
    second, b = record(lambda: torch.full((64,), 2.0), pool, stream)
    assert b.data_ptr() == address
    first.replay()
    assert (b == 1).all(), "the first recording writes to what is now the second one's"
    second.replay()
    assert (b == 2).all()


def test_a_block_is_not_reused_on_another_stream_nor_while_it_is_held():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    one, a = record(lambda: torch.zeros(64), pool, stream)
    two, b = record(lambda: torch.zeros(64), pool, stream)
    addresses = {a.data_ptr(), b.data_ptr()}
    assert len(addresses) == 2
    del a, b
    three, c = record(lambda: torch.zeros(64), pool, dev.Stream())
    assert c.data_ptr() not in addresses
    assert len({segment["stream"] for segment in dev.memory_snapshot()}) == 2
    assert one.pool() == two.pool() == three.pool() == pool


def test_descending_sizes_share_one_pool():
    def reserved(sizes, shared):
        dev.reset_emulation()
        pool, stream, graphs = dev.graph_pool_handle(), dev.Stream(), []
        for size in sizes:
            x = torch.zeros(size, KIB // 4)
            graphs.append(record(lambda x=x: (x + 1) * 2, pool if shared else None, stream)[0])
        return dev.memory_reserved()

    sizes = (1024, 512, 256, 128)
    largest, total = reserved(sizes[:1], True), reserved(sizes, False)
    assert largest <= reserved(sizes, True) <= 1.02 * largest < total
    # x + 1 and its double live together
    assert largest == 2 * 1024 * KIB


def test_blocks_split_and_merge():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    with dev.stream(stream), dev.allocate_to_pool(pool):
        parts = [torch.zeros(16 * KIB, dtype=torch.uint8) for _ in range(4)]
        start = parts[0].data_ptr()
        assert dev.memory_reserved() == 64 * KIB == dev.memory_allocated()
        parts[1] = parts[2] = None
        assert dev.memory_allocated() == 32 * KIB
        assert torch.zeros(32 * KIB, dtype=torch.uint8).data_ptr() == start + 16 * KIB
        parts.clear()
        assert torch.zeros(64 * KIB, dtype=torch.uint8).data_ptr() == start
        assert dev.memory_reserved() == 64 * KIB


def test_snapshot_adds_up():
    record(lambda: [torch.zeros(n) for n in (10, 5000, 100_000)])
    kept = record(lambda: torch.zeros(300))
    segments = dev.memory_snapshot()
    assert sum(s["total_size"] for s in segments) == dev.memory_reserved() > 0
    for s in segments:
        assert s["total_size"] % dev.SEGMENT_GRANULE == 0
        assert s["total_size"] == sum(b["size"] for b in s["blocks"])
        assert [b["address"] for b in s["blocks"]] == sorted(b["address"] for b in s["blocks"])
    live = [b for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sum(b["size"] for b in live) == dev.memory_allocated() == 1536
    assert [s["segment_pool_id"] for s in segments if s["active_size"]] == [kept[0].pool()]


def test_empty_cache_gives_back_only_what_no_graph_or_tensor_uses():
    graph, out = record(lambda: torch.zeros(100))
    dev.empty_cache()
    graph.reset()
    dev.empty_cache()
    assert dev.memory_reserved() == dev.SEGMENT_GRANULE, "a tensor is alive"
    del out
    assert dev.memory_reserved() == dev.SEGMENT_GRANULE
    dev.empty_cache()
    assert dev.memory_reserved() == 0
    graph = record(lambda: torch.zeros(100))[0]
    del graph
    gc.collect()
    dev.empty_cache()
    assert dev.memory_reserved() == 0


def test_tensor_outlives_its_graph_and_device():
    graph, out = record(lambda: torch.full((100,), 7.0))
    graph.replay()
    graph.reset()
    del graph
    dev.empty_cache()
    dev.reset_emulation()
    assert (out == 7).all()


def test_pool_that_lost_its_graphs_while_a_tensor_lives_cannot_be_captured_into():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    graph, out = record(lambda: torch.zeros(4), pool, stream)
    graph.reset()
    with dev.stream(stream), pytest.raises(dev.EmulatedCaptureError, match="use_count > 0"):
        dev.CUDAGraph().capture_begin(pool)
    assert not dev.random_usable()
    del out
    dev.empty_cache()
    record(lambda: torch.zeros(4), pool, stream)


def test_released_pool_is_given_back_with_its_last_block():
    pool = dev.graph_pool_handle()
    with dev.stream(dev.Stream()):
        with dev.allocate_to_pool(pool):
            x = torch.arange(10) + 1
        assert dev.in_pool(x) == pool and x.tolist() == list(range(1, 11))
        assert dev.in_pool(torch.zeros(1)) is None
    dev.empty_cache()
    assert dev.memory_reserved() > 0
    graph = dev.CUDAGraph()
    other = dev.graph_pool_handle()
    with capturing(graph, other):
        y = torch.zeros(3)
    dev.release_pool(0, other)
    before = dev.memory_reserved()
    del y
    assert dev.memory_reserved() == before - dev.SEGMENT_GRANULE


def test_allocate_to_pool_moves_custom_and_opaque_results():
    pool, x, seen = dev.graph_pool_handle(), torch.ones(3), torch.zeros(1)
    with dev.allocate_to_pool(pool):
        made = [scaled(x), hidden_double(x, seen), dev.opaque(lambda x: x + 3)(x), torch.tensor([1.0])]
        assert x.add_(0) is x and dev.in_pool(x) is None
    assert [dev.in_pool(t) for t in made] == [pool] * 4
    assert [t[0].item() for t in made] == [1, 2, 4, 1] and seen.item() == 1
