"""Padded calls whose inputs and results lie in memory in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import graphs, only_graphs_of_this_test, total
from test_injection import device
from test_padding import SIZES, near, padded
from torch import nn

import sgc_backend

__all__ = ["only_graphs_of_this_test"]

Inputs = Callable[[int, str], tuple[torch.Tensor, ...]]


@torch.library.custom_op("sgc_test::minus_50_", mutates_args=("x",))
def minus_50_(x: torch.Tensor) -> None:
    x.sub_(50)


@minus_50_.register_fake
def _(x: torch.Tensor) -> None:
    return None


def _residual(m: Any, x: torch.Tensor) -> Any:
    return m.b(ops.double(m.a(x))) + x


def _written(m: Any, x: torch.Tensor) -> Any:
    x.mul_(2)
    return m.b(ops.double(m.a(x)))


def _returned(m: Any, x: torch.Tensor) -> Any:
    return x, x[..., 1:, :], m.b(ops.double(m.a(x)))


def _gap(n: int) -> int:
    return 1 + n * 7 % 5


INPUTS: dict[str, Inputs] = {
    "columns of a wider one": lambda n, device: (torch.randn(n, D + 8, device=device)[:, :D],),
    "rows of longer ones": lambda n, device: (torch.randn(3, n + _gap(n), D, device=device)[:, :n],),
    "transposed rows of longer ones": lambda n, device: (torch.randn(D, n + _gap(n), device=device)[:, :n].t(),),
    "beginning anywhere": lambda n, device: (torch.randn(n + 8, D, device=device)[_gap(n) :][:n],),
    "beginning anywhere inside": lambda n, device: (torch.randn(3, n + 8, D, device=device)[:, _gap(n) : _gap(n) + n],),
    "expanded over rows": lambda n, device: (torch.randn(1, D, device=device).expand(n, D),),
    "expanded within rows": lambda n, device: (torch.randn(1, n, D, device=device).expand(3, n, D),),
}


@device
@pytest.mark.parametrize("body", [_residual, _written, _returned], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("inputs", INPUTS)
def test_inputs_may_lie_anywhere(inputs: str, body: Callable[..., Any], device: str) -> None:
    if "expanded" in inputs and body is _written:
        pytest.skip("eager refuses to write there")
    model = Model(body, a=lin(), b=lin()).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            (x,) = INPUTS[inputs](n, device)
            whole = x if "expanded" in inputs else x._base.clone()
            y = whole.as_strided(x.shape, x.stride(), x.storage_offset())
            near(call(x), model(y))
            near(x, y)
    assert all(g.padding is not None for g in graphs()), [g.not_padded for g in graphs()]
    assert total("replayed") >= 8


@device
def test_slices_of_any_width_share_recordings(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return ops.double(x.relu()) * 2, x.t(), x.exp()

    model = Model(body).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in (32, 30, 29, 31, 32):
            for width in (32, 33, 40, 51, 47, 36):
                x = torch.randn(3, width, device=device)[:, :n]
                near(call(x), model(x))
    assert sum(len(g.plans) for g in graphs()) <= 2
    assert total("uncaptured") <= 2


@device
@pytest.mark.parametrize("first", [32, 30])
def test_the_tries_see_what_leaks_across_rows_of_slices(
    first: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = sgc_backend.prefix.PrefixFacts({}, {})
    monkeypatch.setattr(sgc_backend.padding, "prefix_facts", lambda *args: nothing)
    model = Model(lambda m, x: ops.double(x) - x.mean(1, keepdim=True)).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in (first, 32, 30, 29, 31, 32):
            for width in (40, 51, 47, 36):
                x = torch.randn(3, width, device=device)[:, :n]
                near(call(x), model(x))


def _last_row(m: Any, x: torch.Tensor) -> Any:
    return m.b(ops.double(m.a(x)))[-1]


def _last_row_inside(m: Any, x: torch.Tensor) -> Any:
    return m.b(ops.double(m.a(x[None].expand(2, -1, -1))))[:, -1:]


def _last_row_of_memory_that_is_used_again(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    last = h[-1]
    h = ops.double(h)
    for _ in range(3):
        h = ops.double(m.b(m.a(h)).relu())
    return last, h


def _last_row_read_and_returned(m: Any, x: torch.Tensor) -> Any:
    last = m.a(ops.double(x))[-1:]
    return last, m.b(last)


@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize(
    "body",
    [_last_row, _last_row_inside, _last_row_of_memory_that_is_used_again, _last_row_read_and_returned],
    ids=lambda f: f.__name__.strip("_"),
)
def test_the_last_row_is_returned(body: Callable[..., Any], outputs: str, device: str) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = padded(model, outputs=outputs)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(n, D, device=device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert total("replayed") >= 8


def _shifted(m: Any, x: torch.Tensor, ids: torch.Tensor) -> Any:
    ids = ids * 1
    ops.minus_50_(ids)
    return m.b(ops.double(m.a(x))) + m.table(ids)


def _viewed_between_cuts(m: Any, x: torch.Tensor, ids: torch.Tensor) -> Any:
    ids = ids - 50
    h = ops.double(m.a(x))
    ids = ids.unsqueeze(1)
    return m.b(ops.double(h)) + m.table(ids).squeeze(1)


@device
@pytest.mark.parametrize("body", [_shifted, _viewed_between_cuts], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("first", [32, 10])
def test_indices_that_cuts_write_or_view_stay_in_their_table(first: int, body: Callable[..., Any], device: str) -> None:
    model = Model(body, a=lin(), b=lin(), table=nn.Embedding(7, D)).to(device)
    call = padded(model, cut_ops=(*CUTS, "sgc_test::minus_50_"))
    with torch.no_grad():
        for n in [first, 30, *SIZES]:
            x, ids = torch.randn(n, D, device=device), torch.randint(50, 57, (n,), device=device)
            near(call(x, ids), model(x, ids.clone()))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert total("replayed") > 0


def _shares(m: Any, x: torch.Tensor) -> Any:
    h = m.b(ops.double(m.a(x)))
    return h, h[:, 1:], h.transpose(1, 2)


def _shares_as_other_dtypes(m: Any, x: torch.Tensor) -> Any:
    h = m.b(ops.double(m.a(x)))
    pairs = h.view(*h.shape[:-1], D // 2, 2)
    return h, pairs, torch.view_as_complex(pairs), h.view(torch.int32)


@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("body", [_shares, _shares_as_other_dtypes], ids=lambda f: f.__name__.strip("_"))
def test_results_that_share_memory_share_it_at_every_size(body: Callable[..., Any], outputs: str, device: str) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = padded(model, outputs=outputs)
    with torch.no_grad():
        for n in SIZES:
            x = torch.randn(3, n, D, device=device)
            got, wanted = call(x), model(x)
            near(got, wanted)
            got[0][:, 1:].fill_(5)
            wanted[0][:, 1:].fill_(5)
            near(got, wanted)
    assert all(g.padding is not None for g in graphs()), [g.not_padded for g in graphs()]
    assert total("replayed") >= 8
