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
