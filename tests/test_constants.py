"""Constants: tensors of numbers alone are made once, and every call gets copies of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import compiled, graphs, same, total
from test_injection import device
from torch import fx

from sgc_backend.constants import lift_constants


@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_tensors_of_numbers_are_recorded_and_may_be_written(inner: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        rows = torch.tensor([1, 0], device=x.device)
        bias = x.new_tensor([[0.5], [2.0]])
        scale = torch.tensor(3.0, device=x.device)
        h = m.a(x)[rows] + bias
        bias.add_(1)
        h = ops.double(h) * scale
        rows.add_(1)
        return h + bias, rows, scale

    model = Model(fn, a=lin()).to(device)
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for n in (4, 12, 4, 12, 12, 4):
            x = torch.randn(n, D, device=device)
            got = call(x)
            same(got, model(x))
            got[1].add_(5)  # the caller's own
    assert total("replayed") >= 2
    assert not any(graph.counters.failures for graph in graphs())


def traced(fn: Any, *examples: torch.Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []
    torch.compile(fn, backend=lambda gm, _: (found.append(gm), gm)[1])(*examples)
    return found[0]


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op.startswith("call")]


def test_only_numbers_on_the_device_are_lifted() -> None:
    gm = traced(lambda x: (torch.tensor([1.0]) + x, x.new_tensor(2), torch.zeros(3), torch.as_tensor(x)), torch.ones(3))
    lift_constants(gm, "cuda")
    assert torch.tensor in targets(gm)
    lift_constants(gm, "cpu")
    assert torch.tensor not in targets(gm)
    assert targets(gm).count("clone") == 2
    assert torch.zeros in targets(gm)


def test_what_is_made_of_a_size_is_left() -> None:
    gm = traced(lambda x: x + torch.tensor([x.shape[0]]), torch.ones(3))
    torch._dynamo.reset()
    dynamic: list[fx.GraphModule] = []
    torch.compile(
        lambda x: x + torch.tensor([x.shape[0]]), dynamic=True, backend=lambda gm, _: (dynamic.append(gm), gm)[1]
    )(torch.ones(3))
    lift_constants(gm, "cpu")
    before = targets(dynamic[0])
    lift_constants(dynamic[0], "cpu")
    assert targets(dynamic[0]) == before
    x = torch.ones(3)
    assert torch.equal(gm(x)[0], x + 3)
