"""The two custom ops of the demo model: write into a paged KV cache, and attend over it.

Shapes: T tokens (all requests of a batch, flattened), R requests, H query heads, K key/value heads, G = H /
K query heads that share a key/value head, D head dim, NB blocks in a request's table, B block size
(tokens), S cache slots.

A cache is ``[num_blocks + 1, B, K, D]``. Token position p of a request lives in the slot ``table[p // B] *
B + p % B``. The last block is the *trash block*: nobody's table names it, its contents mean nothing, and a
padding row (slot < 0) may be sent there. That is what lets a padded batch be written with static shapes and
without a branch on the data.

Each op has two implementations: plain torch for any device, and a Triton kernel (see ``kernels.py``) for
CUDA. Both keep to static shapes and never wait for the device, so both can be recorded, and both compute a
token's result from its own row and its own request only, in an order that doesn't depend on the rest of the
batch.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from sgc_backend.attention import register_attention

# How many cache blocks of keys the torch implementation looks at in one go. A constant and not a function
# of T: it sets the order of the additions, and a token's result must not depend on the size of the batch.
_BLOCKS_AT_ONCE = 8


@torch.library.custom_op("sgc_demo::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store the keys and values of T tokens in the cache, in place.

    k, v: [T, K, D]. k_cache, v_cache: [num_blocks + 1, B, K, D], contiguous. slots: [T] int64, block * B +
    offset; a negative slot marks a padding row, which touches no real slot (this implementation writes
    zeros into the cache's last slot instead, in the trash block). Slots that are not negative must differ.
    Raises ValueError when shapes disagree.
    """
    _check_write(k, v, k_cache, v_cache, slots)
    last_slot = k_cache.shape[0] * k_cache.shape[1] - 1
    is_pad_T = slots < 0
    target_T = torch.where(is_pad_T, last_slot, slots)
    # All padding rows meet in one slot. Equal values make the outcome independent of the order in which
    # they land.
    for rows_TKD, cache in ((k, k_cache), (v, v_cache)):
        rows_TKD = rows_TKD.masked_fill(is_pad_T[:, None, None], 0)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, target_T, rows_TKD.to(cache.dtype))


@write_kv.register_fake
def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    return None


@torch.library.custom_op("sgc_demo::paged_attention", mutates_args=("out",))
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    token_req: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Causal grouped-query attention of T tokens over their requests' cached keys and values, written into
    ``out``.

    q, out: [T, H, D]. k_cache, v_cache: [num_blocks + 1, B, K, D], contiguous, H a multiple of K.
    block_tables: [R, NB] int32. token_req: [T] int32, the row of block_tables that a token belongs to;
    negative marks a padding row, whose output is zeros. positions: [T] int64; token t sees the cache
    positions 0..positions[t] of its request, its own included, so its key must have been written before.
    scale multiplies the scores. Ragged prefill, chunked prefill and decode (one token a request) are all
    this one op. Sums are kept in float32 whatever the dtype is. Raises ValueError when shapes disagree.
    """
    _check_attention(q, k_cache, v_cache, block_tables, token_req, positions, out)
    T, H, D = q.shape
    _, B, K, _ = k_cache.shape
    tables = block_tables.long()
    # A padding row reads request 0's blocks and has every key masked.
    table_T = tables[token_req.long().clamp(min=0)]
    last_seen_T = torch.where(token_req < 0, -1, positions)
    q_TKGD = q.reshape(T, K, H // K, D).float() * scale

    # Online softmax: the largest score so far, the sum of exponentials and the weighted values, both
    # relative to it.
    largest = q_TKGD.new_full((T, K, H // K, 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(largest)
    acc_TKGD = torch.zeros_like(q_TKGD)
    for first in range(0, tables.shape[1], _BLOCKS_AT_ONCE):
        blocks = table_T[:, first : first + _BLOCKS_AT_ONCE]
        n_keys = blocks.shape[1] * B
        key_positions = torch.arange(first * B, first * B + n_keys, device=q.device)
        hidden_TS = key_positions > last_seen_T[:, None]
        k_TKSD = k_cache[blocks].reshape(T, n_keys, K, D).transpose(1, 2).contiguous()
        # Masked values are zeroed as well as weighted by zero: a stale cache may hold NaN, and 0 * NaN is
        # NaN.
        v_TKSD = v_cache[blocks].reshape(T, n_keys, K, D).transpose(1, 2)
        v_TKSD = v_TKSD.masked_fill(hidden_TS[:, None, :, None], 0)
        # Keys laid out per head, as above: the batched product then takes the same path for one token as
        # for many.
        scores_TKGS = q_TKGD @ k_TKSD.float().mT
        scores_TKGS = scores_TKGS.masked_fill(hidden_TS[:, None, None, :], torch.finfo(torch.float32).min)
        new_largest = torch.maximum(largest, scores_TKGS.amax(-1, keepdim=True))
        weights_TKGS = (scores_TKGS - new_largest).exp().masked_fill(hidden_TS[:, None, None, :], 0)
        shrink = (largest - new_largest).exp()
        total = total * shrink + weights_TKGS.sum(-1, keepdim=True)
        acc_TKGD = acc_TKGD * shrink + weights_TKGS @ v_TKSD.float()
        largest = new_largest
    # A padding row has summed nothing: 0 / 1, not 0 / 0.
    out.copy_((acc_TKGD / torch.where(total == 0, 1, total)).reshape(T, H, D))


@paged_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    token_req: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    return None


# Triton is optional (there is none on macOS), and importing it costs a second: it is looked for here and only
# imported by the first call that runs on CUDA. Without it CUDA tensors take the torch implementation too.
if importlib.util.find_spec("triton") is not None:

    @write_kv.register_kernel("cuda")
    def _(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        from sgc_backend.demo.kernels import launch_write_kv

        _check_write(k, v, k_cache, v_cache, slots)
        launch_write_kv(k, v, k_cache, v_cache, slots)

    @paged_attention.register_kernel("cuda")
    def _(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        token_req: Tensor,
        positions: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        from sgc_backend.demo.kernels import launch_paged_attention

        _check_attention(q, k_cache, v_cache, block_tables, token_req, positions, out)
        launch_paged_attention(q, k_cache, v_cache, block_tables, token_req, positions, scale, out)


def _check_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _check_cache(k_cache, v_cache)
    if k.ndim != 3 or k.shape != v.shape or k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"write_kv: k and v must both be [tokens, {k_cache.shape[2]}, {k_cache.shape[3]}] to fit the "
            f"cache, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if slots.shape != k.shape[:1]:
        raise ValueError(f"write_kv: slots must be [{k.shape[0]}], one per token, got {tuple(slots.shape)}")


def _check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    token_req: Tensor,
    positions: Tensor,
    out: Tensor,
) -> None:
    _check_cache(k_cache, v_cache)
    if q.ndim != 3 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"paged_attention: q must be [tokens, a multiple of {k_cache.shape[2]} heads, "
            f"{k_cache.shape[3]}] to fit the cache, got {tuple(q.shape)}"
        )
    if out.shape != q.shape:
        raise ValueError(f"paged_attention: out must be {tuple(q.shape)} like q, got {tuple(out.shape)}")
    if block_tables.ndim != 2 or token_req.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ValueError(
            "paged_attention: expected block_tables [requests, blocks], token_req and positions "
            f"[{q.shape[0]}], got {tuple(block_tables.shape)}, {tuple(token_req.shape)} and {tuple(positions.shape)}"
        )


def _check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            "the caches must both be [blocks + 1, block size, kv heads, head dim], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous, since a slot is an offset into them; pass no slices")


# Attention mixes the rows of a request over as many positions as it has: a cut wherever sizes are dynamic (prefill
# through torch.compile), captured with the rest where they are fixed (decode).
register_attention("sgc_demo::paged_attention")
