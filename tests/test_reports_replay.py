"""What went wrong in public for others who capture graphs: replays that went on with what was true at capture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from routes import Churn, Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module, usable
from torch import nn

import sgc_backend
from sgc_backend import FullCudaGraphBackend, NotCapturedError, ShapeKey, eager_on_graph
from sgc_backend.errors import CutOpError, OptionError, ReplayError

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


@torch.library.custom_op("sgc_test::first_columns", mutates_args=())
def first_columns(x: torch.Tensor, k: int) -> torch.Tensor:
    return x[:, :k].sum(1)


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
first_columns.register_fake(lambda x, k: x.new_empty(x.shape[0]))
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


# -- Python around the recording ---------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Stores what it computed on the way, in one of the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.l1, self.l2 = how, lin(), lin()
        self.last: Any = None
        self.stats: dict[str, Any] = {}
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.l1(x)
        if self.how == "attribute":
            self.last = h
        elif self.how == "dict":
            self.stats["h"] = h
        elif self.how == "list":
            self.log[:] = [h]
        else:
            self.last = ops.double(h)
        return self.l2(h)

    def stored(self) -> Any:
        return {"dict": self.stats.get("h"), "list": self.log[-1] if self.log else None}.get(self.how, self.last)


# RC08
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("how", ["attribute", "dict", "list", "behind a cut"])
def test_what_forward_stores_is_this_calls_where_dynamo_runs(how: str, outputs: str, device: str) -> None:
    model = Remembers(how).to(device)
    reference = Remembers(how).to(device)
    reference.load_state_dict(model.state_dict())
    call = compiled(model, dynamic=False, outputs=outputs)
    held = []
    with torch.no_grad():
        for k in range(8):
            x = torch.randn(4, D, device=device)
            if k % 3 == 2:
                model.last = reference.last = torch.full((4, D), 9.0, device=device)
            same(call(x), reference(x))
            same(model.stored(), reference.stored())
            if outputs == "clone":
                held.append((model.stored(), reference.stored()))
        for got, wanted in held:
            same(got, wanted)
    assert total("replayed") > 0


# RC08
@device
@routes("tc_piecewise", "full", "breakable")
def test_replays_by_key_run_no_python_and_say_so(route: str, device: str) -> None:
    model = Remembers("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=(8,))
    mark = model.last = object()
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(26, D))
            same(call(8), model.l2(model.l1(x[:8])))
    assert model.last is mark
    assert call.backend is not None
    for kind in type(call.backend).__mro__[:2]:
        if "side effects such as attribute writes" in (kind.__doc__ or ""):
            break
    else:
        pytest.fail("the contract is not written down")


# RC08
@device
@routes("full", "breakable")
def test_an_attribute_that_kept_pool_memory_hurts_nobody(route: str, device: str) -> None:
    model = Remembers("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES)
    kept = model.last
    with torch.no_grad():
        for n in SIZES * 2:
            x.copy_(torch.randn(26, D))
            same(call(n), model.l2(model.l1(x[:n])))
        assert call.backend is not None
        call.backend.cleanup()
        gc.collect()
        again = Recorded(route, device, model, x, sizes=SIZES)
        for n in SIZES:
            same(again(n), model.l2(model.l1(x[:n])))
    del kept
    usable(device)


class Context:
    """What engines call a forward context: metadata that layers find without being given it."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths


context = Context(torch.zeros(1))


def masked(x: torch.Tensor) -> torch.Tensor:
    x = x.view(-1, D)  # or the second dimension would be dynamic as well
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.where((rows < context.lengths)[:, None], x * 2, torch.zeros_like(x))


# RC10
@device
@routes()
def test_metadata_found_through_a_global_follows_updates_in_place(route: str, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, masked, x, sizes=(8,))
    for length in (1, 8, 0, 5):
        context.lengths.fill_(length)
        x.copy_(torch.randn(26, D))
        same(call(8), call.expected(8))


# RC10
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
def test_metadata_rebound_in_a_global_is_the_new_one_where_dynamo_runs(dynamic: bool | None, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    call = compiled(masked, dynamic=dynamic)
    kept = []
    with torch.no_grad():
        for length in (3, 3, 3, 1, 8, 0, 5, 5):
            kept.append(context.lengths)
            context.lengths = torch.tensor([length], device=device)
            x = torch.randn(8, D, device=device)
            same(call(x), masked(x))
    assert total("replayed") > 0


# RC10
@device
@routes("tc_piecewise", "full", "breakable")
@pytest.mark.parametrize("old_lives", [True, False])
def test_metadata_rebound_in_a_global_is_refused_by_replays_by_key(old_lives: bool, route: str, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, masked, x, sizes=(8,))
    same(call(8), call.expected(8))
    old = context.lengths
    context.lengths = torch.tensor([5], device=device)
    if not old_lives:
        del old
    with pytest.raises(ReplayError, match=r"Context\.lengths moved since key 8 was captured"):
        call(8)
    call.record(8)
    same(call(8), call.expected(8))


# RC10
@device
def test_a_break_finds_the_metadata_of_its_replay(device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    broken = eager_on_graph(masked)
    layer = lin().to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: layer(broken(layer(x))), x, sizes=SIZES)
    for k, length in enumerate((1, 8, 0, 24, 5, 7)):
        context.lengths = torch.tensor([length], device=device)
        x.copy_(torch.randn(26, D))
        n = SIZES[k % 3]
        same(call(n), call.expected(n))


# -- keys --------------------------------------------------------------------------------------------------------------


def biased(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = ops.double(x * 3)
    return y if bias is None else y + bias


# RC11
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("lengths", ["equal", "mixed"])
def test_an_input_left_out_is_not_the_one_of_the_call_before(lengths: str, dynamic: bool | None, device: str) -> None:
    call = compiled(biased, dynamic=dynamic)
    with torch.no_grad():
        for k, given in enumerate([True, True, True, False, False, False, True, False, True]):
            n = (6, 9, 4)[k % 3] if lengths == "mixed" else 6
            x = torch.randn(n, D, device=device)
            bias = (torch.full((n, D), 1e4, device=device),) if given else ()
            same(call(x, *bias), biased(x, *bias))
    assert total("replayed") > 0


# RC11
@device
@routes("full", "breakable")
def test_variants_keep_callables_with_and_without_an_input_apart(route: str, device: str) -> None:
    x, bias = torch.randn(26, D, device=device), torch.full((26, D), 1e4, device=device)
    call = Recorded(route, device, biased, x, sizes=(8,))
    call.record(ShapeKey(8, "bias"), fn=lambda x: biased(x, bias[:8]))
    for variant in (None, "bias", None, None, "bias", "bias", None):
        x.copy_(torch.randn(26, D))
        same(call(ShapeKey(8, variant)), biased(x[:8], bias[:8] if variant else None))
    with pytest.raises(NotCapturedError, match="key 8/other"):
        call(ShapeKey(8, "other"))


# RC11
@device
@pytest.mark.parametrize("static", [True, False])
def test_shorter_longer_and_other_inputs_than_captured_are_never_partly_copied(static: bool, device: str) -> None:
    model = Model(lambda m, x, y: m.a(ops.double(x)) + y, a=lin()).to(device)
    call = compiled(model, dynamic=not static, capture_sizes=None if static else [8])
    with torch.no_grad():
        for n in (8, 8, 8, 5, 5, 11, 8, 5, 1, 11, 8):
            x, y = torch.randn(n, D, device=device), torch.randn(n, D, device=device)
            same(call(x, y), model(x, y))
        x = torch.randn(8, D, device=device)
        same(call(x, y[:1]), model(x, y[:1]))  # broadcast
        same(call(x, y[0]), model(x, y[0]))
        same(call(x.double().float(), x.t().contiguous().t()), model(x, x))
        with pytest.raises(Exception, match=r"size|shape|broadcast|expand"):
            call(x, torch.randn(5, D, device=device))
        same(call(x, x), model(x, x))
    assert total("replayed") > 0


# RC13
@device
@pytest.mark.parametrize("how", ["tagged", "attention", "named", "overload", "packet", "op"])
@pytest.mark.parametrize("empty", [(), [], set()])
def test_an_op_that_reads_the_host_is_cut_by_default_rules_or_by_name(how: str, empty: Any, device: str) -> None:
    if how not in ("tagged", "attention") and empty != ():
        pytest.skip("the list is not empty")
    op = {"tagged": ops.host_list_unsafe, "attention": ops.host_list_attention}.get(how, ops.host_list)
    sgc_backend.register_attention("sgc_test::host_list_attention")
    names: Any = {
        "named": ["sgc_test::host_list"],
        "overload": ["sgc_test::host_list.default"],
        "packet": [ops.host_list],
        "op": [host_list],
    }.get(how, empty)
    model = Model(lambda m, x: m.b(op(m.a(x))), a=lin(), b=lin()).to(device)
    call = torch.compile(
        model,
        backend=sgc_backend.sgc_piecewise,
        dynamic=True,
        options={"inner": "eager", "cut_ops": names, "capture_sizes": None},
    )
    with torch.no_grad():
        for value in (1.0, 1.0, 1.0, 2.0, -3.0, 0.5):
            _host[0] = value
            x = torch.randn(5, D, device=device)
            same(call(x), model(x))
    assert total("replayed") > 0


# RC13
@pytest.mark.parametrize("option", ["cut_ops", "capturable_ops"])
@pytest.mark.parametrize(
    "name",
    ["sgc_test::host_lits", "sgc_tset::host_list", "sgc_test::host_list.defualt", "host_list", "sgc_test.host_list"],
)
def test_a_misspelt_op_is_an_error_that_names_it(name: str, option: str) -> None:
    call = torch.compile(lin(), backend=sgc_backend.sgc_piecewise, options={option: [name]})
    with torch.no_grad(), pytest.raises(CutOpError, match=name.replace(".", r"\.")):
        call(torch.randn(4, D))


# RC13
def test_a_lone_name_in_place_of_the_list_is_an_error_and_no_list_of_letters() -> None:
    call = torch.compile(lin(), backend=sgc_backend.sgc_piecewise, options={"cut_ops": "sgc_test::host_list"})
    with torch.no_grad(), pytest.raises(OptionError, match="cut_ops must be a list"):
        call(torch.randn(4, D))


class Picks(nn.Module):
    """Takes a Python value that changes the kernel, from one of the places that it comes from."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.k, self.a = where, 3, lin()

    def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
        h = self.a(x)
        k = self.k if k is None else k
        if self.where == "slice":
            return ops.double(h)[:, :k].sum(1)
        if self.where == "list":
            return h[:, : k[0]].sum(1) + ops.double(h)[:, 0]
        if self.where == "flag":
            return h * 2 if k == "double" else ops.double(h) - 1
        return ops.first_columns(h, k) * 2


PICKS: dict[str, tuple[Any, ...]] = {
    "argument": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "attribute": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "slice": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "list": ([3], [3], [3], [5], [5], [3], [5]),
    "flag": ("double", "double", "double", "minus", "minus", "minus", "double", "minus"),
}


# RC15
@device
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("where", PICKS)
def test_a_python_value_that_changes_the_kernel_is_part_of_the_key(
    where: str, dynamic: bool | None, cut: bool, device: str
) -> None:
    model = Picks(where).to(device)
    call = compiled(
        model, dynamic=dynamic, **({"cut_ops": ("sgc_test::first_columns", "sgc_test::double")} if cut else {})
    )
    with torch.no_grad():
        for k in PICKS[where]:
            x = torch.randn(6, D, device=device)
            args = ()
            if where == "attribute":
                model.k = k
            else:
                args = (k,)
            same(call(x, *args), model(x, *args))
    assert total("replayed") > 0


# RC15
@device
@routes("full", "breakable")
def test_a_variant_for_each_python_value_and_none_for_others(route: str, device: str) -> None:
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, lambda x: ops.first_columns(x, 3), x, sizes=())
    for k in (3, 5):
        call.record(ShapeKey(8, k), fn=lambda x, k=k: ops.first_columns(x, k))
    for k in (3, 5, 5, 3):
        x.copy_(torch.randn(26, D))
        same(call(ShapeKey(8, k)), x[:8, :k].sum(1))
    for missing in (ShapeKey(8, 4), ShapeKey(8), 8, ShapeKey(9, 3)):
        with pytest.raises(NotCapturedError, match="recorded: 8/3, 8/5"):
            call(missing)


# RC15
@device
def test_a_break_whose_python_value_changes_reads_it_at_replay_or_says_so(device: str) -> None:
    k = [3]
    reads = eager_on_graph(lambda y, k: ops.first_columns(y, k[0]))
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: reads(x * 2, k) + 1, x, sizes=(8,))
    for value in (3, 5, 1, 3):
        k[0] = value
        same(call(8), call.expected(8))


class Scaled(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.scale, self.a = where, 1.0, lin()

    def forward(self, x: torch.Tensor, s: Any = None) -> torch.Tensor:
        h = self.a(x)
        if self.where == "cut":
            return ops.double(h) * s
        return h * (self.scale if s is None else s) + 1


def host_scalar(s: float) -> torch.Tensor:
    return torch.tensor(s)


SCALES = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.5, -0.0, 0.0, 3.0, float("inf"))


# RC16
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("kind", ["float", "host tensor", "host tensor, written", "device tensor", "numpy", "int"])
@pytest.mark.parametrize("where", ["argument", "attribute", "cut"])
def test_a_scale_that_changes_is_never_the_first_one(where: str, kind: str, dynamic: bool | None, device: str) -> None:
    model = Scaled(where).to(device)
    call = compiled(model, dynamic=dynamic)
    held = torch.tensor(1.0)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=32):
        for value in SCALES:
            x = torch.randn(6, D, device=device)
            s: Any = value
            if kind == "host tensor":
                s = torch.tensor(value)
            elif kind == "host tensor, written":
                s = held.fill_(value)
            elif kind == "device tensor":
                s = torch.tensor(value, device=device)
            elif kind == "numpy":
                s = pytest.importorskip("numpy").float32(value)
            elif kind == "int":
                s = int(min(value, 9))
            if where == "attribute":
                model.scale = s
                same(call(x), model(x))
            else:
                same(call(x, s), model(x, s))
    assert total("replayed") > 0 or (kind == "numpy" and dynamic is False)


# RC16
@device
@routes("tc_piecewise", "full", "breakable")
def test_a_scale_on_the_device_follows_its_buffer(route: str, device: str) -> None:
    layer, scale = lin().to(device), torch.ones((), device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, lambda x: layer(x) * scale, x, sizes=(8,))
    for value in SCALES:
        scale.fill_(value)
        same(call(8), call.expected(8))


# RC16
@device
@routes("tc_piecewise", "full", "breakable")
def test_a_float_scale_that_changed_is_refused_by_replays_by_key(route: str, device: str) -> None:
    model = Scaled("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=(8,))
    same(call(8), call.expected(8))
    for value in (2.0, 0.5, 1.0):
        model.scale = value
        if value == 1.0:
            same(call(8), call.expected(8))
        else:
            with pytest.raises(ReplayError, match=rf"scale changed from 1.0 to {value} since key 8 was captured"):
                call(8)


# RC16
@device
def test_a_break_reads_scales_on_the_host_as_they_are_at_replay(device: str) -> None:
    scale, box = torch.ones(()), {"s": 1.0}
    scaled = eager_on_graph(lambda y, t, b: y * t * b["s"])
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: scaled(x + 1, scale, box) - 1, x, sizes=(8,))
    for value in SCALES:
        scale.fill_(value)
        box["s"] = value
        torch.testing.assert_close(call(8), call.expected(8), equal_nan=True, rtol=0, atol=0)
