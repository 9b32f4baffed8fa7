"""Calls that are easy to get silently wrong: aliases, writes, data-dependent sizes, keys, threads, failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from torch.testing._internal.two_tensor import TwoTensor

import sgc_backend

__all__ = ["only_graphs_of_this_test"]


@torch.library.custom_op("sgc_test::write_rows_", mutates_args=("x",))
def write_rows_(x: torch.Tensor, i: torch.Tensor) -> None:
    x[i] = 7


@write_rows_.register_fake
def _(x: torch.Tensor, i: torch.Tensor) -> None:
    return None


@torch.library.custom_op("sgc_test::raise_if", mutates_args=())
def raise_if(x: torch.Tensor) -> torch.Tensor:
    if RAISE:
        raise LookupError("from the cut")
    return x.clone()


@raise_if.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


RAISE: list[int] = []


def x_like(n: int = 4) -> torch.Tensor:
    return torch.randn(n, D)


@pytest.fixture
def unbacked() -> Any:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


# -- sizes that depend on data -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unbacked")
@pytest.mark.parametrize(
    "view",
    [lambda h, k: h[:k], lambda h, k: h.narrow(0, 0, k), lambda h, k: h[:k] * 2, lambda h, k: h.split([k, 4 - k])[1]],
)
def test_a_view_whose_size_depends_on_data_has_this_calls_size(view: Callable[..., Any]) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        k = (x[:, 0] > 0).sum().item()
        torch._check(k >= 0)
        torch._check(k <= 4)
        return view(h, k)

    model = Model(fn, a=lin())
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        held = []
        for k in (3, 1, 4, 2, 3, 1):
            x = x_like().abs() * torch.tensor([1.0 if row < k else -1.0 for row in range(4)])[:, None]
            got, expected = call(x), model(x)
            same(got, expected)
            held.append((got, expected))
        for got, expected in held:
            same(got, expected)


@pytest.mark.usefixtures("unbacked")
def test_a_write_at_places_that_depend_on_data_reaches_later_pieces() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        torch.ops.sgc_test.write_rows_(x, torch.nonzero(x[:, 0] > 0).squeeze(1))
        return h + m.b(x)

    model = Model(fn, a=lin(), b=lin())
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(5):
            x = x_like()
            x2 = x.clone()
            same(call(x), model(x2))
            same(x, x2)


# -- memory that is shared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "dynamic"), [("aot_eager", True), ("aot_eager", None), ("aot_eager", False), ("inductor", True)]
)
def test_compilers_take_a_piece_that_writes_one_of_two_overlapping_inputs(inner: str, dynamic: bool | None) -> None:
    call = compiled(lambda x, y: (y.zero_(), x + 1)[1], inner=inner, dynamic=dynamic)
    with torch.no_grad():
        for n in (4, 4, 5, 6, 4):
            base = torch.randn(n + 1, D)
            expected = torch.cat([base[:1] + 1, torch.ones(n - 1, D)])
            same(call(base[:n], base[1:]), expected)
            same(base[1:], torch.zeros(n, D))


def test_an_input_that_only_a_cut_writes_may_overlap_another() -> None:
    model = Model(lambda m, x, y: (ops.add_one_(x), m.a(y))[1], a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            call(x_like(), x_like())
        for _ in range(3):
            b = x_like()
            b2 = b.clone()
            same(call(b, b[:]), model(b2, b2[:]))
            same(b, b2)
        first, second = x_like(), x_like()
        call(first, second)
        before = total("replayed")
        same(call(second, first), model(second.clone(), first))
        assert total("replayed") == before + 1  # distinct tensors replay, in whatever roles they come


def test_inputs_over_two_storages_of_the_same_bytes() -> None:
    numpy = pytest.importorskip("numpy")
    call = compiled(lambda x, y: (x.add_(1), y * 2)[1])
    with torch.no_grad():
        for _ in range(4):
            n = numpy.random.randn(6, 8).astype("float32")
            n2 = n.copy()
            got = call(torch.from_numpy(n[:5]), torch.from_numpy(n[1:]))
            x2, y2 = torch.from_numpy(n2[:5]), torch.from_numpy(n2[1:])
            x2.add_(1)
            same(got, y2 * 2)


def test_a_static_output_may_be_an_input_of_the_next_replay() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    first = compiled(model, outputs="static")
    second = compiled(lambda z, y: z * 2 + y)
    through_cut = Model(lambda m, z, y: m.a(z) + ops.double(y), a=lin())
    cut = compiled(through_cut)
    with torch.no_grad():
        for _ in range(4):
            x, z = x_like(), x_like()
            a = first(x)
            expected = a.clone()
            same(second(z, a), z * 2 + expected)
            a = first(x)
            expected = a.clone()
            same(cut(z, a), through_cut(z, expected))


def test_a_replayed_decode_output_may_be_an_input() -> None:
    decode = sgc_backend.FullCudaGraphBackend()
    x = torch.randn(64, D)
    with decode.capture_session():
        decode.capture_one(64, lambda: x * 3)
    call = compiled(lambda z, y: z * 2 + y)
    with torch.no_grad():
        for _ in range(4):
            z = torch.randn(64, D)
            same(call(z, decode.replay(64)), z * 2 + x * 3)


def test_outputs_that_alias_each_other_through_a_cut_still_do() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        y = ops.double(h)
        v = h[1:]
        return h, v, ops.double(v), y

    model = Model(fn, a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            got, expected = call(x), model(x)
            same(got, expected)
            got[0].fill_(5)
            assert (got[1] == 5).all()


def test_views_of_the_callers_tensor_stay_views_of_it() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        v = x[1:]
        y = ops.double(x)
        return v, y[1:] + v + 1, x[:2], x

    call = compiled(Model(fn))
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            v, w, head, whole = call(x)
            same((v, w), (x[1:], x[1:] * 3 + 1))
            assert v.data_ptr() == x[1:].data_ptr()
            assert head.data_ptr() == x.data_ptr() == whole.data_ptr()


def test_as_strided_reaches_the_bytes_around_its_input() -> None:
    call = compiled(lambda x: x.as_strided((6,), (1,)) + 1)
    with torch.no_grad():
        for _ in range(4):
            b = torch.randn(8)
            same(call(b[::2]), b[:6] + 1)
    assert total("replayed") == 3


library = torch.library.Library("sgc_test_views", "DEF")
library.define("rest(Tensor(a) x) -> Tensor(a)")
library.define("pair(Tensor x) -> (Tensor, Tensor)")
library.define("part(Tensor x) -> Tensor")
for name, body in (
    ("rest", lambda x: x[1:]),
    ("pair", lambda x: (whole := x * 0.5, whole[1:])),
    ("part", lambda x: (x * 0.5)[1:]),
):
    library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sgc_test_views::{name}", body, lib=library)
views = torch.ops.sgc_test_views


def _behind_a_view_of_a_buffer(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = m.cache[8:]
    return a + v.as_strided((4, D), (D, 1), 2 * D)


def _behind_a_view_of_a_buffer_without_an_offset(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = m.cache.select(1, 2)
    return a, v.as_strided((64, 2), (D, 1))


def _into_a_cut_behind_it(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = m.cache[8:]
    return a + ops.double(v.as_strided((4, D), (D, 1), D))


def _written(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = m.cache[8:]
    v.as_strided((4, D), (D, 1), D).add_(1)
    return a, m.cache + 0


def _returned(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = m.cache[8:]
    return a, v.as_strided((4, D), (D, 1), D)


def _around_a_view_of_an_argument(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    v = x[1:]
    return a, v.as_strided((2, D), (D, 1), 0) + 0


def _around_a_written_argument(m: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    return x.as_strided((4, D), (D, 1), 0) + 0


def _around_a_returned_argument(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    return a, x.as_strided((4, D), (D, 1), 0), x


def _around_a_cuts_view(m: Any, x: torch.Tensor) -> Any:
    a = x + 1
    return views.rest(a[1:]).as_strided((2, D), (D, 1), 0) + 1


def _around_a_part_of_a_cuts_result(m: Any, x: torch.Tensor) -> Any:
    _, b = views.pair(x)
    return b.as_strided((2, D), (D, 1), 0) + 1


def _around_the_only_part_of_a_cuts_result(m: Any, x: torch.Tensor) -> Any:
    return views.part(x).as_strided((2, D), (D, 1), 0) + 1


REACHING = (
    _behind_a_view_of_a_buffer,
    _behind_a_view_of_a_buffer_without_an_offset,
    _into_a_cut_behind_it,
    _written,
    _returned,
    _around_a_view_of_an_argument,
    _around_a_written_argument,
    _around_a_returned_argument,
    _around_a_cuts_view,
    _around_a_part_of_a_cuts_result,
    _around_the_only_part_of_a_cuts_result,
)

COPIED = (
    _around_a_view_of_an_argument,
    _around_a_written_argument,
    _around_a_returned_argument,
    _around_a_part_of_a_cuts_result,
    _around_the_only_part_of_a_cuts_result,
)


@pytest.mark.parametrize("body", REACHING, ids=lambda f: f.__name__.strip("_"))
def test_as_strided_reaches_around_a_view_as_in_eager(body: Callable[..., Any]) -> None:
    eager, model = Model(body), Model(body)
    call = compiled(model, dynamic=False, cut_ops=(*CUTS, *(f"sgc_test_views::{n}" for n in ("rest", "pair", "part"))))
    with torch.no_grad():
        for m in (eager, model):
            m.cache.copy_(torch.arange(64 * D).view(64, D))
        for _ in range(4):
            base = torch.randn(8, D)
            ours = base.clone()
            got, expected = call(ours[2:6]), eager(base[2:6])
            same(got, expected)
            same((ours, model.cache), (base, eager.cache))
    # What the recordings have a copy of can't be reached around there.
    assert total("replayed") == (0 if body in COPIED else 3)


def test_a_cuts_view_of_one_row_may_have_another_stride_over_rows() -> None:
    # What sort gives over one row of stride 1 has that stride in eager, and may have another in a recording.
    model = Model(lambda m, x: views.rest(x.sort(-1).values.t()) + 1)
    call = compiled(model, dynamic=False, cut_ops=("sgc_test_views::rest",))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(D, 1).t()
            same(call(x), model(x))
    assert total("replayed") == 3


def test_a_write_around_a_static_input_reaches_an_argument_beside_it() -> None:
    def fn(part: torch.Tensor, x: torch.Tensor) -> Any:
        a = part + 1
        around = part.as_strided((2, D), (D, 1), 0)
        around.add_(1)
        return a, x * 2, around

    memory = torch.zeros(8, D)
    torch._dynamo.mark_static_address(part := memory[4:])
    call = compiled(fn, dynamic=False)
    with torch.no_grad():
        for step in range(1, 5):
            same(call(part, memory[:2])[1], torch.full((2, D), 2.0 * step))
            _, x, around = call(part, torch.ones(2, D))
            same(x, torch.full((2, D), 2.0))
            assert around.data_ptr() == memory.data_ptr()
            memory[:2] -= 1
    assert total("replayed") > 0


def test_a_view_made_by_a_piece_of_a_view_made_by_a_cut_lies_in_the_callers_tensor() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        v, w = x[1:], m.cache[1:]
        ops.add_one_(m.counter)  # the views above are made with this cut, those below in a piece
        return m.a(x) + m.cache[:4], v[1:], w[1:]

    model = Model(fn, a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            _, v, w = call(x)
            assert v.data_ptr() == x[2:].data_ptr()
            assert w.data_ptr() == model.cache[2:].data_ptr()
    assert total("replayed") == 3


def test_a_detached_view_of_a_parameter_carries_no_gradient() -> None:
    model = Model(lambda m, x: (m.a(x), m.a.weight.detach()[:, 1:], m.a.weight[:, 1:]), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            got, expected = call(x), model(x)
            assert [o.requires_grad for o in got] == [o.requires_grad for o in expected]
            assert [o.data_ptr() for o in got[1:]] == [o.data_ptr() for o in expected[1:]]


def test_an_empty_view_of_a_callers_tensor_has_no_bytes() -> None:
    model = Model(
        lambda m, x: (m.a(x).sum(), m.counter.expand(x.shape[0], 8) * 1, m.cache[0].expand(x.shape[0], D)), a=lin()
    )
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x = x_like(0)
            same(call(x), model(x))
    assert total("replayed") == 3


def test_what_a_piece_writes_through_a_cuts_view_reaches_the_result_of_another_cut() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        h = ops.double(x)
        y = m.a(x)
        v = h.view(-1)
        y = ops.double(y)
        v.add_(1)
        return h, y

    model = Model(fn, a=lin())
    call = compiled(model, cut_ops=(*CUTS, "aten::view"))
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            same(call(x), model(x))
    assert total("replayed") == 3


def test_inputs_that_share_a_storage_in_one_call_need_not_in_the_next() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        v, w = x[1:], m.cache[1:5]
        ops.add_one_(m.counter)
        h = m.a(v) + v * w[:3]
        return ops.double(h), x[2:]

    model = Model(fn, a=lin())
    model.cache.normal_()
    call = compiled(model)
    with torch.no_grad():
        for x in (*[model.cache[2:6]] * 3, x_like(), model.cache[1:5], x_like()):
            got, expected = call(x), model(x)
            same(got, expected)
            assert got[1].data_ptr() == expected[1].data_ptr()
    assert total("replayed") >= 4


def test_static_results_of_the_graph_in_front_of_a_graph_break_outlast_the_one_behind_it() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        a = m.a(x)
        torch._dynamo.graph_break()
        return a, m.b(x)

    model = Model(fn, a=lin(), b=lin())
    call = compiled(model, outputs="static")
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            same(call(x), model(x))
    assert total("replayed") == 6


@pytest.mark.parametrize("write", ["by a piece", "by a cut"])
def test_a_static_result_may_be_an_argument_that_is_written(write: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        x.add_(1) if write == "by a piece" else ops.add_one_(x)
        return m.a(x)

    model = Model(fn, a=lin())
    first, second = compiled(model, outputs="static"), compiled(model, outputs="static", dynamic=False)
    with torch.no_grad():
        for number in range(6):
            x = first(x_like())
            x2 = x.clone()
            got = second(x) if number > 1 else second(x.clone())
            same(got, model(x2))
            if number > 1:
                same(x, x2)
    assert any("is a static result" in c for g in graphs() for c in g.counters.uncaptured)


def test_buffers_that_share_memory_are_seen_at_their_address_by_cuts_too() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        v = m.cache[2:6]
        ops.add_one_(m.counter)  # the view is made with this cut
        m.ring.add_(1)
        return v + m.a(x)

    model = Model(fn, a=lin())
    model.register_buffer("ring", model.cache[3:7])
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            before = model.cache.clone()
            got = call(x)
            model.cache.copy_(before)
            same(got, model(x))
    assert total("replayed") == 3


def test_a_piece_keeps_what_its_view_of_a_cuts_view_lies_in() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        ops.add_one_(m.counter)
        v = h[None]
        ops.add_one_(m.counter)
        y, w = h * 2, v[0]
        ops.add_one_(m.counter)
        return w, m.b(m.a(y)) + m.b(y) + 1  # as large as h, and must not lie where h did

    model = Model(fn, a=lin(), b=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            same(call(x), model(x))
    assert total("replayed") == 3


def test_a_static_result_lasts_over_calls_that_neither_replay_nor_capture() -> None:
    model = Model(lambda m, x: m.a(x) + m.cache[:1], a=lin())
    call = compiled(model, outputs="static", max_recordings=1)
    pool = sgc_backend.pools.pool_of(sgc_backend.devices.device_of(sgc_backend.emulated))
    with torch.no_grad():
        for _ in range(2):
            y = call(x_like(4))
        expected, reserved = y.clone(), pool.reserved_bytes()
        model.cache = torch.randn(64, D)  # what was recorded can never be replayed again
        call(x_like(6))  # a warm-up
        assert pool.reserved_bytes() == reserved
        same(y, expected)
        for _ in range(3):
            x = x_like(6)
            same(call(x), model(x))
    assert total("replayed") == 4


def test_a_static_result_outlasts_the_weight_that_it_was_computed_with() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, outputs="static")
    pool = sgc_backend.pools.pool_of(sgc_backend.devices.device_of(sgc_backend.emulated))
    with torch.no_grad():
        for _ in range(3):
            y = call(x_like())
        expected, reserved = y.clone(), pool.reserved_bytes()
        model.a = lin()
        assert not [g for g in graphs() if g.plans]
        assert pool.reserved_bytes() == reserved
        same(y, expected)
        for _ in range(3):
            y2 = y.clone()
            got = call(y)
            same(got, model(y2))
            y = got


def test_a_static_result_is_read_by_cuts_as_it_was_when_the_call_began() -> None:
    first = compiled(Model(lambda m, x: m.a(x) * 2, a=lin()), outputs="static")
    model = Model(lambda m, y: (m.a(m.b(y)) + 1, ops.double(y)), a=lin(), b=lin())
    second = compiled(model, outputs="static")
    with torch.no_grad():
        for _ in range(3):
            second(x_like())
            y = first(x_like())
        for _ in range(4):
            y = first(x_like())
            y2 = y.clone()
            same(second(y), model(y2))


def test_a_conjugate_comes_back_as_one() -> None:
    model = Model(lambda m, x: (torch.complex(x, m.a(x)).conj(), torch.complex(x, x).conj().imag), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            got, expected = call(x), model(x)
            assert [(o.is_conj(), o.is_neg()) for o in got] == [(o.is_conj(), o.is_neg()) for o in expected]
            same([o.resolve_conj().resolve_neg() for o in got], [o.resolve_conj().resolve_neg() for o in expected])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_static_result_of_inference_mode_is_an_inference_tensor(inner: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        a = m.a(x)
        return a, a[1:], ops.double(a), a.t()

    call = compiled(Model(fn, a=lin()), outputs="static", dynamic=False, inner=inner)
    for mode in (torch.inference_mode, torch.no_grad) * 2:
        for _ in range(3):
            with mode():
                results = call(x_like())
            assert [r.is_inference() for r in results] == [mode is torch.inference_mode] * 4
    with torch.inference_mode():
        call(x_like())
        kept = call(x_like())[0]
    weight = torch.ones(D, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors"):  # its bytes wouldn't last until the backward pass
        kept * weight


def test_a_view_of_an_argument_is_an_inference_tensor_where_it_is_one_in_eager() -> None:
    model = Model(lambda m, x: (m.a(x), x[1:], x.view(torch.int32).view(torch.float32)), a=lin())
    call = compiled(model, dynamic=False)
    with torch.inference_mode(False):
        normal = x_like()
    with torch.inference_mode():
        for x in (normal, x_like()):
            for _ in range(3):
                assert [r.is_inference() for r in call(x)] == [r.is_inference() for r in model(x)]
    assert total("replayed") > 0


def test_a_static_result_keeps_its_strides_as_an_argument() -> None:
    first = compiled(lambda x: ((x * 2)[:, :4], x * 3), outputs="static", dynamic=False)
    seen: list[tuple[int, ...]] = []

    def compiler(gm: Any, examples: Any) -> Any:
        return lambda x: (seen.append(x.stride()), gm(x))[1]  # inductor's code refuses any other

    second = compiled(lambda x: x + 1, dynamic=False, inner=compiler)
    with torch.no_grad():
        first(x_like())
        for _ in range(4):
            part = first(x_like())[0]
            expected = part + 1
            same(second(part), expected)
    assert set(seen) == {(D, 1)}


def test_a_static_result_is_reached_around_as_it_was_when_the_call_began() -> None:
    first = compiled(lambda x: ((x * 2)[:, :4], x * 3), outputs="static", dynamic=False)
    second = compiled(lambda p: (p + 1, p.as_strided((2, D), (D, 1)) + 0), dynamic=False)
    with torch.no_grad():
        first(x_like())
        for _ in range(4):
            x = x_like()
            part = first(x)[0]
            expected = (x * 2)[:2]
            for n in range(40, 70):  # so that what a copy leaves out can't be there by chance
                torch.full((n,), float("nan"))
            same(second(part)[1], expected)


def test_a_static_output_is_a_new_object_each_time() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, outputs="static", dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            y = call(x_like())
            assert y.shape == (4, D)
            y.unsqueeze_(0)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_plain_int_argument_is_no_capture_size() -> None:
    model = Model(lambda m, x, k: m.a(x) * k, a=lin())
    call = compiled(model, capture_sizes=[4])
    with torch.no_grad():
        for k in (17, 18, 17, 18, 17, 18):
            x = x_like()
            same(call(x, k), model(x, k))
    assert total("replayed") == 4


def test_layers_that_share_code_each_have_a_recording() -> None:
    layers = [Model(lambda m, x: m.a(x), a=lin()) for _ in range(40)]
    for layer in layers:
        layer.fn = layers[0].fn
    calls = [compiled(layer, dynamic=False) for layer in layers]
    with torch.no_grad():
        for _ in range(3):
            x = x_like()
            for layer, call in zip(layers, calls, strict=True):
                same(call(x), layer(x))
    assert total("captured") == 40
    assert total("uncaptured") == 1


# -- subclasses, errors, threads ---------------------------------------------------------------------------------------


def test_tensor_subclasses_run_uncaptured() -> None:
    call = compiled(lambda x: x * 2, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            got = call(TwoTensor(torch.ones(4), torch.full((4,), 5.0)))
            assert isinstance(got, TwoTensor)
            same(got.b, torch.full((4,), 10.0))
    assert "tensor subclass" in graphs()[0].cause


def test_what_was_written_before_a_cut_raised_is_written() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return m.b(torch.ops.sgc_test.raise_if(m.a(x)))

    model = Model(fn, a=lin(), b=lin())
    call = compiled(model, dynamic=False, cut_ops=(*CUTS, "sgc_test::raise_if"))
    with torch.no_grad():
        for _ in range(3):
            call(x_like())
        x = x_like()
        before = x.clone()
        RAISE.append(1)
        try:
            with pytest.raises(LookupError, match="from the cut"):
                call(x)
        finally:
            RAISE.clear()
        same(x, before + 1)
        x2 = x.clone()
        same(call(x), model(x2))


def test_a_call_that_waited_while_everything_was_released_starts_over() -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    call = compiled(model)
    decode = sgc_backend.FullCudaGraphBackend()
    results: list[torch.Tensor] = []
    y = x_like()

    def work() -> None:
        with torch.no_grad():
            results.append(call(y))

    with torch.no_grad():
        for _ in range(3):
            call(x_like())
    with decode.capture_session(), decode.replay_session():
        pass
    with decode.replay_session():
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.3)  # until it waits for the pool; if it has not come so far, the test shows nothing, and passes
        torch._dynamo.reset()
    thread.join()
    with torch.no_grad():
        same(results[0], model(y))


def test_threads_share_a_compiled_model() -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    call = compiled(model)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n in (4, 6, 4, 6) * 5:
                x = torch.randn(n, D, generator=generator)
                try:
                    if not torch.equal(call(x), model(x)):
                        wrong.append(n)
                except Exception as error:
                    wrong.append(error)

    with torch.no_grad():
        call(x_like())
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_that_fails_at_every_size_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model)
    with torch.no_grad():
        call(x_like(2))
        (graph,) = graphs()
        graph.recordable = [lambda *args: (_ for _ in ()).throw(ArithmeticError("can't"))]
        with caplog.at_level(logging.WARNING, logger="sgc_backend"):
            for n in range(2, 30):
                for _ in range(2):
                    x = x_like(n)
                    same(call(x), model(x))
    assert len([r for r in caplog.records if "runs uncaptured" in r.message]) == 1


def test_a_compiled_call_inside_a_cut_runs_uncaptured_there_and_captured_elsewhere() -> None:
    inner_model = Model(lambda m, x: m.a(x), a=lin())
    inner = compiled(inner_model, dynamic=False)

    @torch.library.custom_op("sgc_test::calls_inner", mutates_args=())
    def calls_inner(x: torch.Tensor) -> torch.Tensor:
        return inner(x).clone()

    calls_inner.register_fake(lambda x: torch.empty_like(x))
    outer_model = Model(lambda m, x: m.a(torch.ops.sgc_test.calls_inner(m.b(x))), a=lin(), b=lin())
    outer = compiled(outer_model, dynamic=False, cut_ops=(*CUTS, "sgc_test::calls_inner"))
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            try:
                got = outer(x)
            except sgc_backend.NestedReplayError:
                continue
            same(got, outer_model.a(inner_model(outer_model.b(x))))
        for _ in range(3):
            x = x_like()
            same(inner(x), inner_model(x))
    assert total("replayed") > 0


def test_new_sizes_in_two_threads_and_a_replay_session_do_not_wait_for_each_other() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model)
    decode = sgc_backend.FullCudaGraphBackend()
    with decode.capture_session():
        pass
    with torch.no_grad():
        call(x_like(3))
    started = threading.Event()

    def work() -> None:
        started.set()
        with torch.no_grad():
            for n in range(5, 25):
                call(x_like(n))

    with decode.replay_session():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        started.wait()
        with torch.no_grad():
            for n in range(30, 40):
                call(x_like(n))
    thread.join(timeout=60)
    assert not thread.is_alive()
