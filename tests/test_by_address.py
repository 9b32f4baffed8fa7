"""Plans of one key: layers that share code, and some of their static inputs, each have a recording that is found."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from models import D, ops
from test_backend import compiled, device, graphs, only_graphs_of_this_test, same, total
from torch import nn

from sgc_backend.by_address import PlansByAddress

__all__ = ["only_graphs_of_this_test"]


class Layer(nn.Module):
    """Reads two static inputs, one in front of the other, and a cut between them."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.double(torch.cat((x, self.first))[: x.shape[0] + 1]).sum(0) + x @ self.second


def square(where: str) -> torch.Tensor:
    return torch.randn(D, D, device=where)


def sharing(what: str, where: str) -> list[Layer]:
    common = square(where)
    if what == "the first":
        return [Layer(common, square(where)) for _ in range(4)]
    if what == "the last":
        return [Layer(square(where), common) for _ in range(4)]
    if what == "empty firsts":
        return [Layer(torch.empty(0, D, device=where), square(where)) for _ in range(4)]
    ones, others = [square(where) for _ in range(2)], [square(where) for _ in range(3)]
    return [Layer(a, b) for a, b in itertools.product(ones, others)]  # no one input tells them apart


def plans() -> list[Any]:
    return [plan for graph in graphs() for found in graph.plans.values() for plan in found]


@device
@pytest.mark.parametrize("what", ["the first", "the last", "empty firsts", "in pairs"])
def test_layers_that_share_some_static_inputs_are_recorded_once_each(what: str, device: str) -> None:
    layers = sharing(what, device)
    calls = [compiled(layer, dynamic=False) for layer in layers]
    with torch.no_grad():
        for k in range(12):
            for layer, call in zip(layers, calls, strict=True):
                x = torch.randn(3 if what != "empty firsts" else 1, D, device=device)
                same(call(x), layer(x))
            if k == 6:
                layers[1].second.mul_(2)  # in place: nobody's plan
    (graph,) = graphs()
    assert total("captured") == len(layers)
    assert dict(graph.counters.uncaptured) == {"warm-up": 1}


@device
def test_many_layers_that_share_a_static_input_are_all_recorded_by_their_third_call(device: str) -> None:
    common = square(device)
    layers = [Layer(common, square(device)) for _ in range(24)]
    calls = [compiled(layer, dynamic=False) for layer in layers]
    with torch.no_grad():
        for k in range(5):
            for layer, call in zip(layers, calls, strict=True):
                x = torch.randn(3, D, device=device)
                same(call(x), layer(x))
            if k == 2:
                assert len(plans()) == 24
    assert total("captured") == 24
    assert total("replayed") > 24 * 3


def test_a_second_weight_that_moves_at_every_call_is_not_recorded_without_limit() -> None:
    layer = Layer(square("cpu"), square("cpu"))
    call, kept = compiled(layer, dynamic=False), []
    with torch.no_grad():
        for _ in range(200):
            kept.append(layer.second)
            layer.second = square("cpu")
            x = torch.randn(3, D)
            same(call(x), layer(x))
        (graph,) = graphs()
        assert any("update them in place" in cause for cause in graph.counters.uncaptured)
        assert total("captured") < 12
        before = total("replayed")
        for _ in range(4):  # it stays where it is from now on
            same(call(x), layer(x))
    assert total("replayed") > before


@device
def test_a_second_weight_that_is_swapped_to_and_fro_is_recorded_once_for_each(device: str) -> None:
    layer, values = Layer(square(device), square(device)), [square(device) for _ in range(2)]
    call = compiled(layer, dynamic=False)
    with torch.no_grad():
        for k in range(12):
            layer.second.data = values[k % 2]
            x = torch.randn(3, D, device=device)
            same(call(x), layer(x))
    assert total("captured") == 2


@device
def test_each_layer_that_dies_takes_its_recording_along_though_what_it_shares_lives(device: str) -> None:
    layers = sharing("the first", device)
    one = compiled(lambda layer, x: layer(x), dynamic=False)
    x = torch.randn(3, D, device=device)
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                same(one(layer, x), layer(x))
        del layer
        while layers:
            assert len(plans()) == len(layers)
            layers.pop()
            gc.collect()
    assert not plans()


def test_the_telling_input_is_the_first_that_tells_all_plans_apart() -> None:
    class Stub:
        def __init__(self, *addresses: int) -> None:
            self.static_addresses, self.static_indices = list(addresses), list(range(len(addresses)))

    def telling(*rows: tuple[int, ...]) -> int | None:
        return PlansByAddress([Stub(*row) for row in rows]).telling

    assert telling() is None
    assert telling(()) is None
    assert telling((7, 8)) == 0
    assert telling((7, 8), (9, 8)) == 0
    assert telling((7, 8), (7, 9)) == 1
    assert telling((7, 1, 4), (7, 2, 4), (8, 3, 4)) == 1
    assert telling((1, 1), (1, 2), (1, 3), (2, 1)) == 1  # none does; the second comes closest
