"""Attention as engines have it: one op that writes into a buffer of its caller's, which makes it a cut without a copy.

n tokens, H heads, D head dim; R requests in a cache of C positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgc_backend import eager_on_graph

Into = Callable[[Tensor, Tensor, Tensor, Tensor], None]

CONTEXT = 128  # positions that a decode step attends over


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Attention of ``q`` into ``out``, both [n, H, D]; it never waits for the device.

    k, v: [n, H, D], the keys and values of the same tokens, one causal sequence; or [R, H, C, D] with R >= n, a cache
    in which row r holds all that token r sees.
    """
    if k.ndim == 3:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1))
    else:
        n = q.shape[0]
        out.copy_(F.scaled_dot_product_attention(q.unsqueeze(2), k[:n], v[:n]).squeeze(2))


def _only_written(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    return None


torch.library.custom_op("sgc_bench::attend", _attend, mutates_args=("out",)).register_fake(_only_written)
# The same, which tells torch's own graphs to run it between them.
torch.library.custom_op(
    "sgc_bench::attend_apart", _attend, mutates_args=("out",), tags=(torch.Tag.cudagraph_unsafe,)
).register_fake(_only_written)

# The operator itself, as Dynamo's graphs call it: every way to run the decoder pays the same for a cut.
attend = torch.ops.sgc_bench.attend.default
attend_apart = torch.ops.sgc_bench.attend_apart.default


@torch.library.custom_op("sgc_bench::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's tokens, [n, H, D] in and out: a new tensor with every call."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1).contiguous()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


attention = torch.ops.sgc_bench.attention.default


attend_as_break = eager_on_graph(attend)


@eager_on_graph
def attend_in_function(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """`attend` in a function that is the break."""
    attend(q, k, v, out)


class Prefill(nn.Module):
    """Causal attention of one sequence's tokens through ``into``; [n, H, D] in and out."""

    def __init__(self, into: Into) -> None:
        super().__init__()
        self.into = into

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        self.into(q, k, v, out)
        return out


class Decode(nn.Module):
    """Attention of one new token a request over its cache row, through ``into``; [n, H, D] in and out, n <= R.

    Each call writes the new keys and values to the last of the C positions first.
    """

    def __init__(self, into: Into, cache: tuple[int, int, int, int]) -> None:
        super().__init__()
        self.into = into
        self.register_buffer("k_cache", torch.randn(cache))
        self.register_buffer("v_cache", torch.randn(cache))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[0]
        self.k_cache[:n, :, -1].copy_(k)
        self.v_cache[:n, :, -1].copy_(v)
        out = torch.empty_like(q)
        self.into(q, self.k_cache, self.v_cache, out)
        return out
