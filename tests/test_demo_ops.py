"""The demo's paged ops against a naive reference, and the Triton kernels (interpreted) against the torch
code.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from sgc_backend.demo.ops import paged_attention, write_kv

B, K, H, D, NUM_BLOCKS, NB = 4, 2, 6, 8, 24, 10
SCALE = D**-0.5

# Request lengths in the cache; the tokens asked about are the last few of each, as (request, position).
LENGTHS = [1, 7, 38, 16]
RAGGED = [(2, p) for p in range(38)] + [(0, 0)] + [(1, p) for p in range(3, 7)] + [(3, 15)]


def filled_cache(dtype=torch.float32):
    """A cache in which every request's blocks are scattered, the rest is NaN, and the dense keys and
    values.
    """
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    k_cache = torch.full((NUM_BLOCKS + 1, B, K, D), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    tables = torch.zeros(len(LENGTHS), NB, dtype=torch.int32)
    dense = []
    for r, length in enumerate(LENGTHS):
        blocks = [free.pop() for _ in range(-(-length // B))]
        tables[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        k, v = torch.randn(2, length, K, D, generator=generator).to(dtype)
        slots = torch.tensor([blocks[p // B] * B + p % B for p in range(length)])
        write_kv(k, v, k_cache, v_cache, slots)
        dense.append((k, v))
    return k_cache, v_cache, tables, dense


def queries(tokens, dtype=torch.float32):
    """q, token_req and positions of (request, position) pairs; a token's query depends on the pair only."""
    q = torch.stack([torch.randn(H, D, generator=torch.Generator().manual_seed(100 * r + p)) for r, p in tokens])
    token_req, positions = zip(*tokens, strict=True)
    return q.to(dtype), torch.tensor(token_req, dtype=torch.int32), torch.tensor(positions)


def attend(tokens, cache, dtype=torch.float32):
    k_cache, v_cache, tables, _ = cache
    q, token_req, positions = queries(tokens, dtype)
    out = torch.full_like(q, float("nan"))
    paged_attention(q, k_cache, v_cache, tables, token_req, positions, SCALE, out)
    return out


def naive(tokens, dense):
    q, _, _ = queries(tokens)
    out = torch.zeros(len(tokens), H, D)
    for t, (r, p) in enumerate(tokens):
        k, v = (x[: p + 1].float().repeat_interleave(H // K, dim=1) for x in dense[r])
        weights = (torch.einsum("hd,shd->hs", q[t], k) * SCALE).softmax(-1)
        out[t] = torch.einsum("hs,shd->hd", weights, v)
    return out


def test_ragged_batch_equals_naive_attention():
    cache = filled_cache()
    torch.testing.assert_close(attend(RAGGED, cache), naive(RAGGED, cache[3]))


def test_half_precision_accumulates_in_float32():
    cache = filled_cache(torch.bfloat16)
    q, token_req, positions = queries(RAGGED, torch.bfloat16)
    out = torch.empty_like(q)
    paged_attention(q, *cache[:3], token_req, positions, SCALE, out)
    wide, wide_out = q.float(), torch.empty_like(q.float())
    paged_attention(wide, cache[0].float(), cache[1].float(), cache[2], token_req, positions, SCALE, wide_out)
    assert torch.equal(out, wide_out.bfloat16())


def test_padding_rows_are_zero_and_change_nothing():
    cache = filled_cache()
    alone = attend(RAGGED, cache)
    padded = attend([*RAGGED, (-1, 0), (-1, 0)], cache)
    assert torch.equal(padded[:-2], alone)
    assert torch.equal(padded[-2:], torch.zeros(2, H, D))
    assert torch.equal(attend([(-1, 0)], cache), torch.zeros(1, H, D))


def test_token_is_bitwise_independent_of_its_batch():
    cache = filled_cache()
    together = attend(RAGGED, cache)
    for t, token in enumerate(RAGGED):
        assert torch.equal(attend([token], cache)[0], together[t])


def test_write_puts_rows_in_their_slots_and_padding_in_the_trash_block():
    k, v = torch.randn(2, 5, K, D)
    k[3] = float("nan")  # a padding row may hold anything
    k_cache, v_cache = torch.full((2, NUM_BLOCKS + 1, B, K, D), 7.0)
    write_kv(k, v, k_cache, v_cache, torch.tensor([9, 0, -1, -1, 4 * B + 3]))
    for rows, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.view(-1, K, D)
        touched = torch.tensor([9, 0, 4 * B + 3])
        assert torch.equal(flat[touched], rows[[0, 1, 4]])
        others = torch.ones(len(flat), dtype=torch.bool)
        others[touched] = False
        assert (flat[others][:-B] == 7).all()  # every real slot but those written
        assert flat.isfinite().all()


def test_write_takes_rows_of_a_fused_projection():
    k, _, v = torch.randn(5, 3, K, D).unbind(1)
    k_cache, v_cache = torch.zeros(2, NUM_BLOCKS + 1, B, K, D)
    write_kv(k, v, k_cache, v_cache, torch.arange(5))
    assert torch.equal(k_cache.view(-1, K, D)[:5], k)
    assert torch.equal(v_cache.view(-1, K, D)[:5], v)


def test_no_tokens_is_no_work():
    k_cache, v_cache, tables, _ = filled_cache()
    none = torch.empty(0, K, D)
    write_kv(none, none, k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    q = torch.empty(0, H, D)
    token_req, positions = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    paged_attention(q, k_cache, v_cache, tables, token_req, positions, SCALE, q.clone())


@pytest.mark.parametrize("wrong", ["heads", "out", "positions", "cache"])
def test_shapes_that_disagree_are_refused(wrong):
    k_cache, v_cache, tables, _ = filled_cache()
    q, token_req, positions = queries([(0, 0), (1, 1)])
    out = torch.empty_like(q)
    if wrong == "heads":
        q = out = q[:, :5]
    elif wrong == "out":
        out = out[:1]
    elif wrong == "positions":
        positions = positions[:1]
    else:
        k_cache = k_cache[:, :, :, ::2]
    with pytest.raises(ValueError, match=r"must|expected"):
        paged_attention(q, k_cache, v_cache, tables, token_req, positions, SCALE, out)


def test_ops_pass_the_checks_of_torch_library():
    k_cache, v_cache, tables, _ = filled_cache()
    k_cache, v_cache = k_cache.nan_to_num(), v_cache.nan_to_num()
    q, token_req, positions = queries(RAGGED)
    # Without gradients: the ops serve, and have no formula for a backward pass.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(write_kv, (*torch.randn(2, 5, K, D), k_cache, v_cache, torch.arange(5)), test_utils=tests)
    attention = (q, k_cache, v_cache, tables, token_req, positions, SCALE, torch.empty_like(q))
    torch.library.opcheck(paged_attention, attention, test_utils=tests)


# Runs in a process of its own, as triton reads TRITON_INTERPRET when it is imported.
def _compare_interpreted_kernels():
    from sgc_backend.demo.kernels import launch_paged_attention, launch_write_kv

    for dtype in (torch.float32, torch.float16):
        k_cache, v_cache, tables, _ = filled_cache(dtype)
        tokens = [(2, 37), (0, 0), (1, 6), (3, 15), (-1, 0)]
        q, token_req, positions = queries(tokens, dtype)
        expected, out = torch.empty_like(q), torch.full_like(q, float("nan"))
        paged_attention(q, k_cache, v_cache, tables, token_req, positions, SCALE, expected)
        launch_paged_attention(q, k_cache, v_cache, tables, token_req, positions, SCALE, out)
        torch.testing.assert_close(out, expected)
        alone = torch.empty_like(q[:1])
        launch_paged_attention(q[:1], k_cache, v_cache, tables, token_req[:1], positions[:1], SCALE, alone)
        assert torch.equal(alone, out[:1])

        k, _, v = torch.randn(5, 3, K, D).to(dtype).unbind(1)
        slots = torch.tensor([9, 0, -1, -1, 19])
        caches = torch.zeros(4, NUM_BLOCKS + 1, B, K, D, dtype=dtype)
        write_kv(k, v, caches[0], caches[1], slots)
        launch_write_kv(k, v, caches[2], caches[3], slots)
        assert torch.equal(caches[:2], caches[2:])


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("triton", "numpy"))), reason="needs triton, whose interpreter needs numpy"
)
def test_interpreted_triton_kernels_equal_the_torch_code():
    code = f"import runpy; runpy.run_path({__file__!r})['_compare_interpreted_kernels']()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
