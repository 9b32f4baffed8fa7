"""Cases for prefix safety: what an op computes, on which inputs, and whether it is safe or which op is to blame.

A dimension of length N holds the rows. Next to what is safe stands what is not, so that a rule that is too wide or too
narrow shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from prefix_oracle import N


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        blamed: the op's name without namespace, or several; None: all is safe.
        shows: a padded run really differs.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    blamed: str | None = None
    shows: bool = True


CASES: list[Case] = []


def safe(name: str, fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
    CASES.append(Case(name, fn, inputs))


def blamed(name: str, op: str, fn: Callable[..., Any], *inputs: torch.Tensor, shows: bool = True) -> None:
    CASES.append(Case(name, fn, inputs, op, shows))


GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) > 0.5


# -- pointwise ---------------------------------------------------------------------------------------------------------

safe("pointwise", lambda x, y: (x * y).exp().tanh() + F.gelu(x) - F.silu(y), f(N, 6), f(N, 6))
safe("pointwise, broadcast over rows", lambda x, y: x + y, f(N, 6), f(6))
safe("pointwise, broadcast within rows", lambda x, y: x + y, f(N, 6), f(N, 1))
safe("pointwise in two dynamic dimensions", lambda x, y: x[:, None] * y[None], f(N), f(N))
blamed("pointwise of rows that lie differently", "add", lambda x, y: x.view(-1) + y.repeat_interleave(2), f(2, N), f(N))
safe("pointwise of rows that lie in the same merged dimension", lambda x, y: x.view(-1) + y.view(-1), f(2, N), f(2, N))
safe(
    "where, masked_fill, clamp",
    lambda x, m: torch.where(m, x, 0.0).masked_fill(m, 2.0).clamp(-1, 1),
    f(N, 6),
    mask(N, 6),
)
safe("in place", lambda x: x.add_(1).mul_(2).clamp_(-1, 1), f(N, 6))
safe("a number of rows compared with", lambda x: torch.where(x > 0, x, x - 3), f(N))
blamed("a number of rows multiplied with", "mul", lambda x: x * x.shape[0], f(N, 6))
blamed("a number of rows divided by", "div", lambda x: x / x.shape[0], f(N, 6))
blamed("its root", "mul", lambda x: x * (x.shape[0] ** -0.5), f(N, 6))
blamed(
    "a number of rows compared with positions",
    "lt",
    lambda x: (torch.arange(16) < x.shape[0]) & (x.sum(1)[:1] < 9),
    f(N, 6),
)
blamed("a number of rows as a tensor", "scalar_tensor", lambda x: x + torch.tensor(x.shape[0]), f(N, 6))
blamed("a number of rows in a tensor", "scalar_tensor", lambda x: x[:2, 0] + torch.tensor([x.shape[0], 1]), f(N, 6))
blamed("a number of rows filled in", "full", lambda x: x[:, 0] + torch.full((x.shape[0],), x.shape[0]), f(N, 6))
blamed("a number of rows filled in in place", "fill_", lambda x: x.fill_(x.shape[0]), f(N, 6))
blamed("a number of rows as an alpha", "add", lambda x, y: torch.add(x, y, alpha=x.shape[0]), f(N, 6), f(6))
safe("dtypes", lambda x: x.half().float().double().to(torch.float32).long().float(), f(N, 6))
safe("foreach", lambda x, y: torch._foreach_mul(torch._foreach_add([x, y], 1.0), [y, x]), f(N, 6), f(N, 6))
safe("foreach in place", lambda x, y: torch._foreach_add_([x, y], [y, y]), f(N, 6), f(N, 6))
blamed("foreach of whole tensors", "_foreach_norm", lambda x: torch._foreach_norm([x]), f(N, 6))
safe("glu", lambda x: F.glu(x, -1), f(N, 6))
blamed("glu over rows", "glu", lambda x: F.glu(x, 0), f(N, 6))
safe(
    "complex numbers",
    lambda x: (torch.view_as_complex(x) * 1j).abs() + torch.view_as_real(torch.view_as_complex(x))[..., 0],
    f(N, 3, 2),
)
safe("polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), f(N, 3).abs(), f(N, 3))
safe("prelu", lambda x, w: F.prelu(x, w), f(N, 6), f(6))
safe("logsigmoid, hardswish, floor_divide", lambda x: F.logsigmoid(x) + F.hardswish(x) + x // 2.0, f(N, 6))
safe("bucketize", lambda x, e: torch.bucketize(x, e), f(N, 6), torch.linspace(-1, 1, 5))
blamed("bucketize among rows", "bucketize", lambda x, e: torch.bucketize(x, e.abs().cumsum(0)), f(5), f(N), shows=False)

# -- contractions ------------------------------------------------------------------------------------------------------

safe("mm", lambda x, w: x @ w, f(N, 6), f(6, 5))
blamed("mm over rows", "mm", lambda x, w: x.t() @ w, f(N, 6), f(N, 5))
safe("mm with rows on the right", lambda x, w: w @ x.t(), f(N, 6), f(5, 6))
safe("scores", lambda q, k: q @ k.t(), f(N, 6), f(N, 6))
safe("linear", lambda x, w, b: F.linear(x, w, b), f(N, 6), f(5, 6), f(5))
safe("linear over merged rows", lambda x, w, b: F.linear(x, w, b), f(2, N, 6), f(5, 6), f(5))
blamed("linear over rows", "mm", lambda x, w: F.linear(x.t(), w), f(N, 6), f(5, N))
safe("addmm", lambda x, w, b: torch.addmm(b, x, w), f(N, 6), f(6, 5), f(5))
safe("addmm with a row each", lambda x, w, b: torch.addmm(b, x, w), f(N, 6), f(6, 5), f(N, 5))
blamed("addmm over rows", "addmm", lambda x, w, b: torch.addmm(b, x.t(), w), f(N, 6), f(N, 5), f(5))
safe("bmm", lambda x, w: torch.bmm(x, w), f(2, N, 6), f(2, 6, 5))
safe("bmm over a batch of rows", lambda x, w: torch.bmm(x, w), f(N, 2, 6), f(N, 6, 5))
blamed("bmm over rows", "bmm", lambda x, w: torch.bmm(x.mT, w), f(2, N, 6), f(2, N, 5))
safe("baddbmm", lambda x, w, b: torch.baddbmm(b, x, w), f(2, N, 6), f(2, 6, 5), f(1, 1, 5))
safe("mv, dot", lambda x, v: x.mv(v) + v.dot(v), f(N, 6), f(6))
blamed("mv over rows", "mv", lambda x, v: x.t().mv(v), f(N, 6), f(N))
blamed("dot over rows", "dot", lambda v: v.dot(v), f(N))
safe("matmul of a batch and a matrix", lambda x, w: x @ w, f(2, N, 6), f(6, 5))
safe("matmul of four dimensions", lambda x, w: x @ w.mT, f(2, 3, N, 4), f(2, 3, 5, 4))
safe("einsum", lambda x, w: torch.einsum("bnd,dk->bnk", x, w), f(2, N, 6), f(6, 5))
blamed("einsum over rows", "bmm", lambda x, w: torch.einsum("bnd,bnk->bdk", x, w), f(2, N, 6), f(2, N, 5))
safe(
    "int_mm",
    lambda x, w: torch._int_mm(x, w),
    torch.ones(N + 12, 8, dtype=torch.int8)[:N],
    torch.ones(8, 8, dtype=torch.int8),
)
safe("outer", lambda x, w: torch.outer(x, w), f(N), f(6))
safe(
    "attention to fixed keys",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    f(2, 2, N, 4),
    f(2, 2, 5, 4),
    f(2, 2, 5, 4),
)
safe(
    "attention with a fixed mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    f(2, 2, N, 4),
    f(2, 2, 5, 4),
    f(2, 2, 5, 4),
    f(N, 5),
)
safe("attention over a batch of rows", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), f(N, 2, 5, 4))
blamed(
    "attention to rows",
    "_scaled_dot_product_flash_attention_for_cpu",
    lambda q: F.scaled_dot_product_attention(q, q, q),
    f(2, 2, N, 4),
)
blamed(
    "causal attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    f(2, 2, N, 4),
)
blamed("attention in steps", "_softmax mm", lambda q: (q @ q.t()).softmax(-1) @ q, f(N, 6))

# -- along dimensions --------------------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sum": lambda x, d: x.sum(d),
    "nansum": lambda x, d: x.nansum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "aminmax": lambda x, d: x.aminmax(dim=d),
    "var": lambda x, d: x.var(d),
    "var_mean": lambda x, d: torch.var_mean(x, d),
    "std": lambda x, d: x.std(d, keepdim=True),
    "std_mean": lambda x, d: torch.std_mean(x, d),
    "prod": lambda x, d: x.prod(d),
    "any": lambda x, d: (x > 2).any(d),
    "all": lambda x, d: (x > -2).all(d),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d),
    "linalg_vector_norm": lambda x, d: x.norm(dim=d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "median": lambda x, d: x.median(d),
    "nanmedian": lambda x, d: x.nanmedian(d),
    "kthvalue": lambda x, d: x.kthvalue(2, d),
    "count_nonzero": lambda x, d: (x > 0).count_nonzero(d),
    "_softmax": lambda x, d: x.softmax(d),
    "_log_softmax": lambda x, d: x.log_softmax(d),
    "sort": lambda x, d: x.sort(d),
    "topk": lambda x, d: x.topk(2, d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "unfold": lambda x, d: x.unfold(d, 2, 2),
}
for _name, _fn in REDUCTIONS.items():
    safe(f"{_name} within rows", lambda x, fn=_fn: fn(x, 1), f(N, 6))
    safe(f"{_name} within rows of two dimensions", lambda x, fn=_fn: fn(x, -1), f(N, 2, 6))
    # Windows of rows would be a prefix; they are no rows, though.
    blamed(f"{_name} over rows", _name, lambda x, fn=_fn: fn(x, 0), f(N, 6), shows=_name != "unfold")
safe("sum over two dimensions", lambda x: x.sum((1, 2)), f(N, 2, 6))
blamed("sum over rows among others", "sum", lambda x: x.sum((0, 2)), f(N, 2, 6))
for _name in ("sum", "mean", "max", "min", "prod", "median", "argmax", "std"):
    blamed(f"{_name} over everything", _name, lambda x, name=_name: getattr(x, name)(), f(N, 6))
blamed("amax over everything", "amax", lambda x: x.amax(), f(N, 6))
blamed("norm over everything", "linalg_vector_norm", lambda x: x.norm(), f(N, 6))
safe("sum over everything that has no rows", lambda x, y: x + y.sum() + y.max() + y.norm(), f(N, 6), f(3, 4))
safe(
    "cumsum, cumprod, cummax, cummin, logcumsumexp over rows",
    lambda x: (x.cumsum(0), x.cumprod(0), x.cummax(0), x.cummin(0), x.logcumsumexp(0)),
    f(N, 6),
)
safe("cumsum within rows", lambda x: x.cumsum(-1), f(N, 6))
blamed("cumsum over merged rows", "cumsum", lambda x: x.view(-1).cumsum(0), f(2, N))
safe("cumsum over rows that were merged outermost", lambda x: x.view(-1).cumsum(0), f(N, 2))
blamed("cumsum from the end", "flip", lambda x: x.flip(0).cumsum(0), f(N, 6))
safe("diff", lambda x: torch.diff(x, dim=0), f(N, 6))
safe("diff with a prefix", lambda x: torch.diff(x, dim=0, prepend=x[:1] - 1), f(N, 6))
blamed("diff with a suffix", "cat", lambda x: torch.diff(x, dim=0, append=x[:1]), f(N, 6))
safe("softmax of a causal mask's shape, within fixed keys", lambda x: x.tril().softmax(-1), f(2, N, 6))

# -- norms and space ---------------------------------------------------------------------------------------------------

safe("layer norm", lambda x, w: F.layer_norm(x, (6,), w, w), f(N, 6), f(6))
blamed("layer norm over rows", "native_layer_norm", lambda x: F.layer_norm(x, x.shape[1:]), f(2, N, 6))
safe("rms norm", lambda x, w: F.rms_norm(x, (6,), w), f(2, N, 6), f(6))
safe("group norm", lambda x: F.group_norm(x, 2), f(N, 6, 4))
blamed("group norm over rows", "native_group_norm", lambda x: F.group_norm(x, 2), f(2, 6, N))
safe("batch norm", lambda x, m, v: F.batch_norm(x, m, v.abs()), f(N, 6), f(6), f(6))
blamed(
    "batch norm in training", "_native_batch_norm_legit", lambda x: F.batch_norm(x, None, None, training=True), f(N, 6)
)
safe("batch norm over space", lambda x, m, v: F.batch_norm(x, m, v.abs()), f(2, 6, N), f(6), f(6))
safe("normalize", lambda x: F.normalize(x, dim=-1), f(N, 6))
blamed("normalize over rows", "linalg_vector_norm", lambda x: F.normalize(x, dim=0), f(N, 6))
safe("convolution", lambda x, w: F.conv1d(x, w, padding=1), f(N, 3, 8), f(4, 3, 3))
safe("transposed convolution", lambda x, w: F.conv_transpose1d(x, w), f(N, 3, 8), f(3, 4, 3))
safe("convolution in two dimensions", lambda x, w: F.conv2d(x, w), f(N, 3, 8, 8), f(4, 3, 3, 3))
blamed("convolution along rows", "convolution", lambda x, w: F.conv1d(x, w, padding=1), f(2, 3, N), f(4, 3, 3))
blamed(
    "convolution along rows, unpadded", "convolution", lambda x, w: F.conv1d(x, w), f(2, 3, N), f(4, 3, 3), shows=False
)
blamed(
    "transposed convolution along rows", "convolution", lambda x, w: F.conv_transpose1d(x, w), f(2, 3, N), f(3, 4, 3)
)
safe("pooling", lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 4), f(N, 3, 8))
safe("pooling in two dimensions", lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), f(2, N, 8, 8))
blamed("pooling along rows", "_adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool1d(x, 2), f(2, 3, N))
safe("interpolation", lambda x: F.interpolate(x, scale_factor=2), f(N, 3, 8))
blamed("interpolation along rows", "mul", lambda x: F.interpolate(x, size=7, mode="linear"), f(2, 3, N))
safe("tril and triu", lambda x: x.tril() + x.triu(1), f(N, N))
blamed("tril from a diagonal that depends on the rows", "tril", lambda x: x.tril(x.shape[0] - 3), f(N, N))
safe("a causal mask", lambda x: torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril() & (x > 0), f(N, N))
blamed("tril of merged rows", "tril", lambda x: x.view(-1, 6).tril(), f(2, N, 6))

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
