"""Static results of a plan: how long they last, and as what they may come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_piecewise import x_like

import sgc_backend

__all__ = ["only_graphs_of_this_test"]


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
