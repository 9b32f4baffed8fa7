"""Sizes that come and go: rows of garbage, odd sizes, 0 and 1, several dynamic dimensions; reported cases by id."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aliasing import calls_as_eager
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module

import sgc_backend
from sgc_backend import FullCudaGraphBackend, OptionError, TcPiecewiseCudaGraphBackend

__all__ = ["only_graphs_of_this_test"]

gpu = pytest.mark.gpu


def recordings() -> int:
    return sum(len(g.plans) for g in graphs())


# -- garbage in rows that nobody asked for -----------------------------------------------------------------------------


def _quantised(m: Any, x: torch.Tensor) -> Any:
    scale = x.abs().max()
    return m.a(x / scale) * scale, (x / scale).round()


def _centred(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x) - x.mean(0)) + ops.double(x).sum(0)


def _softmax_over_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x).softmax(0) @ m.b.weight


def _norm_over_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(m.a(x), None, None, training=True) + ops.double(x)


def _row_wise(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(ops.double(m.a(x)).relu())


def _scan(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x.cumsum(0)) + ops.double(x).cummax(0).values


def _size_as_a_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x) / x.shape[0] + torch.arange(x.shape[0], device=x.device)[:, None]


def _last_row(m: Any, x: torch.Tensor) -> Any:
    return m.a(x)[-1], x.flip(0) * 2, x.roll(1, 0) + 1


def _sorted(m: Any, x: torch.Tensor) -> Any:
    return m.a(x).sort(0).values, x.argmax(0), x.std(0)


def _attends(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(m.a(x)[None, None], m.b(x)[None, None], x[None, None])[0, 0]


CROSS_ROW = [
    _quantised,
    _centred,
    _softmax_over_rows,
    _norm_over_rows,
    _row_wise,
    _scan,
    _size_as_a_value,
    _last_row,
    _sorted,
    _attends,
]


# DS01
@device
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("body", CROSS_ROW, ids=lambda f: f.__name__.strip("_"))
def test_garbage_in_rows_of_an_earlier_larger_call_reaches_no_later_call(body: Any, poison: float, device: str) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, capture_sizes=[5, 8, 16])
    with torch.no_grad():
        for n in (16, 16, 5, 5, 16, 7, 5, 8, 8, 16, 8, 5, 7):
            x = torch.randn(16, D, device=device)
            if n == 16:
                x[5:] = poison
            torch.testing.assert_close(call(x[:n]), model(x[:n]), equal_nan=True)
            if n == 16:
                continue
            first = call(x[:n])
            assert all(torch.isfinite(t).all() for t in (first if isinstance(first, tuple) else (first,)))
    assert total("replayed") > 5


# -- the sizes that were asked for, and no others ----------------------------------------------------------------------


# DS03
@device
def test_exactly_the_sizes_that_were_asked_for_are_captured(device: str) -> None:
    model = Model(_row_wise, a=lin(), b=lin()).to(device)
    call = compiled(model, capture_sizes=[300, 4, 1, 2, 4, 300], pad="never")
    asked, others = (2, 4, 300), (3, 5, 288, 289, 299, 301, 512)
    with torch.no_grad():
        for n in (*asked, *others) * 3:
            x = torch.randn(n, D, device=device)
            same(call(x), model(x))
    (graph,) = graphs()
    assert set(graph.plans) == {(n,) for n in asked}
    assert dict(graph.counters.replayed) == {(n,): 2 for n in asked}
    # What ran uncaptured, and why, can be asked for.
    assert graph.counters.uncaptured["not a capture size"] == 3 * len(others)
    told = sgc_backend.stats()[graph.name]
    assert told["replayed"] == {str(n): 2 for n in asked}
    assert told["uncaptured"]["not a capture size"] == 3 * len(others)


# DS03
@pytest.mark.parametrize("sizes", [[1, 0], [4, -300], [True], [2.0], ["4"], [None], []])
def test_sizes_that_are_none_are_refused_whole(sizes: list[Any]) -> None:
    model = Model(_row_wise, a=lin(), b=lin())
    with torch.no_grad(), pytest.raises(OptionError, match="capture_sizes"):
        compiled(model, capture_sizes=sizes)(torch.randn(4, D))
    assert not graphs()


# DS03
@device
def test_without_padding_the_automatic_ladder_captures_its_own_sizes_and_runs_the_rest_as_they_are(device: str) -> None:
    model = Model(_row_wise, a=lin(), b=lin()).to(device)
    call = compiled(model, capture_sizes="auto", pad="never")
    on, off = (7, 16, 28, 320), (9, 17, 300, 8193)
    with torch.no_grad():
        for n in (*on, *off) * 3:
            x = torch.randn(n, D, device=device)
            same(call(x), model(x))
    (graph,) = graphs()
    assert set(graph.plans) == {(n,) for n in on}


# DS03
@device
def test_a_wrapper_runs_the_keys_that_were_captured_and_names_them_for_others(device: str) -> None:
    layer = lin().to(device)
    x = torch.randn(512, D, device=device)
    backend = FullCudaGraphBackend(module(device))
    with torch.no_grad(), backend.capture_session():
        for n in (300, 4, 2, 1):
            backend.capture_one(n, lambda n=n: layer(x[:n]))
    assert [n for n in (1, 2, 3, 4, 288, 289, 299, 300, 301) if backend.can_run(n)] == [1, 2, 4, 300]
    with pytest.raises(sgc_backend.NotCapturedError, match="recorded: 300, 4, 2, 1"):
        backend.replay(299)
    with torch.no_grad():
        for n in (1, 300, 2, 4):
            torch.testing.assert_close(backend.replay(n), layer(x[:n]))
    backend.cleanup()


# -- sizes 0 and 1 -----------------------------------------------------------------------------------------------------


def _broadcasts(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x + x.sum(0, keepdim=True)) * ops.double(x)[:, :1]


def _broadcasts_two(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.a(x)[:, None] * x[None, :, :1]


def _concatenates(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([m.a(x), ops.double(x), x[:1]])


SIZE_ORDERS = [(1, 2, 4, 8), (4, 1, 2, 0), (0, 3), (1, 0, 1, 5), (2, 1), (0, 1, 0, 2, 1)]


# DS05
@device
@pytest.mark.parametrize("dynamic", [None, True, False, "marked"])
@pytest.mark.parametrize("body", [_broadcasts, _broadcasts_two, _concatenates], ids=lambda f: f.__name__.strip("_"))
def test_sizes_in_any_order_are_right_and_compile_a_bounded_number_of_times(
    body: Any, dynamic: Any, device: str
) -> None:
    model = Model(body, a=lin()).to(device)
    for order in SIZE_ORDERS:
        torch._dynamo.reset()
        before = len(graphs())
        call = compiled(model, dynamic=None if dynamic == "marked" else dynamic)
        with torch.no_grad():
            for n in order * 3:
                x = torch.randn(n, D, device=device)
                if dynamic == "marked" and n > 1:
                    torch._dynamo.mark_dynamic(x, 0)
                got, wanted = call(x), model(x)
                same(got, wanted)
                assert got.shape == wanted.shape
        # One graph each for the sizes 0 and 1, which Dynamo specialises, one for the first size, and one for all.
        assert len(graphs()) - before <= (len(set(order)) if dynamic is False else 4)
    assert total("replayed") > 0


# DS05
@device
def test_the_first_size_may_be_any(device: str) -> None:
    for first in (0, 1, 2, 7):
        torch._dynamo.reset()
        model = Model(_row_wise, a=lin(), b=lin()).to(device)
        call = compiled(model, dynamic=None)
        calls_as_eager(call, model, lambda k, first=first: (torch.randn((first, 3, 6)[k % 3], D, device=device),), 9)


# -- several dynamic dimensions ----------------------------------------------------------------------------------------


def _per_position(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(ops.double(m.a(x))) + x.mean(1, keepdim=True)


def _flattened(m: Any, x: torch.Tensor) -> torch.Tensor:
    b, s, d = x.shape
    h = m.a(x.reshape(b * s, d))
    return ops.double(h).view(s, b, d).transpose(0, 1) * s


def _one_more(m: Any, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (0, 0, 1, 0))
    h = ops.double(m.a(padded))
    return h[:, 1:] + h[:, :-1].flip(1)


def _transposed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.double(m.a(x)).transpose(0, 1).contiguous().view(-1, D).cumsum(0)


DIMENSIONS = [(2, 8), (2, 16), (4, 8), (8, 2), (16, 2), (4, 4), (8, 4)]


# DS06
@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "body", [_per_position, _flattened, _one_more, _transposed], ids=lambda f: f.__name__.strip("_")
)
def test_every_combination_of_two_dimensions_is_its_own_key(body: Any, inner: str, device: str) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for b, s in DIMENSIONS * 3 + DIMENSIONS[::-1]:
            x = torch.randn(b, s, D, device=device)
            torch.testing.assert_close(call(x), model(x))
    (graph,) = graphs()
    assert {tuple(sorted(k)) for k in graph.plans} == {tuple(sorted(d)) for d in DIMENSIONS}
    assert len(graph.plans) == len(DIMENSIONS)
    assert sum(graph.counters.replayed.values()) == 3 * len(DIMENSIONS)


def _class_token(m: Any, x: torch.Tensor) -> torch.Tensor:
    tokens = torch.cat([m.cache[:1].expand(x.shape[0], 1, D), x], 1)
    h = m.a(ops.double(tokens)) + tokens
    return m.b(ops.double(h))[:, 1:] * h.shape[1]


def _padded_behind(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = ops.double(m.a(F.pad(x, (0, 0, 0, 3))))
    return m.b(ops.double(h)[:, : x.shape[1]])


def _pooled(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = ops.double(F.avg_pool1d(m.a(x).transpose(1, 2), 2))  # half as long, rounded down
    return m.b(h.transpose(1, 2)).repeat(1, 2, 1) * 2


def _multiplied(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = ops.double(m.a(x).reshape(x.shape[0] * x.shape[1], D))
    g = ops.double(h.repeat_interleave(2, 0) + 1)
    return m.b(g[::2]).view(x.shape) - x


def _scores(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = ops.double(m.a(x) @ F.pad(x, (0, 0, 0, 1)).transpose(1, 2))
    return ops.double(scores.softmax(-1))[..., :-1] @ m.b(x)


# DS06
@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    "body",
    [_class_token, _padded_behind, _pooled, _multiplied, _scores, _one_more],
    ids=lambda f: f.__name__.strip("_"),
)
def test_pieces_whose_inputs_show_no_size_by_itself_are_compiled_for_all_sizes(
    body: Any, inner: str, device: str
) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for b, s in [(2, 8), (2, 16), (4, 8), (3, 5)] * 3:
            x = torch.randn(b, s, D, device=device)
            torch.testing.assert_close(call(x), model(x))
    assert len(graphs()) == 1 or body is _pooled  # torch 2.11 itself takes odd lengths apart there
    assert total("replayed") == 8
    assert not any(graph.counters.failures for graph in graphs())


# DS06
@device
def test_two_inputs_with_sizes_of_their_own(device: str) -> None:
    def fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = ops.double(m.a(x))
        scores = h @ m.b(y).t()
        both = torch.cat([x, y])
        return ops.double(scores).softmax(1) @ y, m.a(both), both.shape[0], scores.reshape(-1).cumsum(0)

    model = Model(fn, a=lin(), b=lin()).to(device)
    call = compiled(model)
    pairs = [*itertools.permutations((2, 3, 6), 2), (4, 4), (12, 3)]
    order = pairs * 3 + pairs[::-1]
    calls_as_eager(call, model, lambda k: tuple(torch.randn(n, D, device=device) for n in order[k]), len(order))
    assert total("replayed") > len(pairs)


# DS06
@device
def test_a_size_and_a_number_of_the_same_value_are_told_apart(device: str) -> None:
    model = Model(lambda m, x, k: ops.double(m.a(x))[:k] * k + x.shape[0], a=lin()).to(device)
    call = compiled(model)
    order = [(4, 3), (3, 3), (3, 2), (4, 4), (4, 2), (5, 3)] * 3
    calls_as_eager(call, model, lambda k: (torch.randn(order[k][0], D, device=device), order[k][1]), len(order))
    assert total("replayed") > 0


# DS06
def test_sizes_listed_are_asked_of_every_dynamic_dimension() -> None:
    model = Model(_per_position, a=lin(), b=lin())
    call = compiled(model, capture_sizes=[4, 8])
    with torch.no_grad():
        for b, s in [(4, 8), (8, 4), (4, 5), (5, 4), (4, 4)] * 3:
            x = torch.randn(b, s, D)
            same(call(x), model(x))
    (graph,) = graphs()
    assert len(graph.plans) == 3
    assert graph.counters.uncaptured["not a capture size"] == 6


# -- more shapes than Dynamo compiles ----------------------------------------------------------------------------------


# DS08
@device
@pytest.mark.parametrize("limit", [2, 8])
def test_beyond_dynamos_limit_results_are_right_and_earlier_sizes_still_replay(limit: int, device: str) -> None:
    model = Model(_row_wise, a=lin(), b=lin()).to(device)
    sizes = range(3, 15)
    with torch._dynamo.config.patch(recompile_limit=limit), torch.no_grad():
        call = compiled(model, dynamic=False)
        for _ in range(3):
            for n in sizes:
                x = torch.randn(n, D, device=device)
                same(call(x), model(x))
        assert len(graphs()) == limit
        first = graphs()[0] if device == "cpu" else min(graphs(), key=lambda g: int(g.name.split()[-1]))
        before = total("replayed")
        x = torch.randn(3, D, device=device)
        same(call(x), model(x))
        assert total("replayed") == before + 1
        assert first is not None
        assert all(sum(g.counters.replayed.values()) >= 2 for g in graphs())


# DS08
@device
def test_many_sizes_of_one_dynamic_graph_need_no_more_compilations_and_bounded_recordings(device: str) -> None:
    model = Model(_row_wise, a=lin(), b=lin()).to(device)
    call = compiled(model, max_recordings=6)
    with torch.no_grad():
        for n in [*range(2, 60), *range(2, 60)]:
            x = torch.randn(n, D, device=device)
            same(call(x), model(x))
    assert len(graphs()) == 1
    assert recordings() == 6
    (graph,) = graphs()
    assert graph.counters.uncaptured["max_recordings reached"] > 40


# DS08
def test_graphs_that_dynamo_compiles_over_and_over_do_not_share_a_bound_but_die_with_their_code() -> None:
    with torch.no_grad():
        for k in range(20):
            torch._dynamo.reset()
            model = Model(_row_wise, a=lin(), b=lin())
            call = compiled(model, dynamic=False)
            for _ in range(3):
                x = torch.randn(4 + k, D)
                same(call(x), model(x))
            assert recordings() == 1


# DS08
@device
def test_sizes_that_a_wrapper_compiles_are_one_graph(device: str) -> None:
    model = Model(_row_wise, a=lin(), b=lin()).to(device)
    x = torch.randn(65, D, device=device)
    backend = TcPiecewiseCudaGraphBackend(
        model,
        capture_sizes=range(1, 13),
        options={"inner": "eager", "cut_ops": CUTS},
        device_module=module(device),
    )
    keys: list[Callable[[], Any]] = []
    with torch.no_grad(), backend.capture_session():
        for n in range(12, 1, -1):
            keys.append(lambda n=n: backend.compiled(x[:n]))
            backend.capture_one(n, keys[-1])
    assert len(graphs()) == 1
    with torch.no_grad():
        for n in (2, 12, 7, 3):
            x.copy_(torch.randn(65, D))
            same(backend.replay(n), model(x[:n]))
    backend.cleanup()
