"""Pieces that are the same program are compiled once, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test
from torch import nn

import sgc_backend
from sgc_backend.alike import program

__all__ = ["only_graphs_of_this_test"]


class Layers(nn.Module):
    """Layers with a cut each; ``odd`` is what the third one does instead."""

    def __init__(self, count: int, odd: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(lin() for _ in range(count))
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = ops.double(layer(x).relu())
            if self.odd is not None and k == 2:
                x = self.odd(x)
        return x


def programs(model: nn.Module, **options: Any) -> list[Any]:
    """The programs of the pieces that the model's graph falls into."""
    call = compiled(model.to("cpu"), **options)
    with torch.no_grad():
        call(torch.randn(3, D))
    (graph,) = graphs()
    return [program(g) for g in graph.split.pieces]


def test_layers_of_a_model_are_one_program() -> None:
    found = programs(Layers(5))
    assert None not in found
    assert len(found) == 5
    assert len(set(found)) == 2  # the first layer takes the caller's input, the size before the weight
    assert len(set(found[1:])) == 1


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x + 1,
        lambda x: x * -0.0,
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, :8].repeat(1, 2),
        lambda x: x.view(x.shape[0], 4, 4).transpose(1, 2).reshape(x.shape),
    ],
    ids=["adds", "signed zero", "casts", "strides", "shapes", "views"],
)
def test_a_layer_that_differs_is_a_program_of_its_own(odd: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = programs(Layers(6, odd))
    assert found[3] not in found[4:]


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (2, 3), (float("inf"), float("-inf"))])
def test_numbers_are_told_apart_by_what_they_are(one: Any, other: Any) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return ops.double(ops.double(x + 1) * one) * other

    found = programs(Model(body))
    assert len(found) == 3
    assert found[1] != found[2]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_layers_that_share_a_compilation_keep_their_weights(inner: str) -> None:
    model = Layers(6)
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for n in (3, 3, 3, 5, 5):
            x = torch.randn(n, D)
            torch.testing.assert_close(call(x), model(x))
    (graph,) = graphs()
    pieces = [fn for g, fn in zip(graph.split.groups, graph.compiled, strict=True) if g.kind == "piece"]
    assert len(pieces) == 6
    assert len(set(map(id, pieces))) == 2


def test_constants_that_are_written_stay_apart() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = [torch.zeros(1), torch.zeros(1)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for count in self.counts:
                count += x.shape[0]
                x = ops.double(x * 1.5 + count)
            return x

    model, reference = Counting(), Counting()
    call = torch.compile(
        model, backend=sgc_backend.sgc_piecewise, dynamic=True, options={"inner": "aot_eager", "cut_ops": CUTS}
    )
    with torch.no_grad():
        for n in (3, 4, 3, 5, 4):
            x = torch.randn(n, D)
            torch.testing.assert_close(call(x), reference(x))
    assert model.counts == reference.counts
