"""What went wrong in public for others who capture graphs: replays that went on with what was true at capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from routes import Churn, Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module

import sgc_backend
from sgc_backend import FullCudaGraphBackend, eager_on_graph

__all__ = ["only_graphs_of_this_test"]


SIZES = (24, 12, 8)  # none is D: Dynamo would take the two for one size


# Ops of this file, registered once a process.

_kept: list[torch.Tensor] = []
_host: list[float] = [1.0]


def _capturing(x: torch.Tensor) -> bool:
    return module(x.device.type).is_current_stream_capturing()


@torch.library.custom_op("sgc_test::elsewhere", mutates_args=())
def elsewhere(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out.copy_(x * 2)
    if not _capturing(x):
        _kept.append(out)  # so that no later result gets this address
    return out


@torch.library.custom_op("sgc_test::elsewhere_strided", mutates_args=())
def elsewhere_strided(x: torch.Tensor) -> torch.Tensor:
    out = (x * 2).t().contiguous().t()
    if not _capturing(x):
        _kept.append(out)
    return out


@torch.library.custom_op("sgc_test::elsewhere_two", mutates_args=())
def elsewhere_two(x: torch.Tensor) -> list[torch.Tensor]:
    out = [x * 2, x + 1]
    if not _capturing(x):
        _kept.extend(out)
    return out


@torch.library.custom_op("sgc_test::forks_and_joins", mutates_args=())
def forks_and_joins(x: torch.Tensor) -> torch.Tensor:
    where = module(x.device.type)
    current, side = where.current_stream(), where.Stream()
    side.wait_stream(current)
    with where.stream(side):
        if x.is_cuda and not _capturing(x):
            torch.cuda._sleep(100_000)
        out = x * 3
    current.wait_stream(side)
    if not _capturing(x):
        _kept.append(out)
    return out


@torch.library.custom_op("sgc_test::host_list", mutates_args=())
def host_list(x: torch.Tensor) -> torch.Tensor:
    return x * _host[0]


@torch.library.custom_op("sgc_test::host_list_unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host_list_unsafe(x: torch.Tensor) -> torch.Tensor:
    return x * _host[0]


@torch.library.custom_op("sgc_test::host_list_attention", mutates_args=())
def host_list_attention(x: torch.Tensor) -> torch.Tensor:
    return x * _host[0]


elsewhere_strided.register_fake(lambda x: torch.empty_like(x).t().contiguous().t())
elsewhere_two.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])
for _op in (elsewhere, forks_and_joins, host_list, host_list_unsafe, host_list_attention):
    _op.register_fake(lambda x: torch.empty_like(x))

ELSEWHERE = tuple(
    f"sgc_test::{name}" for name in ("elsewhere", "elsewhere_strided", "elsewhere_two", "forks_and_joins")
)


@pytest.fixture(autouse=True)
def fresh_host_state() -> Any:
    _host[:] = [1.0]
    yield
    _kept.clear()


# -- results of cuts and breaks ----------------------------------------------------------------------------------------


CUT_CHAINS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "one": lambda m, x: m.b(ops.elsewhere(m.a(x))),
    "strided": lambda m, x: m.b(ops.elsewhere_strided(m.a(x))),
    "one of two is read": lambda m, x: m.b(ops.elsewhere_two(m.a(x))[1]),
    "both are read, later": lambda m, x: (lambda p: m.b(ops.elsewhere(m.b(p[0]))) + p[1])(ops.elsewhere_two(m.a(x))),
    "read by a cut and by a piece": lambda m, x: (lambda e: ops.elsewhere(e) + m.b(e))(ops.elsewhere(m.a(x))),
    "a view of it is read": lambda m, x: m.b(ops.elsewhere(m.a(x))[:, 2:10].repeat(1, 2)),
    "the caller's own goes into a cut": lambda m, x: m.b(ops.elsewhere(x)),
    # RC02
    "two in a row": lambda m, x: m.b(ops.elsewhere(ops.elsewhere(m.a(x)))),
    "two in a row, one forks": lambda m, x: m.b(ops.forks_and_joins(ops.elsewhere(m.a(x)))),
    "forked, then another": lambda m, x: m.b(ops.elsewhere(ops.forks_and_joins(m.a(x)))),
}


# RC01, RC02
@device
@routes("compiled", "tc_piecewise")
@pytest.mark.parametrize("chain", CUT_CHAINS)
def test_a_cuts_result_at_a_new_address_each_time_is_what_the_next_piece_reads(
    chain: str, route: str, device: str
) -> None:
    model = Model(CUT_CHAINS[chain], a=lin(), b=lin()).to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES, cuts=ELSEWHERE)
    churn = Churn(device, *(n * D for n in SIZES))
    with torch.no_grad():
        for k in range(30):
            x.copy_(torch.randn(26, D))
            churn()
            n = SIZES[k % 3]
            same(call(n), model(x[:n]))
    assert churn.unharmed()
    (graph,) = graphs()
    assert any(g.kind != "piece" for g in graph.split.groups)
    assert not graph.counters.failures


# RC01, RC02
@device
@pytest.mark.parametrize("forks", [False, True])
def test_a_breaks_result_at_a_new_address_each_time_is_what_the_next_segment_reads(forks: bool, device: str) -> None:
    first, second = lin().to(device), lin().to(device)
    broken = eager_on_graph(elsewhere)
    then = eager_on_graph(forks_and_joins) if forks else broken

    def forward(x: torch.Tensor) -> torch.Tensor:
        return second(then(broken(first(x)))) + x

    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    churn = Churn(device, *(n * D for n in SIZES))
    for k in range(30):
        x.copy_(torch.randn(26, D))
        churn()
        n = SIZES[k % 3]
        same(call(n), call.expected(n))
    assert churn.unharmed()


# RC01
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_a_cuts_result_that_is_returned_is_this_calls(outputs: str, device: str) -> None:
    model = Model(lambda m, x: (lambda e: (e, m.a(e), e[1:]))(ops.elsewhere(m.a(x))), a=lin()).to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded("compiled", device, model, x, sizes=(24, 8), cuts=ELSEWHERE, outputs=outputs)
    with torch.no_grad():
        for k in range(8):
            x.copy_(torch.randn(26, D))
            n = (24, 8)[k % 2]
            same(call(n), model(x[:n]))


# -- what is handed out, and what comes back in ------------------------------------------------------------------------


RESULTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "one": lambda m, x: m.a(x),
    "behind a cut": lambda m, x: m.b(ops.double(m.a(x))),
    "several": lambda m, x: (m.a(x), {"b": m.b(ops.double(x)), "n": x.shape[0]}),
    "views of one storage": lambda m, x: (lambda h: (h, h[1:], h.t()))(m.a(x)),
    "a cut's own": lambda m, x: ops.double(m.a(x)),
    "a view of an input": lambda m, x: (x[1:], m.a(x)),
    "0-dim": lambda m, x: m.a(x).sum(),
    "a reduction over rows": lambda m, x: ops.double(m.a(x)).amax(0),
}


# RC03
@device
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", RESULTS)
def test_results_that_are_held_stay_as_they_were(kind: str, dynamic: bool, device: str) -> None:
    model = Model(RESULTS[kind], a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=dynamic)
    other = compiled(Model(lambda m, x: m.a(x) * 3, a=lin()).to(device), dynamic=dynamic)
    held = []
    with torch.no_grad():
        for k in range(9):
            n = (5, 9, 7)[k % 3 if dynamic else 0]
            x = torch.randn(n, D, device=device)
            held.append((call(x), model(x)))
            other(torch.randn(n, D, device=device))  # its capture and its replays use the same pool
        for got, wanted in held:
            same(got, wanted)
        torch._dynamo.reset()
        sgc_backend.reset()
        call(torch.randn(5, D, device=device))
        for got, wanted in held:
            same(got, wanted)


# RC03
@device
def test_five_held_results_stack(device: str) -> None:
    layer = lin().to(device)
    call = compiled(layer, dynamic=False)
    with torch.no_grad():
        xs = [torch.randn(4, D, device=device) for _ in range(7)]
        same(torch.stack([call(x) for x in xs]), torch.stack([layer(x) for x in xs]))
    assert total("replayed") == 6


# RC03
@device
def test_static_outputs_are_the_written_contract_and_only_by_asking(device: str) -> None:
    layer = lin().to(device)
    call = compiled(layer, dynamic=False, outputs="static")
    with torch.no_grad():
        a, b = torch.randn(4, D, device=device), torch.randn(4, D, device=device)
        call(a)
        first = call(a)
        same(first, layer(a))
        second = call(b)
        same(second, layer(b))
        assert first.data_ptr() == second.data_ptr()
    assert sgc_backend.config.Options().outputs == "clone"
    assert "valid until the next replay" in (FullCudaGraphBackend.__doc__ or "")


FEEDS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "as it is": (lambda m, x: x @ m.a.weight + 1, lambda y: y),
    "behind a cut": (lambda m, x: m.b(ops.double(m.a(x)).tanh()), lambda y: y),
    "a cut's own": (lambda m, x: ops.double(m.a(x)).tanh(), lambda y: y),
    "into a cut": (lambda m, x: m.a(ops.double(x)).tanh(), lambda y: y),
    "into a cut and a piece": (lambda m, x: (m.a(ops.double(x)) + x).tanh(), lambda y: y),
    "into a later cut": (lambda m, x: (m.a(ops.double(m.b(x))) + ops.double(x)).tanh(), lambda y: y),
    "one of several": (lambda m, x: (m.b(x), m.a(ops.double(x)).tanh()), lambda y: y[1]),
    "transposed": (lambda m, x: m.a(x).tanh().t(), lambda y: y.t()),
    "a row shifted": (lambda m, x: m.a(x).tanh(), lambda y: y.roll(1, 0)),
    "a view with an offset": (lambda m, x: torch.cat((x[:1], m.a(x).tanh())), lambda y: y[1:]),
    "an overlapping view": (lambda m, x: torch.cat((x[:1], m.a(x).tanh())), lambda y: y[:-1]),
    "an input handed back": (lambda m, x: (x, m.a(x)), lambda y: (y[1] + y[0]).tanh()),
    "expanded": (lambda m, x: m.a(x).tanh(), lambda y: y[1:2].expand(5, -1)),
    "into a cut and handed back": (lambda m, x: (x[1:], m.a(ops.double(x)).tanh(), x.t()), lambda y: y[1]),
}


# RC05
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("feed", FEEDS)
def test_a_result_fed_back_as_the_next_input_is_right_at_each_step(feed: str, outputs: str, device: str) -> None:
    fn, pick = FEEDS[feed]
    model = Model(fn, a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=False, outputs=outputs)
    start = torch.randn(5, D, device=device)
    with torch.no_grad():
        for _ in range(2):
            mine = wanted = start
            for _ in range(10):
                got, expected = call(mine), model(wanted)
                same(got, expected)
                mine, wanted = pick(got), pick(expected)
    assert total("replayed") >= 18


# RC05
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_one_block_applied_to_its_own_output_six_times(outputs: str, device: str) -> None:
    block = Model(lambda m, x: m.b(ops.double(m.a(x)).tanh()) + x, a=lin(), b=lin()).to(device)
    call = compiled(block, outputs=outputs)
    with torch.no_grad():
        for n in (5, 9, 5, 9, 5):
            mine = wanted = torch.randn(n, D, device=device)
            for _ in range(6):
                mine, wanted = call(mine), block(wanted)
            same(mine, wanted)


# RC05
@device
def test_two_generations_that_are_held_feed_the_third(device: str) -> None:
    model = Model(lambda m, x, y: m.b(ops.double(m.a(x)).tanh()) + y, a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        mine = [torch.randn(4, D, device=device) for _ in range(2)]
        wanted = [t.clone() for t in mine]
        for _ in range(12):
            mine.append(call(mine[-1], mine[-2]))
            wanted.append(model(wanted[-1], wanted[-2]))
        same(mine, wanted)
        same(call(mine[3], mine[3]), model(wanted[3], wanted[3]))


# RC05
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_an_output_that_is_written_when_it_comes_back_is_right(outputs: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return m.a(x).tanh()

    model = Model(fn, a=lin()).to(device)
    call = compiled(model, dynamic=False, outputs=outputs)
    mine = torch.randn(4, D, device=device)
    wanted = mine.clone()
    with torch.no_grad():
        for _ in range(8):
            given, reference = mine, wanted
            mine, wanted = call(given), model(reference)
            same(mine, wanted)
            same(given, reference)
    # A static output lies where the replay would write, so every other call runs uncaptured.
    assert total("replayed") >= (7 if outputs == "clone" else 3)


# RC05
@device
@routes("tc_piecewise", "full", "breakable")
def test_a_decode_loop_copies_each_result_into_the_buffer_that_the_next_reads(route: str, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x)).tanh()), a=lin(), b=lin()).to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES)
    with torch.no_grad():
        for n in SIZES:
            wanted = x[:n].clone()
            for _ in range(10):
                wanted = model(wanted)
                x[:n].copy_(call(n))
                same(x[:n], wanted)


# RC06
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("sizes", ["equal", "f is larger", "g is larger"])
def test_two_compiled_functions_chained_through_one_pool(sizes: str, outputs: str, device: str) -> None:
    def g_body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = {"equal": x, "f is larger": x[:3], "g is larger": x.repeat(7, 1)}[sizes]
        return m.b(ops.double(m.a(y) * 2 + 1).relu()) - 1

    f_model = Model(lambda m, x: m.b(ops.double(m.a(x)).tanh()) * 3, a=lin(), b=lin()).to(device)
    g_model = Model(g_body, a=lin(), b=lin()).to(device)
    f, g = (compiled(m, dynamic=False, outputs=outputs) for m in (f_model, g_model))
    with torch.no_grad():
        for _ in range(5):  # g is captured while f's output lives
            x = torch.randn(40, D, device=device)
            same(g(f(x)), g_model(f_model(x)))
        if outputs == "clone":
            old, wanted = f(x), f_model(x)
            kept = old.clone()
            for _ in range(3):
                f(torch.randn(40, D, device=device))
                same(g(old), g_model(wanted))
                same(old, kept)
        same(g(f(g(f(x)).mean(0).expand(40, D).clone())), g_model(f_model(g_model(f_model(x)).mean(0).expand(40, D))))
    assert total("replayed") >= 8


# RC06
@device
@pytest.mark.parametrize("first_call", [True, False])
@routes("tc_piecewise", "full", "breakable")
def test_a_wrappers_static_output_goes_into_a_compiled_function(route: str, first_call: bool, device: str) -> None:
    f_model = Model(lambda m, x: m.b(ops.double(m.a(x)).tanh()) * 3, a=lin(), b=lin()).to(device)
    g_model = Model(lambda m, x: m.b(ops.double(m.a(x) * 2 + 1)) + x, a=lin(), b=lin()).to(device)
    x = torch.randn(26, D, device=device)
    f, g = Recorded(route, device, f_model, x, sizes=SIZES), compiled(g_model, outputs="static")
    with torch.no_grad():
        if not first_call:
            for n in SIZES * 2:
                g(torch.randn(n, D, device=device))
        for n in SIZES * 3:
            x.copy_(torch.randn(26, D))
            same(g(f(n)), g_model(f_model(x[:n])))


# RC06
@device
def test_every_row_of_a_static_output_goes_expanded_into_another_function(device: str) -> None:
    f_model = Model(lambda m, x: m.a(x).tanh(), a=lin()).to(device)
    g_model = Model(lambda m, e, x: (m.a(x) + 1).relu() * e, a=lin()).to(device)
    f, g = (compiled(m, dynamic=False, outputs="static") for m in (f_model, g_model))
    with torch.no_grad():
        x, z = torch.randn(64, D, device=device), torch.randn(200, D, device=device)
        f(x)
        f(x)
        for _ in range(2):
            g(z[:1].expand(200, -1), z)
        wanted = f_model(x)
        for row in range(64):  # where g's buffers lie among them is the allocator's business
            y = f(x)
            same(g(y[row : row + 1].expand(200, -1), z), g_model(wanted[row : row + 1].expand(200, -1), z))


# RC06
def test_a_cache_between_two_segments_of_the_pool_is_not_taken_for_pool_memory() -> None:
    def fn(m: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ops.add_one_(cache)
        return m.a(x)

    model = Model(fn, a=lin())
    call = compiled(model, dynamic=False)
    x, cache = torch.randn(4, D), torch.zeros(4, D)
    with torch.no_grad():
        call(x, cache)
        call(x, cache)
        (plan,) = (p for by in graphs()[0].plans.values() for p in by)
        far = 1 << 62
        plan.pool_spans = ((16, 32), *plan.pool_spans, (far, far + 16))
        plan.seal()
        same(call(x, cache), model.a(x))
    assert cache.eq(3).all()


# RC06
@device
def test_four_stages_of_different_sizes_and_dtypes_pass_their_outputs_on(device: str) -> None:
    bodies: list[Callable[[Any, torch.Tensor], Any]] = [
        lambda m, x: m.a(x).to(torch.float64),
        lambda m, x: ops.double(x.float()).repeat(3, 1),
        lambda m, x: m.a(x)[::3].clone(),
        lambda m, x: ops.double(m.a(x)) + x,
    ]
    models = [Model(fn, a=lin()).to(device) for fn in bodies]
    calls = [compiled(m, outputs="static") for m in models]
    with torch.no_grad():
        for n in (9, 5, 9, 5, 9, 5):
            mine = wanted = torch.randn(n, D, device=device)
            for call, model in zip(calls, models, strict=True):
                mine, wanted = call(mine), model(wanted)
            same(mine, wanted)


# -- keys --------------------------------------------------------------------------------------------------------------


def host_scalar(s: float) -> torch.Tensor:
    return torch.tensor(s)
