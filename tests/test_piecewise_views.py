"""Views, in a plan: what pieces and cuts reach through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_piecewise import x_like

__all__ = ["only_graphs_of_this_test"]


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


def test_a_conjugate_comes_back_as_one() -> None:
    model = Model(lambda m, x: (torch.complex(x, m.a(x)).conj(), torch.complex(x, x).conj().imag), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(4):
            x = x_like()
            got, expected = call(x), model(x)
            assert [(o.is_conj(), o.is_neg()) for o in got] == [(o.is_conj(), o.is_neg()) for o in expected]
            same([o.resolve_conj().resolve_neg() for o in got], [o.resolve_conj().resolve_neg() for o in expected])


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
