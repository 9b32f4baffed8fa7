"""The emulated device: what a recording does, what it refuses, and what it leaves behind."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F

from sgc_backend import emulated as dev

calls: list[str] = []


@torch.library.custom_op("sgc_emulated_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    calls.append("scaled")
    return x * len(calls)


@scaled.register_fake
def _(x):
    return torch.empty_like(x)


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
