"""The Triton kernels behind the demo's custom ops. Importing this file needs triton; ``ops.py`` says what
is computed.

The launch functions take tensors as they are and check nothing (the ops did). With TRITON_INTERPRET=1 in
the environment before triton is imported they run on host tensors too. No autotuning and no host reads of
device data: a launch may be captured once it has run, for the first one compiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def launch_write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """One program per token. Shapes as in ``ops.write_kv``; a row with a negative slot writes nothing."""
    T, K, D = k.shape
    if T == 0:  # an empty grid is a launch error
        return
    _write_kv[(T,)](
        k, v, k_cache, v_cache, slots,
        *k.stride(), *v.stride(),
        K=K, D=D, ROW=triton.next_power_of_2(K * D),
    )  # fmt: skip


def launch_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    token_req: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """One program per token and key/value head. Shapes as in ``ops.paged_attention``."""
    T, H, D = q.shape
    _, B, K, _ = k_cache.shape
    G = H // K
    if T == 0:
        return
    _paged_attention[(T, K)](
        q, k_cache, v_cache, block_tables, token_req, positions, scale, out,
        *q.stride(), *out.stride(), *block_tables.stride(),
        NB=block_tables.shape[1], K=K, G=G, D=D, B=B,
        G_PAD=triton.next_power_of_2(G), D_PAD=triton.next_power_of_2(D), B_PAD=triton.next_power_of_2(B),
    )  # fmt: skip


@triton.jit
def _write_kv(
    k, v, k_cache, v_cache, slots,
    k_stride_t, k_stride_h, k_stride_d, v_stride_t, v_stride_h, v_stride_d,
    K: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot >= 0:
        element = tl.arange(0, ROW)
        head = element // D
        dim = element % D
        mask = element < K * D
        k_row = tl.load(k + t * k_stride_t + head * k_stride_h + dim * k_stride_d, mask=mask)
        v_row = tl.load(v + t * v_stride_t + head * v_stride_h + dim * v_stride_d, mask=mask)
        tl.store(k_cache + slot * (K * D) + element, k_row, mask=mask)
        tl.store(v_cache + slot * (K * D) + element, v_row, mask=mask)


@triton.jit
def _paged_attention(
    q, k_cache, v_cache, block_tables, token_req, positions, scale, out,
    q_stride_t, q_stride_h, q_stride_d, out_stride_t, out_stride_h, out_stride_d,
    table_stride_r, table_stride_b,
    NB: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, B_PAD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    request = tl.load(token_req + t).to(tl.int64)
    # A padding row has no keys: the loop below runs zero times and it stores zeros. Never past the end of
    # the table.
    n_keys = tl.where(request < 0, 0, tl.minimum(tl.load(positions + t) + 1, NB * B)).to(tl.int32)
    table = block_tables + tl.maximum(request, 0) * table_stride_r

    group = tl.arange(0, G_PAD)
    dim = tl.arange(0, D_PAD)
    offset = tl.arange(0, B_PAD)
    q_head = kv_head * G + group
    in_q = (group < G)[:, None] & (dim < D)[None, :]
    q_at = q + t * q_stride_t + q_head[:, None] * q_stride_h + dim[None, :] * q_stride_d
    q_GD = tl.load(q_at, mask=in_q, other=0.0).to(tl.float32) * scale

    # Online softmax over the blocks. A group is too small for tensor cores (tl.dot wants 16 rows): products
    # and sums.
    largest_G = tl.full([G_PAD], -1e30, tl.float32)
    total_G = tl.zeros([G_PAD], tl.float32)
    acc_GD = tl.zeros([G_PAD, D_PAD], tl.float32)
    for j in range(0, tl.cdiv(n_keys, B)):
        block = tl.load(table + j * table_stride_b).to(tl.int64)
        seen_B = (offset < B) & (j * B + offset < n_keys)
        in_kv = seen_B[:, None] & (dim < D)[None, :]
        kv_at = ((block * B + offset[:, None]) * K + kv_head) * D + dim[None, :]
        k_BD = tl.load(k_cache + kv_at, mask=in_kv, other=0.0).to(tl.float32)
        v_BD = tl.load(v_cache + kv_at, mask=in_kv, other=0.0).to(tl.float32)
        scores_GB = tl.sum(q_GD[:, None, :] * k_BD[None, :, :], axis=2)
        scores_GB = tl.where(seen_B[None, :], scores_GB, -1e30)
        new_largest_G = tl.maximum(largest_G, tl.max(scores_GB, axis=1))
        weights_GB = tl.where(seen_B[None, :], tl.exp(scores_GB - new_largest_G[:, None]), 0.0)
        shrink_G = tl.exp(largest_G - new_largest_G)
        total_G = total_G * shrink_G + tl.sum(weights_GB, axis=1)
        acc_GD = acc_GD * shrink_G[:, None] + tl.sum(weights_GB[:, :, None] * v_BD[None, :, :], axis=1)
        largest_G = new_largest_G

    result_GD = acc_GD / tl.where(total_G == 0.0, 1.0, total_G)[:, None]
    out_at = out + t * out_stride_t + q_head[:, None] * out_stride_h + dim[None, :] * out_stride_d
    tl.store(out_at, result_GD.to(out.dtype.element_ty), mask=in_q)
