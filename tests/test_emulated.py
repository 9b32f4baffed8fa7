"""The emulated device: what a recording does, what it refuses, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
import torch.nn.functional as F

from sgc_backend import emulated as dev

KIB = 1024
calls: list[str] = []


@torch.library.custom_op("sgc_emulated_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    calls.append("scaled")
    return x * len(calls)


@scaled.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("sgc_emulated_test::split_at", mutates_args=())
def split_at(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums up to each of ``ends``, which the body reads on the host."""
    return torch.stack([x[: int(end)].sum() for end in ends.tolist()])


@torch.library.custom_op("sgc_emulated_test::hidden_double", mutates_args=("seen",))
def hidden_double(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Works where the dispatcher can't look, like a kernel of another library."""
    calls.append("hidden_double")
    out = torch.empty_like(x)
    with torch.utils._python_dispatch._disable_current_modes():
        out.copy_(x * 2)
        seen.add_(1)
    return out


@hidden_double.register_fake
def _(x, seen):
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def _fresh():
    dev.reset_emulation()
    calls.clear()
    yield
    dev.reset_emulation()


@contextlib.contextmanager
def capturing(graph, pool=None, stream=None, mode="thread_local"):
    with dev.stream(stream or dev.Stream()):
        graph.capture_begin(pool, capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


def record(fn, pool=None, stream=None):
    graph = dev.CUDAGraph()
    with capturing(graph, pool, stream):
        out = fn()
    return graph, out


def invalidate(pool, stream):
    """A capture that fails at a sync."""
    graph = dev.CUDAGraph()
    with dev.stream(stream):
        graph.capture_begin(pool)
        with pytest.raises(dev.EmulatedCaptureError, match="not permitted when stream is capturing"):
            torch.ones(2).sum().item()
        with pytest.raises(dev.EmulatedCaptureError, match=r"invalidated.*_local_scalar_dense"):
            graph.capture_end()
    return graph


# -- recording and replaying -----------------------------------------------------------------------------


def test_capture_executes_nothing_and_replay_does():
    x, cache = torch.ones(4), torch.zeros(4)
    graph, out = record(lambda: cache.add_(x) + 1)
    assert torch.equal(cache, torch.zeros(4))
    assert out.isnan().all(), "fresh results hold poison until a replay"
    assert graph.num_nodes == 2
    graph.replay()
    assert torch.equal(cache, x) and torch.equal(out, x + 1)


def test_replay_reads_refilled_inputs_at_the_same_addresses():
    x = torch.arange(6.0)
    graph, out = record(lambda: (x * 2).relu())
    for step in range(3):
        x.fill_(step)
        address = out.data_ptr()
        graph.replay()
        assert out.data_ptr() == address
        assert torch.equal(out, torch.full((6,), 2.0 * step))


def test_host_values_and_python_are_frozen():
    x, scale = torch.ones(2), [3]
    runs = []

    def step():
        runs.append(1)
        return x * scale[0] + torch.tensor([1.0, 2.0])

    graph, out = record(step)
    scale[0] = 100
    graph.replay()
    assert torch.equal(out, torch.tensor([4.0, 5.0])) and len(runs) == 1


def test_lifted_constant_that_is_written_to_starts_over_at_every_replay():
    graph, out = record(lambda: torch.tensor([1.0]).add_(1))
    graph.replay()
    graph.replay()
    assert out.item() == 2.0


def test_python_custom_op_is_recorded_by_its_inner_ops_and_frozen():
    x = torch.ones(3)
    graph, out = record(lambda: scaled(x))
    assert calls == ["scaled"]
    calls.append("another call would scale by more")
    x.fill_(5)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 5.0)) and calls.count("scaled") == 1
    assert graph.num_nodes == 1


def test_custom_op_that_hides_its_work_is_one_opaque_launch():
    x, seen = torch.ones(3), torch.zeros(1)
    graph, out = record(lambda: hidden_double(x, seen) + 1)
    assert seen.item() == 0, "nothing may have been executed"
    calls.clear()
    x.fill_(4)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 9.0)) and seen.item() == 1
    assert calls == ["hidden_double"] and graph.num_nodes == 2


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_op_of_a_library_is_recorded_by_its_inner_ops(key):
    def body(x, cache):
        calls.append(key)
        cache.add_(x)
        return x.sin() + cache

    x, cache = torch.ones(3), torch.zeros(3)
    with torch.library._scoped_library("sgc_emulated_lib", "FRAGMENT") as library:
        library.define("op(Tensor x, Tensor(a!) cache) -> Tensor")
        library.impl("op", body, key)
        graph, out = record(lambda: torch.ops.sgc_emulated_lib.op(x, cache))
        assert cache.sum() == 0 and graph.num_nodes == 3
        graph.replay()
    assert calls == [key] and torch.equal(cache, x) and torch.equal(out, x.sin() + 1)


def test_custom_op_can_be_named_opaque():
    dev.treat_as_opaque("sgc_emulated_test::scaled")
    x = torch.ones(3)
    graph, _out = record(lambda: scaled(x))
    before = len(calls)
    graph.replay()
    assert len(calls) == before + 1


def test_views_splits_lists_and_out_variants():
    x = torch.arange(12.0).view(3, 4)
    small, written = torch.empty(0), torch.empty(3, 4)

    def fn():
        a, b = x.t().contiguous().split(2)
        top, where = x.topk(2, dim=1)
        rows = torch._foreach_add([a, b], 1.0)
        torch._foreach_mul_(rows, 2.0)
        torch.add(x, 1, out=written)
        torch.mul(x, 2, out=small)
        flat = torch.matmul(x[None], x.t())
        return a, b, top, where, rows, x.detach()[1], torch.stack(x.unbind(0)), torch.arange(3), flat, x.mean()

    expected = fn()
    kept = written.clone(), small.clone()
    written.zero_()
    small = torch.empty(0)
    graph, out = record(fn)
    assert small.shape == (3, 4) and written.sum() == 0
    graph.replay()
    for got, want in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)
    assert torch.equal(written, kept[0]) and torch.equal(small, kept[1])
    assert out[5].data_ptr() == x[1].data_ptr()
    assert out[1].untyped_storage().data_ptr() == out[0].untyped_storage().data_ptr()


def test_empty_launches_nothing():
    graph, out = record(lambda: torch.empty(5))
    assert graph.num_nodes == 0 and out.shape == (5,) and dev.in_pool(out) == graph.pool()


def test_kv_cache_write_happens_once_per_replay():
    cache, position, new = torch.zeros(8, 2), torch.tensor([3]), torch.ones(1, 2)
    graph, out = record(lambda: cache.index_add_(0, position, new).sum())
    assert cache.sum() == 0
    for step in (1, 2):
        graph.replay()
        assert cache[3].tolist() == [step, step] and out == 2 * step


def test_random_numbers_advance_between_replays_and_follow_the_seed():
    x = torch.ones(64)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    graph, (out, noise) = record(lambda: (F.dropout(x, 0.5), torch.rand(3)))
    assert torch.equal(torch.get_rng_state(), before), "a capture draws nothing"
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        seen.append((out.clone(), noise.clone()))
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    torch.manual_seed(1)
    assert torch.equal(F.dropout(x, 0.5), seen[0][0])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.qkv, self.proj = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def forward(self, x):
        q, k, v = (t.view(1, -1, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("grad_mode", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_block_replays_bitwise(grad_mode, dtype):
    torch.manual_seed(0)
    block, x = Block().to(dtype), torch.empty(1, 7, 32, dtype=dtype)
    with grad_mode():
        graph, out = record(lambda: block(x))
    for _ in range(2):
        torch.nn.init.normal_(x)
        graph.replay()
        assert torch.equal(out.detach(), block(x).detach())


def test_recording_made_in_inference_mode_replays_in_place_ops_outside_of_it():
    with torch.inference_mode():
        x = torch.zeros(2)
        graph, out = record(lambda: x.add_(1).mul_(2) + torch.zeros(2).add_(3))
    graph.replay()
    assert out.is_inference() and torch.equal(x, torch.full((2,), 2.0)) and torch.equal(out, x + 3)


def test_autocast_of_the_capture_counts_and_not_that_of_the_replay():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    plain, out = record(lambda: x @ w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, low = record(lambda: x @ w)
        plain.replay()
    mixed.replay()
    assert out.dtype == torch.float32 and torch.equal(out, x @ w)
    assert low.dtype == torch.bfloat16 and torch.equal(low, x.bfloat16() @ w.bfloat16())


def test_only_the_capturing_thread_is_recorded():
    graph, other = dev.CUDAGraph(), torch.zeros(2)
    with capturing(graph):
        thread = threading.Thread(target=lambda: other.add_(1))
        thread.start()
        thread.join()
    assert graph.num_nodes == 0 and torch.equal(other, torch.ones(2))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-1, 1, (-2, -1), 0])
def test_a_norm_over_one_element_has_the_shape_that_eager_gives(dim, keepdim):
    x = torch.arange(-4.0, 4.0)[:, None]
    expected = torch.linalg.vector_norm(x, 2, dim, keepdim)
    graph, result = record(lambda: torch.linalg.vector_norm(x, 2, dim, keepdim) + 0)
    graph.replay()
    assert result.shape == expected.shape
    assert torch.equal(result, expected)


def test_a_norm_over_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match="out of range"):
        record(lambda: torch.linalg.vector_norm(torch.ones(3, 1), 2, [2]))


@pytest.mark.parametrize("draws", [True, False])
def test_another_seed_is_refused_in_a_capture(draws):
    x = torch.zeros(4)

    def seeds():
        x.add_(1)
        torch.manual_seed(torch.initial_seed() + 1)
        if draws:
            x.uniform_()

    with pytest.raises(dev.EmulatedCaptureError, match="manual_seed"):
        record(seeds)
    assert not dev.random_usable()


def test_a_generator_that_the_graph_knows_nothing_of_is_refused_in_a_capture():
    x, generator = torch.zeros(4), torch.Generator()
    with pytest.raises(dev.EmulatedCaptureError, match="generator isn't registered"):
        record(lambda: x.uniform_(generator=generator))
    dev.recover_generator()
    graph, _ = record(lambda: x.uniform_(generator=torch.default_generator))
    graph.replay()
    assert x.any()


# -- opaque launches -------------------------------------------------------------------------------------


def test_opaque_keeps_mutation_and_aliasing():
    def fn(args):
        cache, x, n = args
        args.clear()
        cache.add_(x)
        fresh = x * n
        return [cache[1:], fresh, fresh[:1], x, None, n]

    fn._boxed_call = True
    cache, x = torch.zeros(3), torch.ones(3)
    given = [cache, x, 4]
    step = dev.opaque(fn)
    assert step._boxed_call
    graph, (tail, fresh, head, same, nothing, n) = record(lambda: step(given))
    assert given == [], "a boxed callable takes its arguments"
    assert torch.equal(cache, torch.zeros(3)) and same is x and nothing is None and n == 4
    assert tail.data_ptr() == cache[1:].data_ptr() and head.data_ptr() == fresh.data_ptr()
    graph.replay()
    x.fill_(2)
    graph.replay()
    assert torch.equal(cache, torch.full((3,), 3.0)) and torch.equal(fresh, torch.full((3,), 8.0))
    assert head.item() == 8 and graph.num_nodes == 1


def test_opaque_keeps_the_sign_that_views_are_read_with():
    def fn(z, w):
        return z.conj(), w * 1, (z * 2).conj(), w.imag

    z = torch.randn(4, dtype=torch.complex64)
    w = torch.randn(4, dtype=torch.complex64)
    graph, out = record(lambda: dev.opaque(fn)(z, w.conj()))
    for _ in range(2):
        z.copy_(torch.randn(4, dtype=torch.complex64))
        w.copy_(torch.randn(4, dtype=torch.complex64))
        graph.replay()
        for got, wanted in zip(out, fn(z, w.conj()), strict=True):
            assert (got.is_conj(), got.is_neg()) == (wanted.is_conj(), wanted.is_neg())
            assert torch.equal(got, wanted)


def test_opaque_puts_the_generator_back_and_draws_at_replay():
    step = dev.opaque(lambda x: x + torch.rand(3))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    graph, out = record(lambda: step(torch.zeros(3)))
    graph.replay()
    assert torch.equal(out, expected)


def test_opaque_code_may_count_from_the_begin_of_its_arguments_storages():
    def fn(x, y):
        x.as_strided((2,), (1,), 1).add_(1)  # the offset is the storage's, and not the tensor's
        return x.untyped_storage().nbytes(), x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    def whole():
        other, x = torch.zeros(600), torch.zeros(4)
        step(x[2:], x)
        step(x, other)
        return x

    seen = []
    step = dev.opaque(lambda *args: seen.append(fn(*args)))
    graph, result = record(whole)
    graph.replay()
    assert result.tolist() == [0, 2, 2, 0]
    assert seen[2:] == [(16, True), (16, False)]


def test_opaque_without_a_capture_is_the_function():
    assert dev.opaque(lambda x: x + 1)(torch.ones(1)).item() == 2


def test_compiled_code_is_recorded_through_opaque():
    compiled = dev.opaque(torch.compile(lambda x, y: (x * y).relu() + 1, backend="aot_eager"))
    x, y = torch.randn(4), torch.randn(4)
    with torch.no_grad():
        compiled(x, y)
        graph, out = record(lambda: compiled(x * 1, y) * 2)
        x.neg_()
        graph.replay()
    assert torch.equal(out, ((x * y).relu() + 1) * 2) and graph.num_nodes == 3


# -- memory ----------------------------------------------------------------------------------------------


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


# -- what a capture forbids, and what that leaves behind -------------------------------------------------

MASK = torch.tensor([True, False, True])
FORBIDDEN = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(MASK),
    "index by mask": lambda x: x[MASK],
    "write by mask": lambda x: x.index_put_((MASK,), torch.zeros(2)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "tolist in a custom op": lambda x: split_at(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "synchronize": lambda x: dev.synchronize(),
    "stream synchronize": lambda x: dev.current_stream().synchronize(),
    "event synchronize": lambda x: dev.current_stream().record_event().synchronize(),
    "query": lambda x: dev.current_stream().query(),
    "outside event": lambda x: dev.current_stream().wait_stream(dev.Stream()),
    "nested capture": lambda x: dev.CUDAGraph().capture_begin(),
    "replay": lambda x: record_before.replay(),
}
record_before: dev.CUDAGraph


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_operations_raise_and_invalidate(what, inference):
    global record_before
    x, graph = torch.ones(3), dev.CUDAGraph()
    record_before, _ = record(lambda: x + 1)
    with torch.inference_mode(inference), dev.stream(dev.Stream()):
        graph.capture_begin()
        with pytest.raises(dev.EmulatedCaptureError, match="operation not permitted when stream is capturing"):
            FORBIDDEN[what](x)
        with pytest.raises(dev.EmulatedCaptureError, match="previous error"):
            x + 1
        with pytest.raises(dev.EmulatedCaptureError, match="invalidated"):
            graph.capture_end()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert not dev.is_current_stream_capturing()


def test_masked_write_of_one_value_is_permitted():
    x = torch.ones(3)

    def fn():
        x[MASK] = 5.0

    graph, _ = record(fn)
    graph.replay()
    assert x.tolist() == [5, 1, 5]


def test_nested_capture_on_another_stream_of_the_thread_is_refused():
    graph = dev.CUDAGraph()
    with pytest.raises(dev.EmulatedCaptureError, match="invalidated"), capturing(graph):
        other = dev.stream(dev.Stream())
        with pytest.raises(dev.EmulatedCaptureError, match="inside of a capture"), other:
            dev.CUDAGraph().capture_begin()


def test_invalidated_capture_poisons_and_is_recovered_from():
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    keeper = record(lambda: torch.zeros(1), pool, stream)[0]
    noisy = record(lambda: torch.rand(2), pool, stream)[0]
    failed = invalidate(pool, stream)
    failed.reset()
    assert not dev.random_usable()
    with pytest.raises(dev.EmulatedCaptureError, match="Offset increment outside graph capture"):
        noisy.replay()
    with dev.stream(stream), pytest.raises(dev.EmulatedCaptureError, match="already recording to mempool_id"):
        dev.CUDAGraph().capture_begin(pool)
    elsewhere = dev.allocate_to_pool(dev.graph_pool_handle())
    with pytest.raises(dev.EmulatedCaptureError, match="Offset increment"), elsewhere:
        torch.rand(1)
    keeper.reset()
    noisy.reset()
    dev.empty_cache()
    assert dev.memory_reserved() > 0, "the failed capture still claims the pool"

    dev.end_allocate_to_pool(0, pool)
    dev.release_pool(0, pool)
    dev.recover_generator()
    assert dev.random_usable() and dev.memory_reserved() == 0
    graph, out = record(lambda: torch.rand(3), pool, stream)
    graph.replay()
    assert not out.isnan().any()


def test_random_op_is_refused_in_a_capture_after_a_failed_one_and_an_empty_capture_cures():
    invalidate(dev.graph_pool_handle(), dev.Stream())
    graph = dev.CUDAGraph()
    with capturing(graph), pytest.raises(dev.EmulatedCaptureError, match="Offset increment"):
        torch.rand(1)
    assert dev.random_usable()
    record(lambda: torch.rand(1))


def test_python_exception_is_clean():
    pool, stream, graph = dev.graph_pool_handle(), dev.Stream(), dev.CUDAGraph()
    with pytest.raises(ZeroDivisionError), capturing(graph, pool, stream):
        torch.zeros(2)
        raise ZeroDivisionError
    assert dev.random_usable() and graph.num_nodes == 1
    with pytest.raises(RuntimeError, match="broadcast"), capturing(dev.CUDAGraph(), pool, stream):
        torch.zeros(2) + torch.zeros(3)
    record(lambda: torch.rand(2), pool, stream)[0].replay()


def test_default_stream_and_used_graphs_are_refused():
    with pytest.raises(dev.EmulatedCaptureError, match="non-default stream"):
        dev.CUDAGraph().capture_begin()
    dev.recover_generator()
    graph, _ = record(lambda: torch.zeros(1))
    with dev.stream(dev.Stream()):
        with pytest.raises(RuntimeError, match="already owns"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="without a capture_begin"):
            graph.capture_end()
        with pytest.raises(ValueError, match="capture_error_mode"):
            dev.CUDAGraph().capture_begin(capture_error_mode="any")


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_synchronize_of_another_thread(mode):
    graph, raised = dev.CUDAGraph(), []

    def other():
        try:
            dev.synchronize()
        except dev.EmulatedCaptureError as error:
            raised.append(error)

    expected = pytest.raises(dev.EmulatedCaptureError) if mode == "global" else contextlib.nullcontext()
    with expected, capturing(graph, mode=mode):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(raised) == (mode == "global")


# -- streams ---------------------------------------------------------------------------------------------


@pytest.fixture
def two_replays():
    """Two recordings of one pool, and a stream for each."""
    pool, stream = dev.graph_pool_handle(), dev.Stream()
    x = torch.zeros(4)
    return [record(lambda n=n: x + n, pool, stream)[0] for n in (1, 2)], (dev.Stream(), dev.Stream())


def replay_on(graph, stream):
    with dev.stream(stream):
        graph.replay()


def test_overlapping_replays_of_one_pool_are_detected(two_replays):
    (a, b), (s, t) = two_replays
    replay_on(a, s)
    before = dev.stats().launches
    with pytest.raises(dev.EmulatedRaceError, match=f"overlapping.*stream {s.stream_id}.*stream {t.stream_id}"):
        replay_on(b, t)
    assert dev.stats().launches == before
    replay_on(b, s)


@pytest.mark.parametrize("order", ["event", "wait_stream", "synchronize", "stream", "event_sync", "chain"])
def test_ordered_replays_are_not(two_replays, order):
    (a, b), (s, t) = two_replays
    replay_on(a, s)
    if order == "event":
        t.wait_event(s.record_event())
    elif order == "wait_stream":
        t.wait_stream(s)
    elif order == "synchronize":
        dev.synchronize()
    elif order == "stream":
        s.synchronize()
    elif order == "event_sync":
        s.record_event().synchronize()
    else:
        between = dev.Stream()
        between.wait_stream(s)
        t.wait_stream(between)
    replay_on(b, t)


def test_an_event_recorded_before_the_replay_does_not_order_it(two_replays):
    (a, b), (s, t) = two_replays
    event = s.record_event()
    replay_on(a, s)
    t.wait_event(event)
    with pytest.raises(dev.EmulatedRaceError):
        replay_on(b, t)


def test_replays_of_different_pools_may_overlap():
    (a, _), (b, _) = record(lambda: torch.zeros(1)), record(lambda: torch.zeros(1))
    replay_on(a, dev.Stream())
    replay_on(b, dev.Stream())


def test_side_stream_joins_the_capture():
    x, side, graph = torch.ones(2), dev.Stream(), dev.CUDAGraph()
    with capturing(graph):
        main = dev.current_stream()
        y = x + 1
        side.wait_stream(main)
        with dev.stream(side):
            assert dev.is_current_stream_capturing()
            z = y * 3
        main.wait_stream(side)
        with dev.stream(dev.Stream()):
            assert not dev.is_current_stream_capturing()
            assert (x + 5).tolist() == [6, 6], "work on a stream that didn't join is executed at once"
    with dev.stream(side):
        assert not dev.is_current_stream_capturing()
    assert graph.num_nodes == 2
    graph.replay()
    assert z.tolist() == [6, 6]


@pytest.mark.parametrize("late", [False, True])
def test_unjoined_side_stream_invalidates(late):
    side, graph = dev.Stream(), dev.CUDAGraph()
    with dev.stream(dev.Stream()) as _:
        graph.capture_begin()
        main = dev.current_stream()
        side.wait_stream(main)
        if late:
            main.wait_stream(side)
            third = dev.Stream()
            third.wait_stream(side)
        with pytest.raises(dev.EmulatedCaptureError, match="unjoined work"):
            graph.capture_end()
    assert not dev.random_usable()
    with pytest.raises(RuntimeError):
        graph.replay()


def test_current_stream_is_the_threads_own():
    stream, seen = dev.Stream(), []
    with dev.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(dev.current_stream()))
        thread.start()
        thread.join()
        assert dev.current_stream() is stream and stream.cuda_stream == stream.stream_id > 0
    assert seen == [dev.default_stream()] and dev.default_stream().cuda_stream == 0
    assert dev.current_stream() == dev.default_stream()


def test_events_time_on_request():
    first, second = dev.Event(enable_timing=True), dev.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        first.elapsed_time(second)
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0 and first.query()


def test_counters():
    graph, _ = record(lambda: torch.zeros(3) + 1)
    graph.replay()
    graph.replay()
    assert dev.stats() == dev.Stats(launches=4, replays=2, captures=1)
