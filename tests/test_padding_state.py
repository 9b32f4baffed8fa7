"""What padded calls leave behind them is what the uncompiled model leaves: state is written once, and only its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import graphs, only_graphs_of_this_test
from test_injection import device
from test_padding import SIZES, near, padded

__all__ = ["only_graphs_of_this_test"]


def _moving_average(m: Any, x: torch.Tensor) -> Any:
    # The mean is cut out, so the sum is written behind the cut, by the name of the product.
    m.counter.mul_(0.9).add_(x.mean())
    return m.a(ops.double(x)) + m.counter


def _in_two_pieces(m: Any, x: torch.Tensor) -> Any:
    row = m.counter[None].mul_(0.5)
    h = ops.double(m.a(x))
    row.add_(1)
    return h + m.counter


def _own_sum(m: Any, x: torch.Tensor) -> Any:
    total = torch.zeros(D, device=x.device)
    h = ops.double(m.a(x)) + total
    total.add_(1)
    k = ops.double(h)
    total.mul_(2)
    return k + total, total


def _cache_view(m: Any, x: torch.Tensor) -> Any:
    head = m.cache[:4]
    h = ops.double(m.a(x))
    head.add_(1)
    return h + m.cache.sum(0)


@device
@pytest.mark.parametrize("body", [_moving_average, _in_two_pieces, _own_sum, _cache_view], ids=lambda f: f.__name__)
def test_state_that_is_written_by_another_name_is_written_once(body: Callable[..., Any], device: str) -> None:
    model = Model(body, a=lin()).to(device)
    reference = copy.deepcopy(model)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, D, device=device)
            near(call(x), reference(x.clone()))
            near(dict(model.state_dict()), dict(reference.state_dict()))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
