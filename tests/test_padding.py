"""Any size in few recordings: what a call of n rows gives when it runs in a recording made for more."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import graphs, only_graphs_of_this_test, total
from test_injection import device
from torch import nn

import sgc_backend

__all__ = ["only_graphs_of_this_test"]


@torch.library.custom_op("sgc_test::attend_into", mutates_args=("out",))
def _attend_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.cumsum(0))


@_attend_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


attend_into = torch.ops.sgc_test.attend_into
SIZES = [9, 10, 9, 30, 25, 31, 32, 28, 26, 40, 3, 3, 2, 2, 100, 120, 101, 9, 31]


def padded(model: Any, *, dynamic: bool | None = True, **options: Any) -> Any:
    options = {"inner": "eager", "cut_ops": CUTS, **options}
    return torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=dynamic, options=options)


def near(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, check_stride=True)


def model_of(body: Callable[..., Any], device: str) -> Model:
    return Model(body, a=lin(), b=lin()).to(device)


def _lead(n: int, device: str) -> torch.Tensor:
    return torch.randn(n, D, device=device)


def _inside(n: int, device: str) -> torch.Tensor:
    return torch.randn(3, n, D, device=device)


def _columns(n: int, device: str) -> torch.Tensor:
    return torch.randn(D, n, device=device).t()


def _residual(m: Any, x: torch.Tensor) -> Any:
    return m.b(ops.double(m.a(x)).relu()) + x


def _views_and_shares(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    k = ops.double(h)
    return h, h[..., 1:], k, k[..., :2], (k + 1)[..., 1:, :], x.transpose(-1, -2)


def _contiguous_inside(m: Any, x: torch.Tensor) -> Any:
    h = ops.double(m.a(x).transpose(-1, -2).contiguous())
    return m.b(h.transpose(-1, -2))


def _in_place(m: Any, x: torch.Tensor) -> Any:
    h = m.a(x)
    h.add_(1)
    ops.add_one_(h)
    return h * 2, m.b(h)


def _cut_views(m: Any, x: torch.Tensor) -> Any:
    h = ops.identity(m.a(x)) if hasattr(ops, "identity") else ops.double(m.a(x))
    a, b, c = ops.three(h)
    return m.b(a) + b, c


BODIES = [_residual, _views_and_shares, _contiguous_inside, _in_place, _cut_views]


@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("rows", [_lead, _inside, _columns], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__.strip("_"))
def test_sizes_share_recordings_and_answer_as_eager(body: Any, rows: Any, outputs: str, device: str) -> None:
    model = model_of(body, device)
    call = padded(model, outputs=outputs)
    with torch.no_grad():
        for n in SIZES:
            x = rows(n, device)
            near(call(x), model(x.clone()))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert len(graph.plans) == 6
    assert total("uncaptured") <= 8
    assert not graph.counters.failures


@device
def test_a_bucket_serves_its_smaller_sizes_without_being_recorded_again(device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model)
    with torch.no_grad():
        for n in (32, 32, *random.Random(0).sample(range(29, 33), 4)):
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert {k: sum(p.runs for p in plans) for k, plans in graph.plans.items()} == {(32,): 5}
    assert graph.counters.captured == {(32,): 1}


@device
def test_cuts_see_the_real_rows_alone(device: str) -> None:
    seen: list[tuple[Any, Any]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(x.shape), x.stride()))
        return x * 2

    torch._dynamo.allow_in_graph(look)
    model = model_of(lambda m, x: m.b(look(m.a(x).transpose(1, 2).contiguous()).transpose(1, 2)), device)
    call = padded(model, cut_ops=[look])
    with torch.no_grad():
        for n in SIZES:
            x = _inside(n, device)
            seen.clear()
            near(call(x), x.new_tensor(0) + model(x))
            assert seen[0] == seen[-1] == ((3, D, n), (D * n, n, 1))


@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_result_that_a_cut_is_to_fill_is_not_compared(inner: str, device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        out = torch.empty_like(h)
        attend_into(h, out.view(h.shape))
        return m.b(out)

    model = model_of(body, device)
    call = padded(model, cut_ops=["sgc_test::attend_into"], inner=inner)
    with torch.no_grad():
        for n in SIZES:
            garbage = torch.full((n, D), float(n), device=device)  # what the allocator hands out next
            del garbage
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert [g.kind for g in graph.split.groups] == ["piece", "cut", "piece"]


@device
def test_rows_that_are_written_in_place_come_back_to_the_caller(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        x.mul_(2)
        h = ops.double(m.a(x))
        x.add_(h)
        return m.b(h)

    model = model_of(body, device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            whole = torch.randn(n + 4, D, device=device)
            x, y = whole[:n], whole.clone()[:n]
            rest = whole[n:].clone()
            near(call(x), model(y))
            near(x, y)
            near(whole[n:], rest)


@device
def test_integers_behind_the_real_rows_stay_in_their_table(device: str) -> None:
    table = nn.Embedding(7, D)
    model = Model(lambda m, ids: m.a(ops.double(m.table(ids))), a=lin(), table=table).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            ids = torch.randint(0, 7, (n,), device=device)
            near(call(ids), model(ids))
            # Recordings share the pool: whatever this one leaves there must not be taken for an index.
            other = torch.randn(64, D, device=device) * 1e9
            call(torch.full((n,), 6, device=device))
            del other
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert total("replayed") > 0


LEAKS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mean": lambda m, x: m.b(ops.double(m.a(x))) - x.mean(0),
    "softmax": lambda m, x: m.b(ops.double(m.a(x))).softmax(0),
    "last row": lambda m, x: m.b(ops.double(m.a(x)))[-1] + 1,
    "flip": lambda m, x: ops.double(m.a(x)).flip(0) + 1,
    "size as value": lambda m, x: m.b(ops.double(m.a(x))) / x.shape[0],
    "scores": lambda m, x: (ops.double(m.a(x)) @ x.t()) @ x,
    "norm over all": lambda m, x: ops.double(m.a(x)) / x.norm(),
    "rolled": lambda m, x: ops.double(m.a(x)).roll(1, 0) * 2,
    "reversed scan": lambda m, x: ops.double(m.a(x)).flip(0).cumsum(0).flip(0),
    "row behind": lambda m, x: torch.nn.functional.pad(ops.double(m.a(x)), (0, 0, 0, 1))[1:] + x,
    "batch merged inside": lambda m, x: ops.double(m.a(x)).t().reshape(-1)[: x.shape[0]] + 1,
    "interleaved": lambda m, x: torch.cat([ops.double(m.a(x)), x]) + 1,
    "last one by index": lambda m, x: ops.double(m.a(x)).index_select(
        0, torch.tensor([x.shape[0] - 1], device=x.device)
    ),
    "linspace": lambda m, x: ops.double(m.a(x)) + torch.linspace(0, 1, x.shape[0], device=x.device)[:, None],
    "sorted": lambda m, x: ops.double(m.a(x)).sort(0).values,
    "counts rows": lambda m, x: ops.double(m.a(x)) + torch.ones_like(x).sum(),
}


@device
@pytest.mark.parametrize("leak", LEAKS)
def test_what_leaks_across_rows_is_right_all_the_same(leak: str, device: str) -> None:
    model = model_of(LEAKS[leak], device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            x = _lead(n, device)
            near(call(x), model(x))


@device
@pytest.mark.parametrize("leak", LEAKS)
def test_the_tries_alone_see_what_leaks_across_rows(leak: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = sgc_backend.prefix.PrefixFacts({}, {})
    monkeypatch.setattr(sgc_backend.padding, "prefix_facts", lambda *args: nothing)
    model = model_of(LEAKS[leak], device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            x = _lead(n, device)
            near(call(x), model(x))


@device
def test_a_cache_is_written_by_the_real_rows_alone(device: str) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = lin()
            self.register_buffer("cache", torch.zeros(256, D))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            self.cache.index_copy_(0, slots, h)
            self.cache[: x.shape[0]] += 1
            return ops.double(h) + 1

    model, reference = Cached().to(device), Cached().to(device)
    reference.load_state_dict(model.state_dict())
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            x, slots = _lead(n, device), torch.randperm(256, device=device)[:n]
            near(call(x, slots), reference(x, slots))
            near(model.cache, reference.cache)


@device
def test_an_index_made_of_positions_does_not_leave_its_table(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        places = torch.arange(x.shape[0], device=x.device)
        return m.a(ops.double(x) + m.table(places))

    model = Model(body, a=lin(), table=nn.Embedding(31, D)).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in [n for n in SIZES if n <= 31] * 2:
            x = _lead(n, device)
            near(call(x), model(x))


@device
def test_an_index_made_of_floating_point_numbers_does_not_leave_its_table(device: str) -> None:
    model = Model(
        lambda m, x: m.a(ops.double(x)) + m.table((x[:, 0].sigmoid() * 6).long()), a=lin(), table=nn.Embedding(7, D)
    ).to(device)
    call = padded(model)
    with torch.no_grad():
        for n in SIZES:
            x = _lead(n, device)
            near(call(x), model(x))


@device
def test_conditions_of_the_graph_hold_in_every_bucket(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        if x.shape[0] % 3 == 0:
            return m.a(ops.double(x)) + 1
        return m.b(ops.double(x)) - 1

    model = model_of(body, device)
    call = padded(model)
    with torch.no_grad():
        for n in [*SIZES, 27, 33, 30, 29]:
            x = _lead(n, device)
            near(call(x), model(x))


@device
def test_floats_shape_conditions_and_sizes(device: str) -> None:
    def body(m: Any, x: torch.Tensor, factor: float) -> Any:
        h = m.b(ops.double(m.a(x))) * factor
        if x.shape[0] * factor > 20.5:
            h = h + 1
        return h, h[: int(x.shape[0] * factor)] * 2, h[: int(x.shape[0] * 0.75)]

    model = model_of(body, device)
    call = padded(model)
    with torch.no_grad():
        for n, factor in zip(SIZES * 2, [0.5, 0.75, 0.5, 1.0] * len(SIZES), strict=False):
            x = _lead(n, device)
            near(call(x, factor), model(x, factor))
    assert all(g.padding is not None for g in graphs() if g.padding or g.not_padded != "no dimension is dynamic")
    assert total("replayed") > 0


@device
def test_two_dynamic_dimensions_are_rounded_up_each(device: str) -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        return m.b(ops.double(m.a(x)).relu()) + x

    model = model_of(body, device)
    call = padded(model)
    order = [(2, 9), (3, 10), (3, 9), (2, 10), (5, 30), (5, 31), (5, 29), (11, 30), (12, 32), (11, 29)] * 2
    with torch.no_grad():
        for b, s in order:
            x = torch.randn(b, s, D, device=device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.padding is not None, graph.not_padded
    assert len(graph.plans) <= 4
    assert total("replayed") >= 12


@device
@pytest.mark.parametrize("dynamic", [None, True])
def test_lengths_of_zero_and_one_are_answered(dynamic: bool | None, device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model, dynamic=dynamic)
    with torch.no_grad():
        for n in [5, 1, 0, 7, 1, 0, 6, 1, 1, 3, 0]:
            x = _lead(n, device)
            near(call(x), model(x))
    assert sum(len(g.plans) for g in graphs() if hasattr(g, "plans")) <= 6


@device
def test_padding_that_the_user_vouches_for_is_not_tried(device: str) -> None:
    calls = 0

    def body(m: Any, x: torch.Tensor) -> Any:
        nonlocal calls
        return m.b(ops.double(m.a(x)))

    model = model_of(body, device)
    call = padded(model, pad="trust")
    with torch.no_grad():
        for n in SIZES:
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.padding is not None
    assert graph.padding.trusted


@device
def test_never_padding_records_the_ladders_sizes_alone(device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model, pad="never", capture_sizes=[10, 32])
    with torch.no_grad():
        for n in SIZES:
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.counters.uncaptured["not a capture size"] == sum(n not in (10, 32) for n in SIZES)
    assert 'not padded: pad="never"' in str(sgc_backend.explain(call, _lead(10, device)))


@device
def test_where_sizes_are_listed_nothing_is_cut_for_padding(device: str) -> None:
    model = model_of(lambda m, x: m.b(ops.double(m.a(x))) - x.mean(0), device)
    call = padded(model, capture_sizes=[10, 32])
    with torch.no_grad():
        for n in SIZES * 2:
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert [cut.name for g in graph.split.cuts for cut in g.cuts] == ["double"]
    assert set(graph.plans) == {(10,), (32,)}
    assert "nothing is cut for it where capture_sizes is a list" in graph.not_padded
    assert "aten::mean" in graph.not_padded


@device
def test_a_graph_whose_static_inputs_alone_are_dynamic_says_so(device: str) -> None:
    model = model_of(lambda m, x: m.b(m.a(x)), device)
    call = padded(model)
    x = _lead(32, device)
    torch._dynamo.mark_static_address(x)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        for _ in range(3):
            near(call(x), model(x))
    (graph,) = graphs()
    assert graph.not_padded == "static inputs alone have dynamic dimensions, and are read where they are"
