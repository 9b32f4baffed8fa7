"""Cases for prefix safety: ops by their own names, and rows that were merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from prefix_case import blamed, f, ints, mask, safe
from prefix_oracle import N

# -- ops by their own names: what torch's functions seldom lead to ----------------------------------------------------

aten = torch.ops.aten
safe("sums with products", lambda x, w, b: aten.addmv(b, x, w) + aten.vdot(w, w), f(N, 6), f(6), f(N))
blamed("vdot over rows", "vdot", lambda x: aten.vdot(x, x), f(N))
blamed("addmv over rows", "addmv", lambda x, w, b: aten.addmv(b, x.t(), w), f(N, 6), f(N), f(6))
safe(
    "pointwise without a tag",
    lambda x, y: (aten.rsub(x, y), aten.threshold(x, 0.1, 2.0), aten.hardtanh(x), aten.complex(x, y).real),
    f(N, 6),
    f(N, 6),
)
safe("conj and negative views", lambda x: (torch.view_as_complex(x).conj() * 2).imag + 1, f(N, 3, 2))
safe("zeroed in place", lambda x: x.zero_(), f(N, 6))
safe(
    "norms by other names",
    lambda x: (aten.norm.ScalarOpt_dim(x, 2, [1]), aten._safe_softmax(x, -1), x.mode(1)),
    f(N, 6),
)
blamed("norm over rows by another name", "norm", lambda x: aten.norm.ScalarOpt_dim(x, 2, [0]), f(N, 6))
blamed("safe softmax over rows", "_safe_softmax", lambda x: aten._safe_softmax(x, 0), f(N, 6))
blamed("mode over rows", "mode", lambda x: x.mode(0), f(N, 6))
safe("rms norm as one op", lambda x, w: aten._fused_rms_norm(x, [6], w, 1e-5), f(N, 6), f(6))
safe(
    "space of one dimension",
    lambda x: (
        aten.replication_pad1d(x, [1, 1]),
        aten.upsample_nearest1d(x, [5]),
        aten._upsample_nearest_exact1d(x, [5]),
        aten.upsample_linear1d(x, [5], False),
    ),
    f(N, 3, 6),
)
safe(
    "space of two dimensions",
    lambda x: (
        aten.adaptive_max_pool2d(x, [2, 2]),
        aten.reflection_pad2d(x, [1, 1, 1, 1]),
        aten.replication_pad2d(x, [1, 1, 1, 1]),
        aten.upsample_nearest2d(x, [5, 5]),
        aten._upsample_nearest_exact2d(x, [5, 5]),
    ),
    f(N, 3, 6, 6),
)
safe(
    "interpolation in two dimensions",
    lambda x: (
        aten.upsample_bilinear2d(x, [5, 5], False),
        aten.upsample_bicubic2d(x, [5, 5], False),
        aten._upsample_bilinear2d_aa(x, [5, 5], False),
        aten._upsample_bicubic2d_aa(x, [5, 5], False),
    ),
    f(N, 3, 6, 6),
)
safe(
    "space of three dimensions",
    lambda x: (
        aten.avg_pool3d(x, [2, 2, 2]),
        aten._adaptive_avg_pool3d(x, [2, 2, 2]),
        aten.adaptive_max_pool3d(x, [2, 2, 2]),
        aten.max_pool3d_with_indices(x, [2, 2, 2]),
    ),
    f(N, 2, 4, 4, 4),
)
safe(
    "interpolation in three dimensions",
    lambda x: (
        aten.reflection_pad3d(x, [1] * 6),
        aten.replication_pad3d(x, [1] * 6),
        aten.upsample_nearest3d(x, [5, 5, 5]),
        aten._upsample_nearest_exact3d(x, [5, 5, 5]),
        aten.upsample_trilinear3d(x, [5, 5, 5], False),
    ),
    f(N, 2, 4, 4, 4),
)
blamed(
    "space of three dimensions, one of rows",
    "_adaptive_avg_pool3d",
    lambda x: aten._adaptive_avg_pool3d(x, [2, 2, 2]),
    f(2, 2, 4, 4, N),
)
safe(
    "other factories",
    lambda x: (x.new_ones(x.shape[0]), x.new_full((x.shape[0], 2), 3.0), torch.ones_like(x), torch.zeros(x.shape[0])),
    f(N, 6),
)
safe(
    "memory that was written to",
    lambda x: (
        torch.empty_like(x).copy_(x),
        x.new_empty(x.shape[0], 6).copy_(x),
        torch.empty_strided((x.shape[0], 6), (6, 1)).copy_(x),
        x.new_empty_strided((x.shape[0], 6), (6, 1)).copy_(x),
        torch.empty_permuted((x.shape[0], 6), (0, 1)).copy_(x),
    ),
    f(N, 6),
)
safe(
    "views by other names",
    lambda x: (aten.alias(x) * 2, aten._reshape_alias(x, [x.shape[0] * 6], [1]) * 2, aten._neg_view(x) * 2),
    f(N, 6),
)
safe("split without views", lambda x: (aten.unsafe_split(x, 3, 1), aten.unsafe_split_with_sizes(x, [2, 4], 1)), f(N, 6))
blamed(
    "split at the end without views",
    "unsafe_split_with_sizes",
    lambda x: aten.unsafe_split_with_sizes(x, [x.shape[0] - 3, 3], 0),
    f(N, 6),
)
safe(
    "unsafe index_put and index",
    lambda x, i, y: (
        aten._unsafe_index_put(x, [None, i], y),
        aten._unsafe_index(x, [None, i]),
        aten._index_put_impl_(x, [None, i], y),
    ),
    f(N, 6),
    torch.tensor([1, 3]),
    f(N, 2),
)
safe(
    "weights of eight bits",
    lambda x, w, s: aten._weight_int8pack_mm(x.bfloat16(), w, s.bfloat16()),
    f(N, 32),
    torch.ones(32, 32, dtype=torch.int8),
    f(32),
)
blamed(
    "a view of a window, taken apart",
    "mul_",
    lambda x, c: c[: x.shape[0]].unflatten(1, (2, 3)).unbind(1)[0].mul_(2),
    f(N, 6),
    f(32, 6),
)
safe("indices taken modulo", lambda i, w: F.embedding(torch.arange(i.shape[0]) % 9, w), ints(9, N), f(9, 6))
blamed(
    "batch norm of rows as channels",
    "_native_batch_norm_legit_no_training",
    lambda x, m: F.batch_norm(x, m, m.abs() + 1),
    f(3, N),
    f(N),
    shows=False,
)

# -- rows that were merged: of one tensor as factors, of another as a plain dimension ----------------------------------


def twice(y: torch.Tensor) -> torch.Tensor:
    """As many rows as ``merged`` has, but plain."""
    return y.repeat_interleave(2, 0)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, *x.shape[2:])


blamed(
    "attention with a mask whose rows lie differently",
    "_scaled_dot_product_flash_attention_for_cpu",
    lambda q, k, m: F.scaled_dot_product_attention(q.view(1, 2, -1, 4), k, k, twice(m)),
    f(1, 2, 2, N, 4),
    f(1, 2, 5, 4),
    f(N, 5),
)
blamed(
    "bmm of batches that lie differently", "bmm", lambda x, w: torch.bmm(merged(x), twice(w)), f(2, N, 3, 4), f(N, 4, 5)
)
blamed(
    "addmm to rows that lie differently",
    "addmm",
    lambda x, w, b: torch.addmm(twice(b), merged(x), w),
    f(2, N, 4),
    f(4, 5),
    f(N, 5),
)
blamed("one of merged rows", "select", lambda x: merged(x)[5], f(2, N, 6))
blamed("merged rows split", "split_with_sizes", lambda x: merged(x).split([5, 2 * x.shape[1] - 5]), f(2, N, 6))
blamed("cat in front of merged rows", "cat", lambda x, y: torch.cat((y, merged(x)), 0), f(2, N, 6), f(3, 6))
blamed("padding in front of merged rows", "constant_pad_nd", lambda x: F.pad(merged(x), (0, 0, 1, 0)), f(2, N, 6))
blamed(
    "gather from rows that lie differently",
    "gather",
    lambda x, i: merged(x).gather(1, twice(i)),
    f(2, N, 6),
    ints(6, N, 3),
)
blamed(
    "index_put of values that lie differently",
    "index_put_",
    lambda x, i, y: merged(x).__setitem__((slice(None), i), twice(y)),
    f(2, N, 6),
    torch.tensor([1, 3]),
    f(N, 2),
)
blamed(
    "index_add to merged rows",
    "index_add",
    lambda x, i, y: merged(x).index_add(0, i, y),
    f(2, N, 6),
    torch.tensor([1, 5]),
    f(2, 6),
)
blamed(
    "index_add of values that lie differently",
    "index_add",
    lambda x, i, y: merged(x).index_add(1, i, twice(y)),
    f(2, N, 6),
    torch.tensor([1, 5]),
    f(N, 2),
)
blamed(
    "scatter to merged rows",
    "scatter",
    lambda x, i, y: merged(x).scatter(0, i, y),
    f(2, N, 6),
    torch.tensor([[1] * 6, [5] * 6]),
    f(2, 6),
)
blamed(
    "scatter of values that lie differently",
    "scatter",
    lambda x, i, y: merged(x).scatter(1, merged(i), twice(y)),
    f(2, N, 6),
    ints(1, 2, N, 1),
    f(N, 1),
)
blamed(
    "select_scatter to merged rows", "select_scatter", lambda x, y: merged(x).select_scatter(y, 0, 5), f(2, N, 6), f(6)
)
blamed(
    "select_scatter of values that lie differently",
    "select_scatter",
    lambda x, y: merged(x).select_scatter(twice(y), 1, 2),
    f(2, N, 6),
    f(N),
)
blamed(
    "a result written to rows that lie differently",
    "add",
    lambda x, y: torch.add(merged(x), 1, out=twice(y)),
    f(2, N, 6),
    f(N, 6),
)
blamed(
    "convolution with rows as weights", "convolution", lambda x, w: F.conv1d(x, w), f(2, 3, 8), f(N, 3, 3), shows=False
)
blamed(
    "a mask of columns written by",
    "index_put_",
    lambda x, m: x.__setitem__((slice(None), m), 3.0),
    f(N, 6),
    mask(6),
    shows=False,
)
blamed(
    "index_select by counted rows",
    "index_select",
    lambda i, w: w.index_select(0, torch.arange(i.shape[0])),
    ints(9, N),
    f(20, 6),
)
blamed("index by counted rows", "index", lambda i, w: w[torch.arange(i.shape[0])], ints(9, N), f(20, 6))
blamed("take by counted rows", "take", lambda i, w: w.take(torch.arange(i.shape[0])), ints(9, N), f(20))
blamed("gather by counted rows", "gather", lambda i, w: w.gather(0, torch.arange(i.shape[0])), ints(9, N), f(20))
blamed(
    "indices of a foreach",
    "embedding",
    lambda i, w: F.embedding(torch._foreach_add([i], [i])[0], w),
    ints(4, N),
    f(9, 6),
    shows=False,
)
