"""Ops that change the shape of the tensor which they are called on, in cuts and in front of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from test_padding import near, padded

import sgc_backend

__all__ = ["only_graphs_of_this_test"]


def _read_behind_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ w)
    h.unsqueeze_(0)
    return (h + 1)[0] @ w


def _by_another_name(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = (x @ w).relu_()
    g = h.mul_(2)
    g.unsqueeze_(0)
    return (h * 3)[0]


def _an_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    y = x.clone()
    y.unsqueeze_(0)
    return y[0] * h


def _swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h.transpose_(0, 1)
    return (h + h.sum()).t() @ w


BODIES = [_read_behind_it, _by_another_name, _an_input, _swapped]
RESHAPES = ["aten::unsqueeze_", "aten::transpose_"]


@device
@pytest.mark.parametrize("more", [[], ["aten::relu", "aten::mm"]], ids=["alone", "with others"])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_a_cut_that_reshapes_in_place_equals_eager_at_every_call(
    body: Callable[..., Any], more: list[str], device: str
) -> None:
    call = compiled(body, cut_ops=[*RESHAPES, *more])
    w = torch.randn(D, D, device=device)
    with torch.no_grad():
        for n in (D, D, D, 6, 6, 6, D):  # square ones too, whose shape doesn't tell that they were turned
            x = torch.randn(n, D, device=device)
            same(call(x, w), body(x, w))


@pytest.mark.parametrize("body", [_read_behind_it, _swapped], ids=lambda f: f.__name__)
def test_where_a_piece_has_what_a_cut_reshapes_the_graph_stays_whole_and_says_so(body: Callable[..., Any]) -> None:
    call = compiled(body, cut_ops=RESHAPES)
    with torch.no_grad():
        call(torch.randn(6, D), torch.randn(D, D))
        told = str(sgc_backend.explain(call, torch.randn(6, D), torch.randn(D, D)))
    assert "changes the shape or the memory of h in a cut, and a piece has it" in " ".join(told.split())


def test_a_cut_may_reshape_what_only_cuts_have() -> None:
    def body(x: torch.Tensor) -> Any:
        h = torch.relu(x)
        h.unsqueeze_(0)
        return torch.relu(h), (x * 2).exp()

    call = compiled(body, cut_ops=["aten::relu", *RESHAPES])
    with torch.no_grad():
        for n in (4, 4, 4, 6, 6, 6):
            x = torch.randn(n, D)
            same(call(x), body(x))
    assert total("replayed") == 4


@device
def test_a_graph_is_not_padded_at_the_price_of_a_cut_that_reshapes_in_place(device: str) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = torch.relu(x @ w)
            h.unsqueeze_(0)
            x = torch.tanh((h * 1.5).view(-1, D) @ w) @ w
        return x

    call = padded(body, cut_ops=())
    w = torch.randn(D, D, device=device) * 0.3
    with torch.no_grad():
        for n in (20, 20, 20, 13, 13, 13, 17, 17, 12, 12, 12):
            x = torch.randn(n, D, device=device)
            near(call(x, w), body(x, w))
    for graph in graphs():
        assert graph.padding is not None or "unsqueeze_" in graph.not_padded
    assert total("replayed") > 0
