"""What a recording leaves behind for as long as it lives."""

from __future__ import annotations

import collections
import gc
from typing import Any

import pytest
import torch
from models import D
from test_backend import compiled, graphs, only_graphs_of_this_test, same

__all__ = ["only_graphs_of_this_test"]

LAYERS = (3, 11)


@torch.library.custom_op("sgc_test::doubles_into", mutates_args={"out"})
def doubles_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


doubles_into.register_fake(lambda x, out: None)


def layers(count: int) -> Any:
    w = torch.nn.Parameter(torch.randn(D, D), requires_grad=False)

    def body(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            h = torch.tanh(x @ w)
            out = torch.empty_like(h)
            doubles_into(h, out)
            x = out * 0.5
        return x

    return body


def tracked_by_a_recording(count: int) -> collections.Counter[str]:
    """The objects, by type, that the garbage collector has more to go through when ``count`` layers were recorded."""
    body = layers(count)
    call = compiled(body, capture_sizes="auto", cut_ops=[doubles_into])
    x = torch.randn(20, D)
    call(x)
    found = []
    for _ in range(2):
        gc.collect()
        found.append(collections.Counter(type(o).__name__ for o in gc.get_objects()))
        same(call(x), body(x))
    recorded = [graph for graph in graphs() if graph.plans]
    assert recorded[-1].padding is not None, recorded[-1].not_padded
    assert sum(len(plan.graphs) for plans in recorded[-1].plans.values() for plan in plans) == count + 1
    return found[1] - found[0]


# What a layer more may leave: its step is a function, and the emulated device has a finalizer for each graph.
ALLOWED = {"cell": 1, "function": 1, "finalize": 1, "dict": 0, "Geometry": 0}


@pytest.mark.parametrize("kind", ALLOWED)
def test_layers_add_recordings_and_hardly_anything_around_them(kind: str) -> None:
    with torch.no_grad():
        few, many = (tracked_by_a_recording(count)[kind] for count in LAYERS)
    assert many - few <= ALLOWED[kind] * (LAYERS[1] - LAYERS[0]), (few, many)
