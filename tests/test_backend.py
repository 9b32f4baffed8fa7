"""The torch.compile entry: results equal eager's, what is captured is replayed, and what isn't says why."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from models import CUTS, MODELS, D, Model, lin, ops, rows
from torch import nn

import sgc_backend

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])


def compiled(model: Any, *, dynamic: bool | None = True, **options: Any) -> Any:
    options = {"inner": "eager", "cut_ops": CUTS, "capture_sizes": None, **options}
    return torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=dynamic, options=options)


_before: list[Any] = []


@pytest.fixture(autouse=True)
def only_graphs_of_this_test() -> Any:
    # Dynamo leaves the graphs behind a graph break in the globals of the module that the function is from.
    _before[:] = sgc_backend.recorders.recorders()
    yield
    _before.clear()


def graphs() -> list[Any]:
    """Those that the test compiled, in order: recorders() is a set, and "graph 10" sorts before "graph 9"."""
    found = [r for r in sgc_backend.recorders.recorders() if r.kind == "compiled" and r not in _before]
    return sorted(found, key=lambda r: (len(r.name), r.name))


def total(what: str) -> int:
    return sum(sum(getattr(g.counters, what).values()) for g in graphs())


def to(args: tuple[torch.Tensor, ...], where: str) -> tuple[torch.Tensor, ...]:
    return tuple(a.to(where) for a in args)


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, check_stride=True)


@device
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager_bitwise_at_sizes_in_random_order(name: str, device: str) -> None:
    make, inputs = MODELS[name]
    model = make().to(device)
    reference = copy.deepcopy(model)
    call = compiled(model)
    order = [2, 5, 8] * 4
    random.Random(name).shuffle(order)
    with torch.no_grad():
        held = []
        for n in order:
            args = to(inputs(n), device)
            expected = reference(*(a.clone() for a in args))
            got = call(*args)
            same(got, expected)
            held.append((got, expected))
            for buffer, wanted in zip(model.buffers(), reference.buffers(), strict=True):
                same(buffer, wanted)
        for got, expected in held:  # what was handed out stays the caller's
            same(got, expected)
    assert not [c for g in graphs() for c in g.counters.failures]
    if name not in ("cut_only", "nothing_but_views", "input_returned"):
        assert total("replayed") > 0


@device
def test_a_static_graph_is_recorded_after_one_warm_up_call(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, D, device=device)
            same(call(x), model(x))
    (graph,) = graphs()
    assert dict(graph.counters.replayed) == {(): 3}
    assert dict(graph.counters.uncaptured) == {"warm-up": 1}


@device
def test_graph_breaks_give_several_graphs_that_all_replay(device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        torch._dynamo.graph_break()
        return m.b(ops.double(h))

    model = Model(fn, a=lin(), b=lin()).to(device)
    call = compiled(model)
    with torch.no_grad():
        for n in (4, 6, 4, 6, 4, 6):
            x = torch.randn(n, D, device=device)
            same(call(x), model(x))
    assert len(graphs()) == 2
    assert all(sum(g.counters.replayed.values()) == 4 for g in graphs())


def test_a_size_that_is_no_capture_size_runs_compiled_and_counted() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, capture_sizes=[4])
    with torch.no_grad():
        for n in (4, 4, 7, 7, 4):
            x = torch.randn(n, D)
            same(call(x), model(x))
    (graph,) = graphs()
    assert dict(graph.counters.captured) == {(4,): 1}
    assert graph.counters.uncaptured["no capture size holds it within max_padding_ratio"] == 2


def test_session_capture_records_only_inside_a_session() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, capture="session")
    x = torch.randn(4, D)
    backend = sgc_backend.FullCudaGraphBackend()
    with torch.no_grad():
        for _ in range(3):
            same(call(x), model(x))
        (graph,) = graphs()
        assert not graph.counters.captured
        with backend.capture_session():
            same(call(x), model(x))
        same(call(x), model(x))
    assert dict(graph.counters.captured) == {(4,): 1}
    assert dict(graph.counters.replayed) == {(4,): 1}


@device
def test_static_outputs_are_not_copied_and_are_rewritten_by_the_next_replay(device: str) -> None:
    model = Model(lambda m, x: m.a(x), a=lin()).to(device)
    call = compiled(model, outputs="static", dynamic=False)
    with torch.no_grad():
        x, y = torch.randn(2, 4, D, device=device)
        call(x)
        first = call(x)
        same(first, model(x))
        second = call(y)
        assert first.data_ptr() == second.data_ptr()
        same(first, model(y))


@device
def test_weights_that_moved_are_never_stale(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model)
    x = torch.randn(4, D, device=device)
    with torch.no_grad():
        for step in range(6):
            for _ in range(3):
                same(call(x), model(x))
            if step % 3 == 0:
                model.a.weight.data = torch.randn(D, D, device=device)
            elif step % 3 == 1:
                model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
            else:
                model.b.weight.copy_(torch.randn(D, D, device=device))
    for graph in graphs():
        assert sum(len(p) for p in graph.plans.values()) <= 2  # plans of weights that are gone are let go


@device
def test_instances_that_share_code_use_their_own_weights(device: str) -> None:
    layers = [Model(lambda m, x: m.a(x).relu(), a=lin()).to(device) for _ in range(3)]
    fn = layers[0].fn
    for layer in layers:
        layer.fn = fn
    calls = [compiled(layer) for layer in layers]
    with torch.no_grad():
        for n in (4, 6) * 4:
            x = torch.randn(n, D, device=device)
            for layer, call in zip(layers, calls, strict=True):
                same(call(x), layer(x))
    assert total("replayed") > 0


@device
def test_an_output_fed_back_as_input(device: str) -> None:
    model = Model(lambda m, x: ops.double(m.a(x)) * 0.1, a=lin()).to(device)
    for outputs in ("clone", "static"):
        call = compiled(model, outputs=outputs)
        with torch.no_grad():
            x = y = torch.randn(4, D, device=device)
            for _ in range(6):
                x, y = call(x), model(y)
                same(x, y)


def test_an_input_that_is_written_is_written_in_the_callers_tensor() -> None:
    model = Model(lambda m, x, y: (x.add_(m.a(y)), ops.add_one_(x), x * 2)[2], a=lin())
    call = compiled(model)
    with torch.no_grad():
        for n in (3, 3, 5, 3, 5, 5):
            x, y = torch.randn(n, D), torch.randn(n, D)
            x2 = x.clone()
            same(call(x, y), model(x2, y))
            same(x, x2)
    assert total("replayed") == 4


def test_written_inputs_that_share_memory_run_uncaptured_and_right() -> None:
    def fn(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return m.a(a) + m.a(b)

    model = Model(fn, a=lin())
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            t = torch.randn(6, D)
            t2 = t.clone()
            same(call(t[:4], t[2:]), model(t2[:4], t2[2:]))
            same(t, t2)


def test_a_cut_may_return_fresh_memory_every_time() -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    call = compiled(model)
    junk = []
    with torch.no_grad():
        for k in range(30):
            x = torch.randn(8, D)
            same(call(x), model(x))
            junk.append(torch.empty(random.Random(k).randrange(1, 4000)))
    assert total("replayed") == 29


def test_size_zero_and_one() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, dynamic=None)
    with torch.no_grad():
        for n in (1, 2, 4, 8, 0, 3, 1, 0, 4):
            x = torch.randn(n, D)
            same(call(x), model(x))


def test_gradients_run_uncaptured_with_one_warning_that_says_what_to_do() -> None:
    model = Model(lambda m, x: m.b(m.a(x)).tanh(), a=lin(), b=lin())
    reference = copy.deepcopy(model)
    call = compiled(model, inner="aot_eager")
    x = torch.randn(4, D)
    with pytest.warns(UserWarning, match=r"torch\.no_grad"):
        out = call(x)
    out.sum().backward()
    reference(x).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    with torch.no_grad():
        for _ in range(3):
            same(call(x), model(x))
    assert total("replayed") == 2


@device
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_views_of_weights_do_not_keep_a_call_without_gradients_from_being_captured(off: Any, device: str) -> None:
    bodies = [
        lambda m, x: x @ m.a.weight.t() + m.a.bias[None],
        lambda m, x: ops.double(x) @ m.a.weight.view(2, -1, D)[0].T,
        lambda m, x: (m.a.weight.detach()[1:], m.a(x) * m.a.bias.view(1, D)),
    ]
    for body in bodies:
        model = Model(body, a=lin()).to(device)
        call = compiled(model, dynamic=False)
        before = total("replayed")
        with off():
            for _ in range(3):
                x = torch.randn(4, D, device=device)
                same(call(x), model(x))
        assert total("replayed") == before + 2
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:sgc_piecewise captures inference only")
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "on", [torch.enable_grad, lambda: torch.inference_mode(False), lambda: torch.set_grad_enabled(True)]
)
def test_gradients_that_are_turned_on_inside_are_computed(on: Any, off: Any) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ m.a.weight.t()
        with on():
            return m.a(x), h

    model = Model(fn, a=lin())
    call = compiled(model, dynamic=False)
    x = torch.randn(4, D)
    for _ in range(3):
        with off():
            got, wanted = call(x), model(x)
        same(got, wanted)
        for a, b in zip(got, wanted, strict=True):
            assert (a.requires_grad, a.is_inference()) == (b.requires_grad, b.is_inference())
        if wanted[0].requires_grad:
            same(*(torch.autograd.grad(y[0].sum(), model.a.weight)[0] for y in (got, wanted)))


def test_strict_raises_with_the_cause_instead_of_falling_back() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, strict=True, capture_sizes=[4])
    with torch.no_grad():
        x = torch.randn(4, D)
        same(call(x), model(x))
        with pytest.raises(sgc_backend.StrictError, match="no capture size"):
            call(torch.randn(5, D))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"options": {"inner_compiler": "eager"}}, "unknown option inner_compiler; valid: capture_sizes"),
        ({"options": {"capture_sizes": []}}, "capture_sizes is empty"),
        ({"options": {"capture_sizes": [4, -1]}}, "-1"),
        ({"options": {"cut_ops": ["sgc_test::dubble"]}}, "resolves to no operator"),
        ({"mode": "max-autotune"}, "mode='max-autotune' is not supported"),
    ],
)
def test_bad_options_raise_as_themselves_and_say_what_is_valid(kwargs: dict[str, Any], message: str) -> None:
    call = torch.compile(Model(lambda m, x: m.a(x), a=lin()), backend=sgc_backend.sgc_piecewise, **kwargs)
    with torch.no_grad(), pytest.raises(sgc_backend.OptionError, match=message):
        call(torch.randn(2, D))


def test_without_emulation_the_cpu_runs_compiled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGC_DEVICE")
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model)
    with torch.no_grad():
        x = torch.randn(2, D)
        same(call(x), model(x))
    (graph,) = graphs()
    assert "no graphs on device type cpu" in graph.cause


def test_a_failing_capture_answers_the_call_and_is_not_tried_again() -> None:
    @torch.library.custom_op("sgc_test::syncs", mutates_args=())
    def syncs(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    syncs.register_fake(lambda x: torch.empty_like(x))
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.syncs(m.a(x))), a=lin(), b=lin())
    call = compiled(model, cut_ops=(), capturable_ops=["sgc_test::syncs"])  # or it would be cut then
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, D)
            same(call(x), model(x))
        (graph,) = graphs()
        assert sum(graph.counters.failures.values()) == 1
        assert not graph.counters.replayed
        fine = Model(lambda m, x: m.a(x), a=lin())
        good = compiled(fine)
        for _ in range(3):
            same(good(x), fine(x))
    assert total("replayed") == 2


def test_reset_lets_go_and_later_calls_record_again() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            call(torch.randn(4, D))
        handle = sgc_backend.get_or_create_global_graph_memory_pool(sgc_backend.emulated)
        sgc_backend.reset()
        sgc_backend.reset()
        for _ in range(3):
            x = torch.randn(4, D)
            same(call(x), model(x))
    assert sgc_backend.get_or_create_global_graph_memory_pool(sgc_backend.emulated) != handle
    assert dict(graphs()[0].counters.captured) == {(4,): 2}


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_pieces_agree_with_eager_within_tolerance(inner: str) -> None:
    make, inputs = MODELS["kv_write"]
    model = make()
    reference = copy.deepcopy(model)
    call = compiled(model, inner=inner, capture_sizes=[4, 6])
    with torch.no_grad():
        for n in (4, 4, 6, 6, 5, 4, 6):
            args = inputs(n)
            torch.testing.assert_close(call(*args), reference(*args))
            torch.testing.assert_close(model.cache, reference.cache)
    assert total("replayed") == 4


def test_an_inner_callable_compiles_each_piece() -> None:
    seen = []

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(len(inputs))
        return gm.forward

    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for _ in range(3):
            (x,) = rows(4)
            same(call(x), model(x))
    assert len(seen) == 2


def test_modules_keep_their_names_in_the_state_dict() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    call = compiled(model)
    with torch.no_grad():
        call(torch.randn(2, 4))
    assert {k.removeprefix("_orig_mod.") for k in call.state_dict()} == set(model.state_dict())


def test_views_of_parameters_want_no_gradient_under_no_grad() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = m.a.weight.chunk(2)
        m.b.bias.view(-1).add_(1)
        return torch.cat([x @ gate.t(), x @ up.t()], 1) + m.a.bias[None]

    model = Model(fn, a=lin(), b=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, D)
            same(call(x), model(x))
    assert total("replayed") == 2
    model.b.requires_grad_(False)
    with pytest.warns(UserWarning, match="captures inference only"):
        call(x)
    assert total("replayed") == 2


def copied(call: Any) -> Any:
    return copy.deepcopy(call)


def pickled(call: Any) -> Any:
    return pickle.loads(pickle.dumps(call))


@pytest.mark.parametrize("again", [copied, pickled])
def test_a_compiled_model_whose_device_module_is_given_by_name_can_be_made_again(again: Any) -> None:
    model = torch.nn.Linear(D, D)
    options = {"inner": "eager", "device_module": "sgc_backend.emulated"}
    call = torch.compile(model, backend=sgc_backend.sgc_piecewise, options=options)
    with torch.no_grad():
        call(torch.randn(4, D))
        other = again(call)
        other.weight.mul_(2)
        for _ in range(3):
            x = torch.randn(4, D)
            same(other(x), torch.nn.functional.linear(x, model.weight * 2, model.bias))
            same(call(x), model(x))
    assert total("replayed") > 0


def test_wrappers_and_the_pool_take_a_device_modules_name() -> None:
    backend = sgc_backend.FullCudaGraphBackend("sgc_backend.emulated")
    assert backend.device.module is sgc_backend.emulated
    pool = sgc_backend.get_or_create_global_graph_memory_pool
    assert pool("sgc_backend.emulated") == pool(sgc_backend.emulated)
