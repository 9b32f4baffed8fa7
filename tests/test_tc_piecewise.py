"""TcPiecewiseCudaGraphBackend: compiled once, recorded per key, replayed without Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops

import sgc_backend
from sgc_backend import NotCapturedError, OptionError, ShapeKey, TcPiecewiseCudaGraphBackend, emulated
from sgc_backend.errors import CaptureError, ReplayError, StrictError

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])
SIZES = (4, 12, 8)  # none is D: Dynamo would take the two for one size


@torch.library.custom_op("sgc_test::waits_for_the_device", mutates_args=())
def waits_for_the_device(x: torch.Tensor) -> torch.Tensor:
    emulated.synchronize()
    return x * 3


@waits_for_the_device.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def wrapped(fn: Any, device: str = "cpu", **settings: Any) -> TcPiecewiseCudaGraphBackend:
    where = torch.cuda if device == "cuda" else emulated
    options = {"inner": "eager", "cut_ops": CUTS, **(settings.pop("options", None) or {})}
    return TcPiecewiseCudaGraphBackend(fn, capture_sizes=SIZES, options=options, device_module=where, **settings)


def a_model(device: str = "cpu") -> Model:
    def fn(m: Any, x: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
        h = m.a(x)
        m.cache[slots] = h
        return {"y": m.b(ops.double(h)) + m.cache[slots], "n": 3}

    return Model(fn, a=lin(), b=lin()).to(device)


@device
def test_every_size_is_compiled_once_recorded_largest_first_and_replayed_from_its_buffers(device: str) -> None:
    model = a_model(device)
    backend = wrapped(model, device)
    x, slots = torch.randn(13, D, device=device), torch.arange(13, device=device)
    order: list[tuple[int, int, int]] = []
    with backend.capture_session():
        backend._run_compile_pass(lambda n: (x[:n], slots[:n]), progress=lambda *step: order.append(step))
    assert order == [(1, 3, 12), (2, 3, 8), (3, 3, 4)]
    compiled = [r for r in sgc_backend.recorders.recorders() if r.kind == "compiled"]
    for n in (4, 12, 8, 12, 4):
        x.copy_(torch.randn(13, D))
        with torch.no_grad():
            expected = model(x[:n], slots[:n])
        got = backend.replay(n)
        assert torch.equal(got["y"], expected["y"])
        assert got["n"] == 3
    assert [r for r in sgc_backend.recorders.recorders() if r.kind == "compiled"] == compiled
    backend.cleanup()


def test_a_replay_does_not_enter_dynamo() -> None:
    model = a_model()
    backend = wrapped(model)
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        backend._run_compile_pass(lambda n: (x[:n], slots[:n]))
    with torch.compiler.set_stance("fail_on_recompile"):
        backend.compiled = None
        backend.replay(8)


def test_the_pool_is_the_one_of_all_wrappers() -> None:
    backend = wrapped(a_model())
    full = sgc_backend.FullCudaGraphBackend(emulated)
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        backend._run_compile_pass(lambda n: (x[:n], slots[:n]))
    with full.capture_session():
        full.capture_one(4, lambda: x[:4] * 2)
    assert len(sgc_backend.memory_report().pools) == 1


def test_a_variant_is_a_recording_of_its_own() -> None:
    backend = wrapped(a_model())
    x, y, slots = torch.randn(13, D), torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        for name, rows in (("x", x), ("y", y)):
            backend.capture_one(ShapeKey(8, name), lambda rows=rows: backend.compiled(rows[:8], slots[:8]))
    first = backend.replay(ShapeKey(8, "x"))["y"].clone()
    assert not torch.equal(first, backend.replay(ShapeKey(8, "y"))["y"])


def test_what_cannot_be_replayed_alone_is_refused_by_name() -> None:
    def two_graphs(m: Any, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        torch._dynamo.graph_break()
        return m.b(h)

    backend = wrapped(Model(two_graphs, a=lin(), b=lin()))
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        with pytest.raises(CaptureError, match="replayed 2 Dynamo graphs"):
            backend.capture_one(8, lambda: backend.compiled(x[:8], slots[:8]))
        with pytest.raises(CaptureError, match="replayed 0 Dynamo graphs"):
            backend.capture_one(9, lambda: x[:9] * 2)
        one = wrapped(a_model())
        with one.capture_session(), pytest.raises(CaptureError, match="as it is"):
            one.capture_one(8, lambda: one.compiled(x[:8], slots[:8])["y"] * 2)
    with pytest.raises(NotCapturedError, match="recorded: none"):
        backend.replay(8)


def test_a_piece_that_cannot_be_captured_is_the_cause_of_the_error() -> None:
    kept = {"capturable_ops": [waits_for_the_device]}  # or it would be cut, once a capture had failed in it
    backend = wrapped(Model(lambda m, x, s: waits_for_the_device(m.a(x)), a=lin()), options=kept)
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session(), pytest.raises(CaptureError, match="ran uncaptured: capture failed") as caught:
        backend.capture_one(8, lambda: backend.compiled(x[:8], slots[:8]))
    assert isinstance(caught.value.__cause__, CaptureError)
    assert not backend.can_run(8)


def test_what_was_recorded_is_explained_without_running_it() -> None:
    backend = wrapped(a_model())
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        backend._run_compile_pass(lambda n: (x[:n], slots[:n]))
    before = sgc_backend.stats()
    (graph,) = backend.explain().graphs
    assert len(graph.split.pieces) == 2
    assert "cut 1" in str(backend.explain())
    assert sgc_backend.stats() == before


def test_sizes_that_compile_apart_are_said_and_refused_where_strict() -> None:
    x, slots = torch.randn(12, D), torch.arange(12)  # exactly the largest size: its slice is the whole buffer
    backend = wrapped(Model(lambda m, x, s: m.a(x) * (2 if x.shape[0] == 12 else 3), a=lin()))
    with backend.capture_session(), pytest.warns(UserWarning, match="needed 2 compilations"):
        backend._run_compile_pass(lambda n: (x[:n], slots[:n]))
    strict = wrapped(Model(lambda m, x, s: m.a(x) * (2 if x.shape[0] == 12 else 3), a=lin()), strict=True)
    with strict.capture_session(), pytest.raises(StrictError, match="needed 2 compilations"):
        strict._run_compile_pass(lambda n: (x[:n], slots[:n]))


def test_a_recording_that_was_released_says_so() -> None:
    backend = wrapped(a_model())
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        backend.capture_one(8, lambda: backend.compiled(x[:8], slots[:8]))
    sgc_backend.reset()
    assert not backend.can_run(8)
    with pytest.raises(NotCapturedError, match="recorded: none"):
        backend.replay(8)
    with backend.capture_session():
        backend.capture_one(8, lambda: backend.compiled(x[:8], slots[:8]))
    for graph in sgc_backend.recorders.recorders():
        if graph.kind == "compiled":
            graph.release()
    assert not backend.can_run(8)
    with pytest.raises(NotCapturedError, match="was released"):
        backend.replay(8)


def test_options_that_the_wrapper_sets_are_refused() -> None:
    with pytest.raises(OptionError, match="outputs can't be given in options"):
        TcPiecewiseCudaGraphBackend(lin(), capture_sizes=(4,), options={"outputs": "clone"}, device_module=emulated)
    with pytest.raises(OptionError, match="fn must be a module or function"):
        TcPiecewiseCudaGraphBackend(3, capture_sizes=(4,), device_module=emulated)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="options must be a dict, got list"):
        TcPiecewiseCudaGraphBackend(lin(), capture_sizes=(4,), options=["pad"], device_module=emulated)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", ["auto", None, 4, [4, "8"], [4, -1], []], ids=repr)
def test_capture_sizes_that_are_no_list_of_sizes_are_refused_at_once(sizes: Any) -> None:
    with pytest.raises(OptionError, match="tc_piecewise: capture_sizes "):
        TcPiecewiseCudaGraphBackend(lin(), capture_sizes=sizes, device_module=emulated)


@pytest.mark.parametrize("sizes", [None, 4, "auto", (0,), (-1,), (2.5,), (True,), ("a",)])
def test_capture_sizes_that_are_none_are_refused_at_once(sizes: Any) -> None:
    with pytest.raises(OptionError, match="capture_sizes"):
        TcPiecewiseCudaGraphBackend(lin(), capture_sizes=sizes, device_module=emulated)


@pytest.mark.parametrize(
    ("options", "match"), [({"nope": 1}, "unknown option nope"), ({"inner": "x"}, "inner"), (3, "dict")]
)
def test_options_that_are_none_are_refused_at_once(options: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        TcPiecewiseCudaGraphBackend(lin(), capture_sizes=(4,), options=options, device_module=emulated)


@pytest.mark.parametrize("how", ["data", "assign", "attribute"])
def test_weights_that_moved_are_never_replayed(how: str) -> None:
    model = a_model()
    backend = wrapped(model)
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        backend.capture_one(8, lambda: backend.compiled(x[:8], slots[:8]))
    with torch.no_grad():
        model.a.weight.copy_(torch.randn(D, D))
        expected = model(x[:8], slots[:8])["y"]
    assert torch.equal(backend.replay(8)["y"], expected)  # in place is fine
    del expected
    if how == "data":
        model.a.weight.data = torch.randn(D, D)
    elif how == "assign":
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
    else:
        model.a.weight = torch.nn.Parameter(torch.randn(D, D))
    with pytest.raises(ReplayError, match="moved since key 8 was captured"):
        backend.replay(8)


def test_a_capture_that_is_refused_leaves_no_recording_and_the_ones_before_alone() -> None:
    layer = lin()
    backend = wrapped(lambda x: layer(x) + 1)
    x = torch.randn(16, D)

    def fails_late(calls: list[int]) -> torch.Tensor:
        calls.append(1)
        out = backend.compiled(x[:8])
        if len(calls) == 2:
            raise LookupError("in the second run")
        return out

    with backend.capture_session():
        backend.capture_one(4, lambda: backend.compiled(x[:4]))
        before = [owner.recordings for owner in sgc_backend.memory_report().pools[0].owners]
        for _ in range(9):  # so many wasted recordings of a key would be the last
            with pytest.raises(CaptureError, match="returns a tensor that its graph does not"):
                backend.capture_one(8, lambda: backend.compiled(x[:8]) + 1)
            calls: list[int] = []
            with pytest.raises(LookupError):
                backend.capture_one(8, lambda calls=calls: fails_late(calls))
        with pytest.raises(CaptureError, match="returns a tensor that its graph does not"):
            backend.capture_one(4, lambda: backend.compiled(x[:4]) + 1)
        assert [owner.recordings for owner in sgc_backend.memory_report().pools[0].owners] == before
        backend.capture_one(8, lambda: backend.compiled(x[:8]))
    for n in (4, 8):
        assert torch.equal(backend.replay(n), layer(x[:n]) + 1)


def test_two_wrappers_of_one_callable_keep_their_own_recordings_of_a_size() -> None:
    layer = lin()
    first, second = wrapped(layer), wrapped(layer)
    buffers = [torch.randn(4, D) for _ in range(2)]
    for x, backend in zip(buffers, (first, second), strict=True):
        torch._dynamo.mark_static_address(x, guard=False)
        with backend.capture_session():
            backend.capture_one(4, lambda x=x, backend=backend: backend.compiled(x))
    for _ in range(2):
        assert torch.equal(second.replay(4), layer(buffers[1]))
        assert torch.equal(first.replay(4), layer(buffers[0]))
    second.cleanup()
    assert torch.equal(first.replay(4), layer(buffers[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TcPiecewiseCudaGraphBackend(lin(), capture_sizes=[0], device_module=emulated, name="refused"),
        lambda: sgc_backend.BreakableCudaGraphBackend(emulated, strict="yes", name="refused"),
    ],
    ids=["tc_piecewise", "breakable"],
)
def test_a_wrapper_that_is_refused_leaves_nothing_behind_while_its_error_lives(make: Any) -> None:
    with pytest.raises(OptionError) as refused:
        make()
    assert "refused" not in sgc_backend.stats()
    sgc_backend.reset()
    del refused


@device
def test_a_key_that_is_captured_again_where_weights_moved_gives_the_memory_of_the_old_recording_back(
    device: str,
) -> None:
    model = a_model(device)
    backend = wrapped(model, device)
    x, slots = torch.randn(13, D, device=device), torch.arange(13, device=device)
    places = [{name: p.data for name, p in model.named_parameters()}, {}]
    places[1] = {name: data.clone() for name, data in places[0].items()}  # both stay alive, as storages do in a sleep

    def capture(place: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = places[place][name]
        with backend.capture_session():
            for n in (12, 8):
                backend.capture_one(n, lambda n=n: backend.compiled(x[:n], slots[:n]))

    def recordings() -> int:
        return len([r for r in sgc_backend.memory_report().pools for _ in r.owners])

    capture(0)
    for place in (1, 1, 0, 1):
        capture(place)
        assert recordings() == 2
        with torch.no_grad():
            expected = model(x[:8], slots[:8])["y"]
        assert torch.equal(backend.replay(8)["y"], expected)
    backend.cleanup()
    assert recordings() == 0


def test_keys_that_share_a_recording_keep_it_where_one_of_them_is_captured_again() -> None:
    model = a_model()
    backend = wrapped(model)
    x, slots = torch.randn(13, D), torch.arange(13)
    with backend.capture_session():
        for key in (ShapeKey(8, "one"), ShapeKey(8, "other")):
            backend.capture_one(key, lambda: backend.compiled(x[:8], slots[:8]))
        before = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        backend.capture_one(ShapeKey(8, "one"), lambda: backend.compiled(x[:8], slots[:8]))
    expected = backend.replay(ShapeKey(8, "one"))["y"].clone()
    with pytest.raises(ReplayError, match="moved"):
        backend.replay(ShapeKey(8, "other"))
    for parameter, data in zip(model.parameters(), before, strict=True):
        parameter.data = data
    assert torch.equal(backend.replay(ShapeKey(8, "other"))["y"], expected)
    backend.cleanup()
