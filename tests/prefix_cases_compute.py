"""Cases for prefix safety: ops that compute, pointwise, in products and along dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from prefix_case import blamed, f, mask, safe
from prefix_oracle import N

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
