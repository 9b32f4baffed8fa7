"""The decoder that benchmarks run: random weights, real shapes and real kernels; each benchmark chooses how it attends.

n tokens, E hidden, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """How large the decoder and its phases are."""

    layers: int
    hidden: int
    heads: int
    prefill: tuple[int, ...]
    decode: tuple[int, ...]


ON_GPU = Size(16, 2048, 16, (4096, 2048, 1024, 512, 256), (256, 128, 64, 32, 16, 8, 4, 2, 1))
ON_HOST = Size(2, 64, 4, (512, 256, 128, 64), (32, 16, 8, 4, 2, 1))


def causal(q_nHD: torch.Tensor, k_nHD: torch.Tensor, v_nHD: torch.Tensor) -> torch.Tensor:
    """Causal attention of n tokens of one sequence, without a cache: [n, H, D]."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_nHD, k_nHD, v_nHD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


class Block(nn.Module):
    """One layer: attention and a gated MLP, both behind an RMSNorm."""

    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = size.heads, attend
        inner = size.hidden * 11 // 4
        self.attention_norm, self.mlp_norm = (nn.Parameter(torch.ones(size.hidden)) for _ in range(2))
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.gate_up = nn.Linear(size.hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, size.hidden, bias=False)

    def forward(self, x_nE: torch.Tensor) -> torch.Tensor:
        return self.behind(x_nE, self.attend(*self.in_front(x_nE)))

    def in_front(self, x_nE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the attention takes: queries, keys and values, [n, H, D] each."""
        n, hidden = x_nE.shape
        qkv = self.qkv(F.rms_norm(x_nE, (hidden,), self.attention_norm)).view(n, 3, self.heads, -1)
        return qkv.unbind(1)

    def behind(self, x_nE: torch.Tensor, attended_nHD: torch.Tensor) -> torch.Tensor:
        """The layer's result, from its input and what its attention gave."""
        n, hidden = x_nE.shape
        x_nE = x_nE + self.out(attended_nHD.reshape(n, hidden))
        gate, up = self.gate_up(F.rms_norm(x_nE, (hidden,), self.mlp_norm)).chunk(2, -1)
        return x_nE + self.down(F.silu(gate) * up)


def dtype_on(device: str) -> torch.dtype:
    """bf16 on a GPU, fp32 on the host."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def decoder(size: Size, device: str, attend: Attend = causal) -> nn.Module:
    """The layers on ``device``, in its dtype.

    Args:
        attend: maps queries, keys and values, [n, H, D] each, to [n, H, D]; a module is shared by all layers.
    """
    with torch.device(device):
        return nn.Sequential(*(Block(size, attend) for _ in range(size.layers))).to(dtype_on(device)).eval()
