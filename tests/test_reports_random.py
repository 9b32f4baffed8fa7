"""Reported cases: random numbers, and the modes that a capture begins in."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import (
    device,
)
from test_reports import captured

__all__ = ["only_graphs_of_this_test"]


# RN01
@device
@pytest.mark.parametrize("where", ["first piece", "second piece", "whole"])
def test_dropout_masks_differ_from_call_to_call(where: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        if where == "second piece":
            return F.dropout(ops.double(m.a(x)) * 0 + 1) / 2
        h = F.dropout(m.a(x) * 0 + 1) / 2
        return ops.double(h) / 2 if where == "first piece" else h

    model = Model(fn, a=lin()).to(device)
    x = torch.randn(32, D, device=device)
    if where == "whole":
        backend = captured(device, lambda: model(x))
        call = lambda x: backend.replay(4).clone()  # noqa: E731
    else:
        call = compiled(model, dynamic=False)
    with torch.no_grad():
        call(x)
        masks = [call(x) for _ in range(5)]
        for a, b in itertools.combinations(masks, 2):
            assert not torch.equal(a, b)
        mean = torch.stack([call(x) for _ in range(200)]).mean()
    assert abs(mean.item() - 0.5) < 0.02
    if where == "whole":
        backend.cleanup()
    else:
        assert total("replayed") == 205


def random_state(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        if device == "cuda"
        else (torch.get_rng_state, torch.set_rng_state)
    )


# RN02
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_seeds_and_saved_states_act_on_replays_as_on_eager(kind: str, device: str) -> None:
    x = torch.randn(8, D, device=device)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return x * 0 + torch.rand_like(x)

    if kind == "whole":
        backend = captured(device, lambda: eager(x))
        f = lambda x: backend.replay(4).clone()  # noqa: E731
    else:
        f = compiled(eager, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            f(x)
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append((f(x), f(x)))
        same(results[0], results[1])
        assert not torch.equal(results[0][0], results[2][0])
        assert not torch.equal(results[0][0], results[0][1])
        torch.manual_seed(0)
        same((eager(x), eager(x)), results[0])
        get, put = random_state(device)
        state = get()
        first = f(x)
        put(state)
        same(f(x), first)
        torch.manual_seed(5)
        mixed = [f(x), torch.rand_like(x), f(x), torch.rand_like(x)]
        for a, b in itertools.combinations(mixed, 2):
            assert not torch.equal(a, b)
        torch.manual_seed(5)
        same(mixed, [eager(x) if k % 2 == 0 else torch.rand_like(x) for k in range(4)])
    if kind == "whole":
        backend.cleanup()


# RN03
@device
@pytest.mark.parametrize("order", list(itertools.permutations(["inference", "no_grad", "grad"])))
def test_captures_under_any_order_of_modes_work(order: tuple[str, ...], device: str) -> None:
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": contextlib.nullcontext}
    for mode in order:
        torch._dynamo.reset()
        model = Model(lambda m, x: m.b(ops.double(m.a(x)) + torch.rand_like(x) * 0), a=lin(), b=lin())
        model = model.to(device).requires_grad_(False)
        call = compiled(model, dynamic=False)
        before = total("replayed")
        with modes[mode]():
            for _ in range(3):
                x = torch.randn(4, D, device=device)
                same(call(x), model(x))
        assert total("replayed") == before + 2
