"""The demo's language model: a small byte-level decoder whose attention reads and writes a paged KV cache.

Shapes: T tokens of a ragged batch, flattened; R requests; NB blocks in a request's table; B x S a dense
training batch; E hidden; H query heads; K key/value heads; D head dim; V vocab.

``forward`` is what an engine serves: static shapes but for T, no graph break, every number it needs from
the host baked in. ``forward_train`` runs the same weights over dense sequences, for training and as the
reference in tests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgc_backend.demo.ops import paged_attention, write_kv

WEIGHTS = Path(__file__).with_name("weights.pt")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a Decoder. ``max_positions`` bounds prompt plus continuation, in tokens (a token is a
    byte).
    """

    vocab: int = 256
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 320
    max_positions: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since rotary positions turn pairs, got {self.head_dim}")


class RMSNorm(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        # Under dynamic=True a float attribute of a module becomes a host tensor that the graph takes as an
        # input; an int stays a constant, and so does what is computed from it. Exact for 1e-5 and its like.
        self.inverse_eps = round(1 / config.eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1 / self.inverse_eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        # Buffers, so that they follow .to() and that a compiler sees static addresses; never saved with the
        # weights.
        self.register_buffer("k_cache", None, persistent=False)
        self.register_buffer("v_cache", None, persistent=False)

    def forward(
        self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor,
        positions: Tensor, slots: Tensor, token_req: Tensor, block_tables: Tensor,
    ) -> Tensor:  # fmt: skip
        q_THD, k_TKD, v_TKD = self._project(x_TE, cos_TD, sin_TD)
        write_kv(k_TKD, v_TKD, self.k_cache, self.v_cache, slots)
        out_THD = torch.empty_like(q_THD)
        scale = self.head_dim**-0.5
        paged_attention(q_THD, self.k_cache, self.v_cache, block_tables, token_req, positions, scale, out_THD)
        return self.o(out_THD.flatten(-2))

    def forward_train(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self._project(x_BSE, cos_SD, sin_SD))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out_BHSD = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.head_dim**-0.5)
        return self.o(out_BHSD.transpose(1, 2).flatten(-2))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] to the rotated queries and keys and the values, [..., heads, D]."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.gate = nn.Linear(config.hidden, config.mlp, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.hidden, bias=False)

    def forward(self, x_TE: Tensor, *attention_inputs: Tensor) -> Tensor:
        return self._mlp(x_TE + self.attention(self.attention_norm(x_TE), *attention_inputs))

    def forward_train(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        return self._mlp(x_BSE + self.attention.forward_train(self.attention_norm(x_BSE), cos_SD, sin_SD))

    def _mlp(self, x: Tensor) -> Tensor:
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

    Call ``allocate_cache`` before ``forward``. The caches belong to the module: one engine per Decoder at a
    time.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config)
        # In float64 on the host, so that the table is the same wherever the model was built.
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * config.rope_theta**-pairs
        self.register_buffer("rope_cos", angles.cos().float(), persistent=False)
        self.register_buffer("rope_sin", angles.sin().float(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                # Fan-in scaling; for the tied embedding it makes the first logits about unit size.
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        for block in self.layers:
            # Zero residual branches: the model starts as the identity, which small models train fastest from.
            nn.init.zeros_(block.attention.o.weight)
            nn.init.zeros_(block.down.weight)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Give every layer zeroed k_cache and v_cache buffers, [num_blocks + 1, block_size, K, D] in the
        weights' dtype.

        The extra block is the trash block that padding rows may be written to (see ``ops.py``); block ids
        for requests are 0..num_blocks-1. Caches that fit already keep their addresses; others are dropped,
        and what was recorded against them is stale. Raises ValueError for sizes below 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs at least one block of one token, got {num_blocks} x {block_size}")
        shape = (num_blocks + 1, block_size, self.config.kv_heads, self.config.head_dim)
        for block in self.layers:
            for name in ("k_cache", "v_cache"):
                new, old = self.embedding.weight.new_zeros(shape), getattr(block.attention, name)
                if old is not None and (old.shape, old.dtype, old.device) == (
                    new.shape,
                    new.dtype,
                    new.device,
                ):
                    old.zero_()
                else:
                    setattr(block.attention, name, new)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, token_req: Tensor, block_tables: Tensor
    ) -> Tensor:
        """Run a ragged batch, writing its keys and values into the caches; the normed hidden states, [T, E].

        tokens, positions, slots: [T] int64. token_req: [T] int32. block_tables: [R, NB] int32. A padding
        row has token 0, position 0, slot -1 and token_req -1; its hidden state means nothing. See
        ``ops.py`` for slots and tables.
        """
        x_TE = self._embed(tokens)
        cos_TD, sin_TD = self.rope_cos[positions], self.rope_sin[positions]
        for block in self.layers:
            x_TE = block(x_TE, cos_TD, sin_TD, positions, slots, token_req, block_tables)
        return self.final_norm(x_TE)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, E] hidden states, as ``forward`` returns them, to [N, V] scores of the next byte."""
        return F.linear(hidden, self.embedding.weight)

    def next_logits(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, token_req: Tensor, block_tables: Tensor
    ) -> Tensor:
        """``forward``, then ``logits`` of every row, [T, V]."""
        return self.logits(self(tokens, positions, slots, token_req, block_tables))

    def _embed(self, tokens: Tensor) -> Tensor:
        # Not by calling the module: its norm_type is a float attribute, see RMSNorm.
        return F.embedding(tokens, self.embedding.weight)

    def forward_train(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 tokens, S <= max_positions, to [B, S, V] scores, without the caches."""
        return self.logits(self.final_norm(self.dense_states(tokens)[-1]))

    def dense_states(self, tokens: Tensor) -> list[Tensor]:
        """The residual stream after each layer, [B, S, E] each: what an early-exit loss is made of."""
        S = tokens.shape[1]
        x_BSE = self._embed(tokens)
        states = []
        for block in self.layers:
            x_BSE = block.forward_train(x_BSE, self.rope_cos[:S], self.rope_sin[:S])
            states.append(x_BSE)
        return states


def save(model: Decoder, path: Path = WEIGHTS) -> None:
    """Write the weights in float16 and the config as plain values, which load with weights_only=True."""
    weights = {name: weight.detach().cpu().half() for name, weight in model.state_dict().items()}
    torch.save({"config": asdict(model.config), "weights": weights}, path)


def load(
    device: torch.device | str = "cpu",
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    path: Path = WEIGHTS,
) -> Decoder:
    """The packaged model, in eval mode and without gradients.

    layers=k keeps the first k layers only: with k=2 a draft model for speculative decoding, since training
    also taught the head to read layer 2. Raises ValueError when there are fewer layers than asked for.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    config = DecoderConfig(**saved["config"])
    if layers is not None:
        if not 1 <= layers <= config.layers:
            raise ValueError(f"layers must be between 1 and {config.layers}, got {layers}")
        config = replace(config, layers=layers)
    model = Decoder(config)
    wanted = model.state_dict().keys()
    model.load_state_dict({name: weight for name, weight in saved["weights"].items() if name in wanted})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (d, d + D/2) of [..., heads, D] by their position's angles, [..., D/2]; in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
