"""Cases for prefix safety: ops that view, place, look up and write."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from prefix_case import blamed, f, ints, mask, safe
from prefix_oracle import N

# -- views -------------------------------------------------------------------------------------------------------------

safe(
    "heads split and merged",
    lambda x: x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1, 3).transpose(0, 1).flatten(1),
    f(N, 6),
)
safe("rows split", lambda x: x.view(-1, 4, 6), f(N, 6))
safe("rows split within a batch", lambda x: x.view(2, -1, 4, 6), f(2, N, 6))
safe("rows merged and split", lambda x: (x.view(-1, 6) * 2).view(2, -1, 6), f(2, N, 6))
safe("rows merged and split further", lambda x: (x.view(-1, 6) * 2).view(2, -1, 2, 3), f(2, N, 6))
safe("rows merged outermost", lambda x: (x.view(-1) * 2).view(-1, 3), f(N, 6))
safe("a batch split off merged rows", lambda x: x.view(-1, 6).view(2, 2, -1, 6), f(4, N, 6))
blamed("rows split at no boundary", "view", lambda x: x.view(-1, 6).view(-1, 8, 6), f(2, N, 6))
blamed("rows and batch exchanged", "view", lambda x: x.view(-1, 2, 6), f(2, N, 6))
blamed("rows outermost in two halves", "view", lambda x: x.view(2, -1, 6), f(N, 6))
safe("two dynamic dimensions merged", lambda x: x.view(-1) * 2, f(N, N))
safe("two dynamic dimensions merged and split", lambda x: (x.view(-1) * 2).view(x.shape[0], -1), f(N, N))
safe("rows of bytes", lambda x: x.view(torch.int32) + 1, f(N, 6))
safe("rows of half as many numbers", lambda x: x.view(torch.float64), f(N, 6))
blamed("rows taken together as bytes", "view", lambda x: x.t().contiguous().view(torch.float64), f(N, 6), shows=False)
safe("permute, movedim, transpose, t", lambda x: x.permute(2, 0, 1).movedim(0, 1).transpose(0, 1)[0].t(), f(N, 2, 3))
safe(
    "squeeze and unsqueeze",
    lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze() + x[:, :1].squeeze(1)[:, None],
    f(N, 6),
)
safe("expand", lambda x, y: x.expand(y.shape[0], -1) + y, f(1, 6), f(N, 6))
safe("expand within rows", lambda x: x[:, None].expand(-1, 4, -1) * 2, f(N, 6))
safe("unflatten and flatten", lambda x: x.unflatten(1, (2, 3)).flatten(0, 1), f(N, 6))
safe("the first rows", lambda x: x[:2] + x[1:3], f(N, 6))
safe("one of the first rows", lambda x: x[0] + x[2], f(N, 6))
blamed("the last row", "select", lambda x: x[-1], f(N, 6))
blamed("the last row by its number", "select", lambda x: x[x.shape[0] - 1], f(N, 6))
blamed("a row of a constant by the number of rows", "select", lambda x, c: x[0] + c[x.shape[0]], f(N, 6), f(32, 6))
safe("all but the first rows", lambda x: x[1:] * 2, f(N, 6))
safe("all but the last row", lambda x: x[:-1] * 2, f(N, 6))
safe("every second row", lambda x: x[::2] * 2, f(N, 6))
safe("every second row from the second on", lambda x: x[1::2] * 2, f(N, 6))
blamed("the last rows", "slice", lambda x: x[-3:], f(N, 6))
blamed("the second half", "slice", lambda x: x[x.shape[0] // 2 :], f(N, 6))
safe("the first half", lambda x: x[: x.shape[0] // 2] * 2, f(N, 6))
safe("as much of a constant as there are rows", lambda x, c: x + c[: x.shape[0]], f(N, 6), f(32, 6))
blamed(
    "the end of a constant by the number of rows",
    "slice",
    lambda x, c: x + c[c.shape[0] - x.shape[0] :],
    f(N, 6),
    f(32, 6),
)
blamed(
    "a constant from the number of rows on",
    "slice",
    lambda x, c: c[x.shape[0] : x.shape[0] + 2] + x[:2],
    f(N, 6),
    f(32, 6),
)
blamed("all of a constant but the rows", "slice", lambda x, c: c[: 32 - x.shape[0]], f(N, 6), f(32, 6))
safe("the last columns", lambda x: x[:, -2:] + x[..., -1:], f(N, 6))
blamed("a part of merged rows", "slice", lambda x: x.view(-1)[:5], f(2, N))
safe("narrow", lambda x: x.narrow(0, 1, 2), f(N, 6))
safe("columns split", lambda x: [a + 1 for a in (*x.split(2, 1), *x.chunk(3, -1), *x.tensor_split(2, 1))], f(N, 6))
safe("columns apart", lambda x: [a + 1 for a in x.unbind(1)], f(N, 6))
blamed("rows in two halves", "split", lambda x: x.chunk(2), f(N, 6))
safe("the first rows split off", lambda x: x.split([3, x.shape[0] - 3]), f(N, 6))
blamed("the last rows split off", "split_with_sizes", lambda x: x.split([x.shape[0] - 3, 3]), f(N, 6))
blamed("the diagonal", "diagonal", lambda x: x.diagonal(), f(N, N), shows=False)
safe("the diagonal within rows", lambda x: x.diagonal(dim1=1, dim2=2) * 2, f(N, 3, 3))
blamed("as_strided", "as_strided", lambda x: x.as_strided((3, 6), (6, 1), 6), f(N, 6), shows=False)
blamed(
    "a view taken of another view's memory",
    "as_strided",
    lambda x: x[0].as_strided((4, 6), (6, 1)),
    f(N, 6),
    shows=False,
)

# -- placing -----------------------------------------------------------------------------------------------------------

safe("cat of columns", lambda x, y: torch.cat((x, y, x), 1), f(N, 6), f(N, 2))
safe("cat of something in front", lambda x, y: torch.cat((y, x), 0), f(N, 6), f(2, 6))
blamed("cat of something behind", "cat", lambda x, y: torch.cat((x, y), 0), f(N, 6), f(2, 6))
blamed("cat of rows", "cat", lambda x, y: torch.cat((x, y), 0), f(N, 6), f(N, 6))
safe("cat of something empty behind", lambda x, y: torch.cat((y, x, y[:0]), 0), f(N, 6), f(2, 6))
blamed(
    "cat of rows that lie differently",
    "cat",
    lambda x, y: torch.cat((x.view(-1, 1), y.repeat_interleave(2)[:, None]), 1),
    f(2, N),
    f(N),
)
safe("stack", lambda x, y: torch.stack((x, y), 0) + torch.stack((x, y)).sum(0), f(N, 6), f(N, 6))
safe("stack in the middle", lambda x, y: torch.stack((x, y), 1), f(N, 6), f(N, 6))
blamed(
    "stack of rows that lie differently",
    "stack",
    lambda x, y: torch.stack((x.view(-1), y.repeat_interleave(2)), 1),
    f(2, N),
    f(N),
)
safe("repeat within rows", lambda x: x.repeat(1, 3), f(N, 6))
safe("repeat of a row for each", lambda x, y: x.repeat(y.shape[0], 1) + y, f(1, 6), f(N, 6))
blamed("repeat of rows", "repeat", lambda x: x.repeat(2, 1), f(N, 6))
safe("repeat_interleave of rows", lambda x: x.repeat_interleave(3, 0) * 2, f(N, 6))
safe("repeat_interleave within rows", lambda x: x.repeat_interleave(3, 1), f(N, 6))
safe("tile within rows", lambda x: x.tile(2), f(N, 6))
safe("padding in front", lambda x: F.pad(x, (0, 0, 2, 0)), f(N, 6))
blamed("padding behind", "constant_pad_nd", lambda x: F.pad(x, (0, 0, 0, 2), value=3.0), f(N, 6))
safe("padding of columns", lambda x: F.pad(x, (1, 2)), f(N, 6))
safe("cropping", lambda x: F.pad(x, (0, 0, -1, -2)), f(N, 6))
safe("a shift", lambda x: F.pad(x, (0, 0, 1, -1)) - x, f(N, 6))
blamed("padding to a length", "constant_pad_nd", lambda x: F.pad(x, (0, 0, 0, 32 - x.shape[0])), f(N, 6))
safe("padding behind a constant by the number of rows", lambda x, c: F.pad(c, (0, x.shape[0])), f(N, 6), f(4))
blamed(
    "padding in front of a constant by the number of rows",
    "constant_pad_nd",
    lambda x, c: F.pad(c, (x.shape[0], 0)),
    f(N, 6),
    f(4),
)
blamed("reflection along rows", "reflection_pad1d", lambda x: F.pad(x, (1, 1), mode="reflect"), f(2, 3, N))
safe("reflection within rows", lambda x: F.pad(x, (1, 1), mode="reflect"), f(N, 3, 6))
safe(
    "factories",
    lambda x: (
        x.new_zeros(x.shape[0], 2),
        torch.ones(x.shape[0]),
        torch.zeros_like(x),
        torch.full_like(x, 2.0),
        torch.arange(x.shape[0]),
        torch.eye(x.shape[0]),
    ),
    f(N, 6),
)
safe("empty", lambda x: torch.empty(x.shape[0], 2).copy_(x[:, :2]), f(N, 6))
safe("arange between", lambda x: torch.arange(3, x.shape[0] + 3, 2), f(N, 6))
blamed("arange backwards", "arange", lambda x: torch.arange(x.shape[0] - 1, -1, -1), f(N, 6))
blamed("full_like of the number of rows", "full_like", lambda x: torch.full_like(x, x.shape[0]), f(N, 6))
for _name, _random in {
    "rand": lambda x: torch.rand(x.shape[0]) + x[:, 0],
    "randn_like": lambda x: torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "native_dropout": lambda x: F.dropout(x, 0.5, training=True),
    "multinomial": lambda x: x.sigmoid().multinomial(2),
}.items():
    blamed(f"{_name} for rows", _name, _random, f(N, 6), shows=False)
safe("dropout in evaluation", lambda x: F.dropout(x, 0.5, training=False) * 2, f(N, 6))

# -- looking up --------------------------------------------------------------------------------------------------------

safe("embedding", lambda i, w: F.embedding(i, w), ints(9, N), f(9, 6))
safe("embedding of merged indices", lambda i, w: F.embedding(i, w, padding_idx=0), ints(9, 2, N), f(9, 6))
safe("embedding in a table of rows", lambda i, w: F.embedding(i, w) * 2, ints(4, 5), f(N, 6))
blamed("embedding in a merged table", "embedding", lambda i, w: F.embedding(i, w.view(-1, 6)), ints(8, 5), f(2, N, 6))
safe("gather within rows", lambda x, i: x.gather(1, i), f(N, 6), ints(6, N, 3))
safe("gather among rows", lambda x, i: x.gather(0, i), f(N, 6), ints(4, N, 6))
blamed(
    "gather among merged rows",
    "gather",
    lambda x, i: x.view(-1, 6).gather(0, i),
    f(2, N, 6),
    torch.arange(30).view(5, 6) % 8,
)
safe("take_along_dim", lambda x, i: x.take_along_dim(i, 1), f(N, 6), ints(6, N, 6))
safe("index_select", lambda x, i: x.index_select(0, i) * 2, f(9, 6), ints(9, N))
safe("index_select among rows", lambda x, i: x.index_select(0, i), f(N, 6), ints(4, 5))
blamed(
    "index_select among merged rows",
    "index_select",
    lambda x, i: x.view(-1).index_select(0, i),
    f(2, N),
    torch.tensor([0, 3, 5, 6, 7]),
)
safe("index of a constant", lambda x, i: x[i] * 2, f(9, 6), ints(9, N))
safe("index within rows", lambda x, i: x[:, i] + x[:, [0, 2]].sum(-1, keepdim=True), f(N, 6), ints(6, 3))
safe("index with two vectors", lambda x, i, j: x[i, :, j], f(9, 2, 7), ints(7, N), ints(7, N))
blamed("index among rows", "index", lambda x: x[torch.tensor([0, -1])], f(N, 6))
blamed(
    "index of rows and columns", "index", lambda x, i: x[torch.arange(x.shape[0]), i], f(N, 6), ints(6, N), shows=False
)
safe("take", lambda x, i: torch.take(x, i), f(3, 4), ints(12, N) % 12)
blamed("take from rows", "take", lambda x, i: torch.take(x.t(), i), f(N, 3), ints(12, 5))
blamed(
    "indices out of counted rows",
    "embedding",
    lambda i, w: F.embedding(torch.arange(i.shape[0]), w),
    ints(9, N),
    f(20, 6),
)
blamed(
    "indices out of floats",
    "embedding",
    lambda x, w: F.embedding(x.long(), w),
    torch.randint(0, 9, (N,)).float(),
    f(9, 6),
    shows=False,
)
blamed(
    "indices out of a running sum",
    "embedding",
    lambda i, w: F.embedding(i.cumsum(0), w),
    ints(2, N),
    f(20, 6),
    shows=False,
)
blamed(
    "indices of two tensors",
    "index_select",
    lambda i, j, w: w.index_select(0, i + j),
    ints(2, N),
    ints(2, N),
    f(4, 6),
    shows=False,
)
safe("indices out of floats, clamped", lambda x, w: F.embedding(x.long().clamp(0, 8), w), f(N), f(9, 6))
safe("indices out of other indices", lambda i, t, w: F.embedding(t[i + 1], w), ints(3, N), ints(9, 5), f(9, 6))
safe(
    "indices that are chosen",
    lambda x, w: F.embedding(x.argmax(-1), w) + F.embedding(x.topk(1)[1][:, 0], w),
    f(N, 6),
    f(6, 6),
)
blamed(
    "indices written to in place",
    "embedding",
    lambda i, w: F.embedding(i.view(-1, 1).add_(torch.arange(i.shape[0])[:, None]).view(-1), w),
    ints(2, N),
    f(40, 6),
    shows=False,
)
blamed(
    "a divisor that is computed",
    "floor_divide",
    lambda i, x: i // x.long(),
    ints(9, N),
    torch.randint(1, 9, (N,)).float(),
    shows=False,
)

# -- writing -----------------------------------------------------------------------------------------------------------

safe("copy into rows", lambda x, y: x.copy_(y), f(N, 6), f(N, 6))
safe("columns written", lambda x, y: x[:, 2:4].copy_(y), f(N, 6), f(N, 2))
safe("setitem of columns", lambda x, y: x.__setitem__((slice(None), slice(0, 2)), y), f(N, 6), f(N, 2))
safe("the first rows written", lambda x, y: x[:2].copy_(y), f(N, 6), f(2, 6))
safe("all rows but the first written", lambda x, y: x[1:].mul_(2), f(N, 6), f(2, 6))
safe("every second row written", lambda x: x[::2].mul_(2), f(N, 6))
blamed("all rows but the last written", "mul_", lambda x: x[:-1].mul_(2), f(N, 6))
blamed("the first half written", "mul_", lambda x: x[: x.shape[0] // 2].mul_(2), f(N, 6))
blamed("as much of a cache as there are rows", "copy_", lambda x, c: c[: x.shape[0]].copy_(x), f(N, 6), f(32, 6))
blamed(
    "a view of as much of a cache as there are rows",
    "mul_",
    lambda x, c: c[: x.shape[0]].view(-1, 2, 3).transpose(0, 1)[0].mul_(2),
    f(N, 6),
    f(32, 6),
)
safe("one row of as much of a cache as there are rows", lambda x, c: c[: x.shape[0]][1].copy_(x[0]), f(N, 6), f(32, 6))
safe("a copy of as much of a cache as there are rows", lambda x, c: c[: x.shape[0]].clone().mul_(2), f(N, 6), f(32, 6))
blamed(
    "a cache at places that rows name",
    "index_put_",
    lambda x, c, i: c.index_put_((i,), x),
    f(N, 6),
    f(32, 6),
    ints(32, N),
)
safe("a cache at fixed places", lambda x, c, i: c.__setitem__(i, x[:3]), f(N, 6), f(32, 6), ints(32, 3))
safe(
    "columns of rows at fixed places",
    lambda x, y, i: x.__setitem__((slice(None), i), y),
    f(N, 6),
    f(N, 2),
    torch.tensor([1, 3]),
)
safe("one value at fixed columns", lambda x, i: x.__setitem__((slice(None), i), 3.0), f(N, 6), torch.tensor([1, 3]))
blamed(
    "rows at places that count from the end",
    "index_put_",
    lambda x, y: x.__setitem__(torch.tensor([0, -1]), y),
    f(N, 6),
    f(2, 6),
)
safe("scatter within rows", lambda x, i, y: x.scatter(1, i, y), f(N, 6), ints(6, N, 2), f(N, 2))
safe("scatter of a value within rows", lambda x, i: torch.zeros_like(x).scatter_(1, i, 1.0), f(N, 6), ints(6, N, 2))
safe("scatter_add within rows", lambda x, i, y: x.scatter_add(1, i, y), f(N, 6), ints(6, N, 2), f(N, 2))
safe("scatter among rows", lambda x, i, y: x.scatter(0, i, y), f(N, 6), ints(4, 2, 6), f(2, 6))
blamed(
    "scatter into a constant by rows",
    "scatter_add",
    lambda x, i, y: x.scatter_add(0, i, y),
    f(5, 6),
    ints(5, N, 6),
    f(N, 6),
)
blamed(
    "scatter into a constant beside rows",
    "scatter",
    lambda x, i, y: x.scatter(1, i, y),
    f(32, 6),
    ints(6, N, 2),
    f(N, 2),
)
blamed(
    "scatter by indices out of floats",
    "scatter",
    lambda x, y: x.scatter(1, y.long(), 1.0),
    f(N, 6),
    torch.ones(N, 2),
    shows=False,
)
safe("scatter_reduce within rows", lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), f(N, 6), ints(6, N, 2), f(N, 2))
safe("index_add of fixed columns", lambda x, i, y: x.index_add(1, i, y), f(N, 6), ints(6, 2), f(N, 2))
safe("index_copy of fixed columns", lambda x, y: x.index_copy(1, torch.tensor([0, 3]), y), f(N, 6), f(N, 2))
safe("index_fill of fixed columns", lambda x: x.index_fill(1, torch.tensor([0, 3]), 2.0), f(N, 6))
blamed(
    "index_add of rows to a constant", "index_add", lambda x, i, y: x.index_add(0, i, y), f(5, 6), ints(5, N), f(N, 6)
)
blamed(
    "index_copy of rows into a cache",
    "index_copy_",
    lambda x, i, y: x.index_copy_(0, i, y),
    f(32, 6),
    torch.arange(N),
    f(N, 6),
)
safe("select_scatter of a column", lambda x, y: x.select_scatter(y, 1, 2), f(N, 6), f(N))
blamed("select_scatter of the last row", "select_scatter", lambda x, y: x.select_scatter(y, 0, -1), f(N, 6), f(6))
blamed(
    "masked_scatter",
    "masked_scatter",
    lambda x, m, y: x.masked_scatter(m, y),
    f(N, 6),
    mask(N, 6),
    f(N, 6),
    shows=False,
)
blamed("a shape changed in place", "unsqueeze_", lambda x: x.clone().unsqueeze_(0) * 2, f(N, 6), shows=False)

# -- what has no rule --------------------------------------------------------------------------------------------------

blamed("fft", "_fft_r2c", lambda x: torch.fft.rfft(x, dim=-1), f(N, 6), shows=False)
blamed("cdist", "_cdist_forward", lambda x: torch.cdist(x, x), f(N, 30), shows=False)
safe("what has no rule, without rows", lambda x, y: x + torch.fft.rfft(y).abs()[:, :1].sum(), f(N, 6), f(4, 6))
