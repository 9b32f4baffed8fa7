"""Dimensions marked as unbacked are sizes of inputs like others, and checks of them are made at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_constants import targets, traced
from test_injection import device
from torch._dynamo.decorators import mark_unbacked

from sgc_backend.checks import drop_checks_that_hold

__all__ = ["only_graphs_of_this_test"]

CHECK = torch.ops.aten._assert_scalar.default


def marked(*sizes: int, device: str = "cpu", dims: tuple[int, ...] = (0,)) -> torch.Tensor:
    x = torch.randn(sizes, device=device)
    for dim in dims:
        mark_unbacked(x, dim)
    return x


def rowwise(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(ops.double(m.a(x)).relu()) + x


@device
@pytest.mark.parametrize("options", [{"capture_sizes": "auto"}, {"capture_sizes": [4, 8]}, {}], ids=str)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_graph_of_unbacked_sizes_is_recorded_at_each(inner: str, options: Any, device: str) -> None:
    model = Model(rowwise, a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=None, inner=inner, **options)
    with torch.no_grad():
        for n in (4, 8, 4, 8, 4, 8):
            x = marked(n, D, device=device)
            same(call(x), model(x))
    assert len(graphs()) == 1
    assert total("replayed") == 4
    assert {cut.reason.rule for group in graphs()[0].split.cuts for cut in group.cuts} == {"cut_ops"}


@device
def test_sizes_of_zero_and_one_are_of_the_same_graph_where_they_are_unbacked(device: str) -> None:
    model = Model(rowwise, a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=None, capture_sizes="auto")
    with torch.no_grad():
        for n in (1, 7, 0, 1, 7, 1):
            x = marked(n, D, device=device)
            got = call(x)
            assert got.shape == (n, D)
            torch.testing.assert_close(got, model(x))
    assert len(graphs()) == 1
    assert total("replayed") >= 2


@device
@pytest.mark.parametrize("unbacked", [False, True])
def test_sizes_that_depend_on_data_are_cut_beside_those_of_inputs(unbacked: bool, device: str) -> None:
    def body(m: Any, x: torch.Tensor, keep: torch.Tensor) -> Any:
        h = m.a(x)
        chosen = keep[keep > 0]
        return m.b(h), F.relu(chosen) * 2

    model = Model(body, a=lin(), b=lin()).to(device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        call = compiled(model, dynamic=None if unbacked else True)
        for n in (4, 4, 6, 4, 6):
            args = marked(n, D, device=device, dims=(0,) if unbacked else ()), torch.randn(9, device=device)
            for got, wanted in zip(call(*args), model(*args), strict=True):
                same(got, wanted)
    assert len(graphs()) == 1
    assert total("replayed") == 3
    cuts = [cut for group in graphs()[0].split.cuts for cut in group.cuts]
    assert {cut.reason.rule for cut in cuts} == {"data_dependent"}
    assert not any("linear" in cut.name for cut in cuts)


@device
@pytest.mark.parametrize("pad", ["auto", "trust"])
def test_a_check_of_a_size_is_made_at_each_call(pad: str, device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        torch._check(x.shape[0] % 2 == 0)
        return m.b(h.relu())

    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=None, capture_sizes="auto", pad=pad)
    with torch.no_grad():
        for n in (20, 20, 18, 16, 20):
            x = marked(n, D, device=device)
            torch.testing.assert_close(call(x), model(x))
            with pytest.raises(RuntimeError, match=r"Eq|== 0"):
                call(marked(n - 1, D, device=device))  # which the recording for 20 would hold
    assert len(graphs()) == 1
    assert total("replayed") >= 3
    assert [cut.reason.rule for group in graphs()[0].split.cuts for cut in group.cuts] == ["host_check"]


def test_only_checks_that_say_nothing_are_dropped() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(y.shape[0] >= 3)
        return x.sum() + y

    gm = traced(fn, marked(4, D), marked(8))
    assert targets(gm).count(CHECK) == 2
    drop_checks_that_hold(gm)
    assert targets(gm).count(CHECK) == 1
