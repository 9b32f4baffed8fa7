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

from sgc_backend.seen import calls_seen

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


@device
def test_a_call_that_began_before_padding_was_given_up_is_not_served_by_an_exact_recording(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = padded(model)
    with torch.no_grad():
        call(torch.randn(32, D, device=device))
        (graph,) = graphs()
        buckets = graph.padding.buckets
        graph._give_up_padding("for the test")
        with calls_seen() as seen:
            for _ in range(3):
                call(torch.randn(32, D, device=device))
        x = torch.randn(30, D, device=device)
        args = [_smaller(a, x) for a in seen.replayed[-1].args]
        key = buckets.of((30,))
        near(graph._cold(key, (30,), args)[0], model(x))
        near(graph(*args)[0], model(x))


def _smaller(value: Any, x: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return x if value.shape[0] == 32 else value
    return len(x)


@device
def test_sizes_of_inputs_that_pieces_see_through_a_cuts_view_alone_are_told_apart(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        x[-1].fill_(3)  # the row is taken by a cut, so the piece sees nothing of the size
        return m.counter * 2

    model = Model(body).to(device)
    call = padded(model, cut_ops=("aten::select",))
    with torch.no_grad():
        for n in (9, 9, 9, 10, 10, 10, 9):
            x, y = torch.zeros(n, D, device=device), torch.zeros(n, D, device=device)
            near(call(x), body(model, y))
            near(x, y)


@device
def test_a_parameter_that_an_in_place_op_returns_is_the_parameter_itself(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        w = m.counter
        w += 1
        return w, m.a(x)

    model = Model(body, a=lin()).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            out, _ = call(torch.randn(n, D, device=device))
            assert out is model.counter


@device
@pytest.mark.parametrize("n", [9, 33])
def test_a_cut_sees_an_input_and_a_pieces_view_of_it_in_one_memory(n: int, device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        column = x[:, :2].unbind(1)[1] + m.counter.sum()
        view = x[:, 1:].unbind(1)[1]
        row = view[-1]
        left = x[:, 3:][:, :2].transpose(0, 1)
        return column, row * 2, left * 3

    model = Model(body).to(device)
    for cuts in (("aten::select",), ("aten::select", "aten::transpose"), ("aten::select", "aten::slice")):
        torch._dynamo.reset()
        call = padded(model, cut_ops=cuts, capture_sizes=None)
        with torch.no_grad():
            for _ in range(4):
                x = torch.randn(n, D, device=device)
                near(call(x), body(model, x))


@device
def test_repeated_elements_that_a_cut_returns_beside_another_view_are_copied_once(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        turned, same = x.transpose(0, 1), x.view(x.shape)
        return torch.add(turned, turned, alpha=2), same * 2

    model = Model(body).to(device)
    call = padded(model, cut_ops=("aten::transpose", "aten::view"), capture_sizes=None)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(1, D, device=device).expand(3, D)
            near(call(x), body(model, x))
