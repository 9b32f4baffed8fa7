"""Random programs of ops that prefix safety is asked about: what is composed, rules seldom meet in a table."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from prefix_oracle import N

Step = Callable[[list[torch.Tensor]], Any]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def f(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [f(N, 6), f(2, N, 6), f(N, N), f(6, 6), f(N, 6)]


def program_of(seed: int, steps: int = 7) -> Callable[..., list[torch.Tensor]]:
    """A function of `inputs` that runs random steps, each of what came before; each works at N rows."""
    rng = random.Random(seed)
    plan: list[Step] = []
    with torch.no_grad():
        values = inputs()
        while len(plan) < steps:
            step = draw(rng, values)
            try:
                made = step(values)
            except (RuntimeError, IndexError, ValueError):
                continue
            if made.numel() in range(1, 5000) and made.dim() < 5:
                plan.append(step)
                values.append(made)

    def fn(*given: torch.Tensor) -> list[torch.Tensor]:
        values = list(given)
        for step in plan:
            values.append(step(values))
        return values[len(given) :]

    return fn


def draw(rng: random.Random, values: list[torch.Tensor]) -> Step:
    # The newest values most often, so that programs grow deep.
    at = rng.choice([*range(len(values)), len(values) - 1, len(values) - 1, len(values) - 1])
    other = rng.randrange(len(values))
    rank = values[at].dim()
    d, e = (rng.randrange(rank), rng.randrange(rank)) if rank else (0, 0)
    k = rng.choice([2, 3, 4, 6])

    def unary(op: Callable[[torch.Tensor], Any]) -> Step:
        return lambda v: op(v[at])

    def binary(op: Callable[[torch.Tensor, torch.Tensor], Any]) -> Step:
        return lambda v: op(v[at], v[other])

    def written(x: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = x.clone()
        part(x).mul_(2)
        return x

    return rng.choice(
        [
            unary(torch.tanh),
            unary(lambda x: x * 2 + 1),
            unary(lambda x: torch.where(x > 0, x, -x)),
            unary(lambda x: x.softmax(d)),
            unary(lambda x: x.sum(d)),
            unary(lambda x: x.mean(d, keepdim=True)),
            unary(lambda x: x.amax((d, e)) if d != e else x.amax(d)),
            unary(lambda x: x.cumsum(d)),
            unary(lambda x: x.flip(d)),
            unary(lambda x: x.sort(d)[0]),
            unary(lambda x: x.transpose(d, e)),
            unary(lambda x: x.transpose(d, e).contiguous()),
            unary(lambda x: x.unsqueeze(d)),
            unary(lambda x: x.flatten(d, min(d + 1, x.dim() - 1))),
            unary(lambda x: x.reshape(-1)),
            unary(lambda x: x.reshape(-1, k)),
            unary(lambda x: x.reshape(k, -1)),
            unary(lambda x: x.unflatten(d, (-1, k))),
            unary(lambda x: x.unflatten(d, (k, -1))),
            unary(lambda x: x.narrow(d, 1, 2)),
            unary(lambda x: x.transpose(0, d)[1:].transpose(0, d)),
            unary(lambda x: x.transpose(0, d)[:-1]),
            unary(lambda x: x.transpose(0, d)[::2]),
            unary(lambda x: x.select(d, 0)),
            unary(lambda x: x.select(d, -1)),
            unary(lambda x: F.pad(x, (1, 0))),
            unary(lambda x: F.pad(x, (0, 0, 1, -1))),
            unary(lambda x: F.pad(x, (0, 1))),
            unary(lambda x: x.repeat_interleave(2, d)),
            unary(lambda x: x.unsqueeze(0).expand(3, *x.shape)),
            unary(lambda x: x.tril()),
            unary(lambda x: x @ x.mT),
            unary(lambda x: x.split(2, d)[0]),
            unary(lambda x: x.roll(1, d)),
            unary(lambda x: F.layer_norm(x, x.shape[-1:])),
            unary(lambda x: x.index_select(d, torch.tensor([0, 1]))),
            unary(lambda x: x.view(-1).view_as(x) if x.is_contiguous() else x.clone()),
            unary(lambda x: written(x, lambda x: x.transpose(0, d)[1:])),
            unary(lambda x: written(x, lambda x: x.transpose(0, d)[:-1])),
            unary(lambda x: written(x, lambda x: x.select(d, 1))),
            unary(lambda x: torch.zeros_like(x) + torch.arange(x.shape[-1])),
            binary(lambda x, y: x + y),
            binary(lambda x, y: x * y),
            binary(lambda x, y: x @ y),
            binary(lambda x, y: torch.cat((x, y), min(d, x.dim() - 1))),
            binary(lambda x, y: torch.stack((x, y), min(d, x.dim()))),
            binary(lambda x, y: x[: y.shape[0]] * 2),
            binary(lambda x, y: y.new_zeros(x.shape) + x),
            binary(lambda x, y: torch.outer(x.reshape(-1)[:3], y.reshape(-1)[:5])),
        ]
    )
