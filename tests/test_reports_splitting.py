"""Where a graph is cut, and how often: reported cases, named by their ids."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aliasing import calls_as_eager
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module
from test_reports import a_clean_model_works, captured

import sgc_backend

__all__ = ["only_graphs_of_this_test"]

gpu = pytest.mark.gpu


def kinds(graph: Any) -> str:
    """A graph's groups in order: "p" for a piece, "c" for a cut."""
    return "".join(g.kind[0] for g in graph.split.groups)


def lints(graph: Any) -> None:
    """Every group is a valid graph, and reads only what inputs and groups in front of it give."""
    known = {i.name for i in graph.inputs}
    for group in graph.split.groups:
        group.gm.graph.lint()
        assert {r.name for r in group.inputs if hasattr(r, "name")} <= known
        known |= set(group.outputs)


def rows(device: str, *sizes: int) -> Callable[[int], tuple[torch.Tensor]]:
    return lambda k: (torch.randn((sizes or (4, 5))[k % len(sizes or (4, 5))], D, device=device),)


# -- results of cuts that are tuples -----------------------------------------------------------------------------------


def _one_next_one_later_one_returned(m: Any, x: torch.Tensor) -> Any:
    a, b, c = ops.three(m.a(x))
    h = ops.double(m.b(a))
    return m.a(h + b), c


def _followed_by_another_at_once(m: Any, x: torch.Tensor) -> Any:
    a, b, _ = ops.three(m.a(x))
    d = ops.double(a)
    e, _, g = ops.three(d)
    return m.b(e) + b, g


def _fed_into_itself(m: Any, x: torch.Tensor) -> Any:
    a, b, c = ops.three(x)
    a, b, c = ops.three(a + b)
    a, b, c = ops.three(c)
    return a + b, m.a(c)


def _none_used(m: Any, x: torch.Tensor) -> Any:
    ops.three(m.a(x))
    return m.b(x)


def _all_returned_in_another_order(m: Any, x: torch.Tensor) -> Any:
    a, b, c = ops.three(m.a(x))
    return c, [a, b], c


def _unpacked_late(m: Any, x: torch.Tensor) -> Any:
    parts = ops.three(m.a(x))
    h = ops.double(m.b(x))
    for part in parts:
        h = h + ops.double(part)
    return h, parts[1]


def _a_list_and_a_part_written(m: Any, x: torch.Tensor) -> Any:
    left, right = ops.halves(m.a(x))
    ops.add_one_(right)
    return torch.cat([ops.double(right), left], 1), right


def _ops_of_torch_that_give_tuples(m: Any, x: torch.Tensor) -> Any:
    values, indices = torch.sort(m.a(x), 1)
    h = ops.double(values)
    q, r = torch.frexp(m.b(x))
    top = torch.topk(h, 2)
    low, high = torch.aminmax(x, dim=1)
    return h.gather(1, indices), q * r, top.values, top.indices, ops.double(low), high


def _chunks_that_cross(m: Any, x: torch.Tensor) -> Any:
    p, q = m.a(x).chunk(2, 1)
    h = ops.double(p)
    u, v = torch.split(ops.double(q), [3, 5], 1)
    return h * q, u, ops.double(v), p


TUPLES = [
    _one_next_one_later_one_returned,
    _followed_by_another_at_once,
    _fed_into_itself,
    _none_used,
    _all_returned_in_another_order,
    _unpacked_late,
    _a_list_and_a_part_written,
    _ops_of_torch_that_give_tuples,
    _chunks_that_cross,
]


# SP01
@device
@pytest.mark.parametrize("cuts", [CUTS, (*CUTS, torch.sort, torch.chunk, "aten::split")], ids=["ops", "torch too"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("body", TUPLES, ids=lambda f: f.__name__.strip("_"))
def test_results_that_are_tuples_cross_part_by_part(body: Any, inner: str, cuts: Any, device: str) -> None:
    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, inner=inner, cut_ops=cuts)
    if inner == "eager":
        calls_as_eager(call, model, rows(device), 8)
    else:
        with torch.no_grad():
            for k in range(8):
                args = rows(device)(k)
                torch.testing.assert_close(call(*args), model(*args))
    for graph in graphs():
        lints(graph)
        assert not graph.counters.failures
    assert total("replayed") > 0


# -- where the cuts are ------------------------------------------------------------------------------------------------

POSITIONS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "none": (lambda m, x: m.b(m.a(x)), "p"),
    "first": (lambda m, x: m.a(ops.double(x)), "cp"),
    "last": (lambda m, x: ops.double(m.a(x)), "pc"),
    "middle": (lambda m, x: m.b(ops.double(m.a(x))), "pcp"),
    "only": (lambda m, x: ops.double(x), "c"),
    "adjacent": (lambda m, x: m.b(ops.double(ops.double(m.a(x)))), "pcp"),
    "thrice": (lambda m, x: ops.double(m.a(ops.double(m.b(ops.double(m.a(x)))))), "pcpcpc"),
    "views between": (lambda m, x: m.b(ops.double(ops.double(m.a(x)).view(-1).view(-1, D))), "pcp"),
    "views first": (lambda m, x: ops.double(x.t().t()), "c"),
    "views last": (lambda m, x: ops.double(m.a(x)).t()[1:], "pc"),
    "views alone": (lambda m, x: x.t()[1:], "c"),
    "nothing": (lambda m, x: x, ""),
    "sizes alone": (lambda m, x: (x.shape[0] * 2, x), None),
    "side by side": (lambda m, x: ops.double(m.a(x)) + ops.double(m.b(x)), None),
    "unused": (lambda m, x: (ops.double(x), m.a(x))[1], None),
    "in place alone": (lambda m, x: (ops.add_one_(x), x)[1], "c"),
}


# SP02
@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", POSITIONS)
def test_a_cut_at_any_position_makes_no_empty_piece(where: str, inner: str, device: str) -> None:
    body, wanted = POSITIONS[where]
    model = Model(body, a=lin(), b=lin()).to(device)
    call = compiled(model, inner=inner)
    with torch.no_grad():
        for k in range(8):
            (x,) = rows(device)(k)
            y = x.clone()
            same(call(x), model(y))
            same(x, y)
    # Sizes alone have no device: on the host they are the emulated one's, with CUDA they run as they are.
    for graph in (g for g in graphs() if hasattr(g, "split")):
        lints(graph)
        if wanted is not None:
            assert kinds(graph) == wanted
        assert all(piece.kernels for piece in graph.split.pieces)
        assert not graph.counters.failures
        pieces = len(graph.split.pieces)
        plans = [plan for by_address in graph.plans.values() for plan in by_address]
        assert all(len(plan.graphs) == pieces for plan in plans)
        assert bool(plans) == bool(pieces)
        if not pieces:
            assert not graph.counters.uncaptured.keys() - {"nothing to capture: no piece has a kernel"}


# -- lists of cut ops --------------------------------------------------------------------------------------------------


# SP03
@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_cut_ops_of_one_model_cut_no_other(kind: Any) -> None:
    options = {"inner": "eager", "cut_ops": kind(["sgc_test::double"]), "capturable_ops": kind([])}
    before = copy.deepcopy(options)
    body = lambda m, x: m.b(ops.double(m.a(x)))  # noqa: E731
    x = torch.randn(4, D)
    wanted = {True: "pcp", False: "p"}
    calls = {}
    with torch.no_grad():
        for cut in (True, False, True, False):
            torch._dynamo.reset()
            model = Model(body, a=lin(), b=lin())
            call = torch.compile(
                model, backend=sgc_backend.sgc_piecewise, options=options if cut else {"inner": "eager"}, dynamic=False
            )
            calls[cut] = (call, model)
            for _ in range(3):
                same(call(x), model(x))
            assert kinds(graphs()[-1]) == wanted[cut]
        assert options == before
        # Both alive at once, one called after the other.
        for call, model in [*calls.values()] * 3:
            same(call(x), model(x))
    assert sgc_backend.config.Options().cut_ops == ()


# SP03
def test_a_callers_list_that_changes_later_changes_no_compiled_model() -> None:
    cut_ops: list[Any] = []
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    call = torch.compile(
        model,
        backend=sgc_backend.sgc_piecewise,
        options={"inner": "eager", "cut_ops": cut_ops, "pad": "never"},
        dynamic=True,
    )
    with torch.no_grad():
        for n in (4, 4, 4):
            x = torch.randn(n, D)
            same(call(x), model(x))
        cut_ops.append("sgc_test::double")
        for n in (4, 5, 5):
            x = torch.randn(n, D)
            same(call(x), model(x))
    assert [kinds(g) for g in graphs()] == ["p"]


# SP03
def test_an_attention_op_that_is_registered_holds_for_later_models_and_is_no_option_of_them() -> None:
    before = sgc_backend.config.Options()
    model = Model(lambda m, x: F.relu(ops.double(m.a(x))), a=lin())
    wrapper = sgc_backend.TcPiecewiseCudaGraphBackend(
        model, capture_sizes=[4], options={"inner": "eager", "cut_ops": ["sgc_test::double"]}
    )
    x = torch.randn(8, D)
    with torch.no_grad(), wrapper.capture_session():
        wrapper.capture_one(4, lambda: wrapper.compiled(x[:4]))
    same(wrapper.replay(4), model(x[:4]).detach())
    wrapper.cleanup()
    assert sgc_backend.config.Options() == before


# -- streams and events of the user's own ------------------------------------------------------------------------------


def _forks_and_joins(m: Any, x: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = m.a(x) * 2
    torch.cuda.current_stream().wait_stream(side)
    return z + m.b(x)


def _cut_between_fork_and_join(m: Any, x: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = m.a(x) * 2
    h = ops.double(m.b(x))
    torch.cuda.current_stream().wait_stream(side)
    return z + h


def _cut_on_the_side(m: Any, x: torch.Tensor) -> torch.Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = ops.double(m.a(x)) * 2
    main.wait_stream(side)
    return z + m.b(x)


def _events(m: Any, x: torch.Tensor) -> torch.Tensor:
    side, ready, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    h = m.a(x)
    ready.record()
    with torch.cuda.stream(side):
        ready.wait()
        z = h * 2
        done.record()
    g = ops.double(m.b(x))
    done.wait()
    return z + g


STREAMS = [_forks_and_joins, _cut_between_fork_and_join, _cut_on_the_side, _events]


# SP06
@gpu
@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("body", STREAMS, ids=lambda f: f.__name__.strip("_"))
def test_streams_inside_a_compiled_model_run_right_and_leave_no_capture_open(body: Any, dynamic: Any) -> None:
    model = Model(body, a=lin(), b=lin()).to("cuda")
    call = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(64, D, device="cuda")
            torch.cuda._sleep(100_000)
            same(call(x), model(x))
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    assert not total("failures")
    a_clean_model_works("cuda")


# SP06
@device
def test_a_callable_that_forks_and_joins_is_recorded_whole(device: str) -> None:
    where = module(device)
    a, b = lin().to(device), lin().to(device)
    x = torch.randn(64, D, device=device)
    side = where.Stream()

    def forward() -> torch.Tensor:
        side.wait_stream(where.current_stream())
        with where.stream(side):
            z = a(x) * 2
        h = b(x)
        where.current_stream().wait_stream(side)
        return z + h

    backend = captured(device, forward)
    with torch.no_grad():
        for _ in range(4):
            x.copy_(torch.randn(64, D))
            same(backend.replay(4), a(x) * 2 + b(x))
    backend.cleanup()


# SP06
def test_a_stream_in_the_graph_keeps_it_whole_and_says_so() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(4, D)
    node = graph.call_function(waits_for_nothing, (x,))
    node.meta["example_value"] = torch.randn(4, D)
    graph.output((node,))
    gm = torch.fx.GraphModule({}, graph)
    run = sgc_backend.sgc_piecewise(gm, [x.meta["example_value"]], options={"inner": "eager"})
    assert re.search("streams or events", run.cause)


def waits_for_nothing(x: torch.Tensor) -> torch.Tensor:
    return x + 1


waits_for_nothing.__module__ = "torch.cuda.streams"
