"""Small models of every kind that the backend must serve, with the inputs that they take at size n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D = 16

# Ops of the tests. They are registered once a process, whichever test imports them first.


@torch.library.custom_op("sgc_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sgc_test::three", mutates_args=())
def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x + 1, x * 3, x - 2


@three.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("sgc_test::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, : x.shape[1] // 2].clone(), x[:, x.shape[1] // 2 :].clone()]


@halves.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    left = x.shape[1] // 2
    return [x.new_empty(x.shape[0], left), x.new_empty(x.shape[0], x.shape[1] - left)]


@torch.library.custom_op("sgc_test::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@add_one_.register_fake
def _(x: torch.Tensor) -> None:
    return None


@torch.library.custom_op("sgc_test::softmax_into", mutates_args=("out",))
def softmax_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(x, -1))


@softmax_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


CUTS = ("sgc_test::double", "sgc_test::three", "sgc_test::halves", "sgc_test::add_one_", "sgc_test::softmax_into")
ops = torch.ops.sgc_test


class Model(nn.Module):
    """A module made of one function and the layers that it asks for by name."""

    def __init__(self, fn: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.register_buffer("cache", torch.zeros(64, D))
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


def rows(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, D),)


def rows_and_slots(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, D), torch.randperm(64)[:n]


def tokens(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (n,)),)


def image(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, 3, 8, 8),)


def sequence(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, n, D),)


def lin() -> nn.Module:
    return nn.Linear(D, D)


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.qkv(x).view(1, x.shape[0], 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


def _hand_attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = m.a(x) @ m.b(x).t() / D**0.5
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


def _into(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    out = torch.empty_like(h)
    ops.softmax_into(h, out)
    return m.b(out) + x


def _kv(m: Any, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.cache[slots] = h
    h = ops.double(h)
    m.cache.index_add_(0, slots, h)
    return m.b(h) + m.cache[slots]


def _state(m: Any, x: torch.Tensor) -> Any:
    m.counter.add_(1)
    h = ops.double(m.a(x))
    ops.add_one_(m.counter)
    return h * m.counter, m.counter.clone()


def _three_later(m: Any, x: torch.Tensor) -> Any:
    a, b, _ = ops.three(m.a(x))
    h = ops.double(m.b(a))
    c, _, _ = ops.three(h)
    return h + b, c, b


def _sizes(m: Any, x: torch.Tensor) -> Any:
    size = x.size()
    n = x.shape[0]
    h = ops.double(m.a(x).view(n * 2, D // 2))
    tail = size[1:]
    h = m.b(h.reshape(n, *tail)) / n
    h = ops.double(h)
    return h.view(size), h.reshape(-1), n * 3 + 1


def _views(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x).t()
    h = ops.double(h).t().unsqueeze(0).expand(2, -1, -1)
    h = ops.double(h.contiguous())
    return m.b(h[0]), h[1][:, ::2]


def _mutated(m: Any, x: torch.Tensor) -> Any:
    x = x * 1
    ops.add_one_(x)
    h = m.a(x)
    view = h[:, :4]
    ops.add_one_(view)
    return h.relu_(), x


def _gather(m: Any, x: torch.Tensor, slots: torch.Tensor) -> Any:
    picked = m.cache.gather(0, slots[:, None].expand(-1, D)) + x
    out = torch.zeros_like(x).scatter_add_(1, (slots % D)[:, None], picked[:, :1])
    return ops.double(out), picked.take_along_dim(picked.argsort(-1), -1)


def _autocast(m: Any, x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = ops.double(m.a(x))
        h = m.b(h)
    return h, m.a(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "linear": (lambda: Model(lambda m, x: m.a(x), a=lin()), rows),
    "mlp": (lambda: Model(lambda m, x: m.b(F.gelu(m.a(x))) + x, a=lin(), b=lin()), rows),
    "mlp_cut_first": (lambda: Model(lambda m, x: m.a(ops.double(x)), a=lin()), rows),
    "mlp_cut_last": (lambda: Model(lambda m, x: ops.double(m.a(x)), a=lin()), rows),
    "mlp_cut_middle": (lambda: Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()), rows),
    "cut_only": (lambda: Model(lambda m, x: ops.double(x)), rows),
    "cuts_adjacent": (
        lambda: Model(lambda m, x: m.b(ops.double(ops.double(m.a(x)).view(-1, D))), a=lin(), b=lin()),
        rows,
    ),
    "cut_thrice": (lambda: Model(lambda m, x: ops.double(m.a(ops.double(m.a(ops.double(x))))), a=lin()), rows),
    "layer_norm": (lambda: Model(lambda m, x: m.n(ops.double(m.a(x))), a=lin(), n=nn.LayerNorm(D)), rows),
    "rms_norm": (lambda: Model(lambda m, x: F.rms_norm(m.a(x), (D,), None, 1e-5) * 2.5, a=lin()), rows),
    "batch_norm_eval": (lambda: Model(lambda m, x: m.n(m.a(x)), a=lin(), n=nn.BatchNorm1d(D)).eval(), rows),
    "group_norm": (lambda: Model(lambda m, x: m.n(x), n=nn.GroupNorm(1, 3)), image),
    "conv": (lambda: Model(lambda m, x: F.relu(m.c(x)).mean((2, 3)), c=nn.Conv2d(3, 4, 3, padding=1)), image),
    "conv_cut": (lambda: Model(lambda m, x: m.c(ops.double(x)).flatten(1), c=nn.Conv2d(3, 4, 3)), image),
    "max_pool": (lambda: Model(lambda m, x: F.max_pool2d(m.c(x), 2), c=nn.Conv2d(3, 4, 3)), image),
    "attention": (lambda: Model(_attention, qkv=nn.Linear(D, 3 * D)), rows),
    "attention_by_hand": (lambda: Model(_hand_attention, a=lin(), b=lin()), rows),
    "embedding": (lambda: Model(lambda m, t: ops.double(m.e(t)).cumsum(0), e=nn.Embedding(50, D)), tokens),
    "in_place_out": (lambda: Model(_into, a=lin(), b=lin()), rows),
    "kv_write": (lambda: Model(_kv, a=lin(), b=lin()), rows_and_slots),
    "state": (lambda: Model(_state, a=lin()), rows),
    "multi_output": (lambda: Model(_three_later, a=lin(), b=lin()), rows),
    "list_output": (lambda: Model(lambda m, x: torch.cat(ops.halves(m.a(x))[::-1], 1), a=lin()), rows),
    "chunk_across": (
        lambda: Model(lambda m, x: (lambda p: ops.double(p[0]) * p[1])(m.a(x).chunk(2, 1)), a=lin()),
        rows,
    ),
    "sizes_across": (lambda: Model(_sizes, a=lin(), b=lin()), rows),
    "views_across": (lambda: Model(_views, a=lin(), b=lin()), rows),
    "mutated": (lambda: Model(_mutated, a=lin()), rows),
    "gather_scatter": (lambda: Model(_gather), rows_and_slots),
    "autocast": (lambda: Model(_autocast, a=lin(), b=lin()), rows),
    "mean_over_rows": (lambda: Model(lambda m, x: m.a(x) - ops.double(m.a(x).mean(0, keepdim=True)), a=lin()), rows),
    "sequence": (lambda: Model(lambda m, x: ops.double(m.a(x)).softmax(1), a=lin()), sequence),
    "input_returned": (lambda: Model(lambda m, x: (x, ops.double(x), x.t()), a=lin()), rows),
    "two_results_one_storage": (lambda: Model(lambda m, x: (lambda h: (h, h.t(), h[1:]))(m.a(x)), a=lin()), rows),
    "nothing_but_views": (lambda: Model(lambda m, x: x.t().unsqueeze(0)), rows),
    "top_k": (lambda: Model(lambda m, x: ops.double(torch.topk(m.a(x), 3, dim=1).values), a=lin()), rows),
    "einsum": (lambda: Model(lambda m, x: torch.einsum("nd,de->ne", ops.double(x), m.a.weight), a=lin()), rows),
}
