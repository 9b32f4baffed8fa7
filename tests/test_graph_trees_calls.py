"""More of what PyTorch's tests hold its CUDA graph trees to: numbers drawn, kinds of calls, devices, whole callables.

test_graph_trees_behaviours.py says which test covers which behaviour.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import D, ops
from routes import Recorded, routes
from test_backend import compiled, device, graphs, only_graphs_of_this_test, same, total
from torch import fx
from torch._subclasses import FakeTensorMode

import sgc_backend
from sgc_backend import StrictError

__all__ = ["only_graphs_of_this_test"]


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "random_": lambda x: x.clone().random_(1000),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x), 4),
    "multinomial, replaced": lambda x: torch.multinomial(torch.ones_like(x), 4, replacement=True),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 40.0)),
    "randint": lambda x: torch.randint(0, 1000, (9,), device=x.device),
    "randn_like": lambda x: torch.randn_like(x),
}


@device
@pytest.mark.parametrize("how", DRAWS)
def test_every_way_to_draw_goes_on_from_call_to_call_as_in_eager(how: str, device: str) -> None:
    draw = DRAWS[how]
    call = compiled(lambda x: (draw(x), ops.double(x), draw(x)), dynamic=False)
    x = torch.ones(3, D, device=device)
    call(x)
    torch.manual_seed(5)
    drawn = [call(x) for _ in range(4)]
    torch.manual_seed(5)
    same([(a, b) for a, _, b in drawn], [(draw(x), draw(x)) for _ in range(4)])
    assert len({tuple(t.flatten().tolist()) for a, _, b in drawn for t in (a, b)}) == 8
    assert total("replayed") >= 4  # Dynamo breaks the graph at some of them
    assert not [c for g in graphs() for c in g.counters.failures]


@device
def test_calls_of_many_kinds_in_turn_are_each_replayed_from_their_own_recording(device: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return ops.double(x * 2).sum(-1)

    makers: list[Callable[[], torch.Tensor]] = [
        lambda: rand(3, 4, device=device),
        lambda: rand(3, 4, device=device).double(),
        lambda: torch.randint(0, 5, (3, 4), device=device),
        lambda: rand(3, 4, 5, device=device),
        lambda: rand(4, 3, device=device).t(),
        lambda: rand(1, device=device),
        lambda: torch.randn(2, 2, dtype=torch.complex64, device=device),
        lambda: torch.randn(2, 2, dtype=torch.complex64, device=device).conj(),
    ]
    call = compiled(fn, dynamic=None)
    with torch._dynamo.config.patch(recompile_limit=32):
        for _ in range(5):
            for make in makers:
                x = make()
                same(call(x), fn(x))
    assert total("replayed") >= 4 * (len(makers) - 2)  # Dynamo makes sizes dynamic on the way
    assert not [c for g in graphs() for c in g.counters.failures]


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_on_several_devices_is_left_whole_and_names_them(strict: bool) -> None:
    with FakeTensorMode():  # no such device is needed to say that there are two
        values = [torch.empty(2, device=f"cuda:{k}") for k in range(2)]
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(nodes, values, strict=True):
        node.meta["example_value"] = value
    graph.output(tuple(nodes))
    gm = fx.GraphModule({}, graph)
    options = {"inner": "eager", "strict": strict}
    if strict:
        with pytest.raises(StrictError, match=r"several devices \(cuda:0, cuda:1\)"):
            sgc_backend.sgc_piecewise(gm, values, options=options)
        return
    left = sgc_backend.sgc_piecewise(gm, values, options=options)
    given = [torch.ones(2), torch.zeros(2)]
    same(left(*given), tuple(given))
    assert dict(left.counters.uncaptured) == {"the graph uses several devices (cuda:0, cuda:1)": 1}


# -- whole callables ---------------------------------------------------------------------------------------------------


@device
@routes("full", "breakable")
def test_a_whole_callable_draws_as_in_eager_from_replay_to_replay(route: str, device: str) -> None:
    x = torch.ones(4, D, device=device)
    names = [name for name in DRAWS if not name.startswith("multinomial") or device == "cpu"]  # CUDA's waits for it
    call = Recorded(route, device, lambda x: [DRAWS[name](x) for name in names], x, sizes=(4, 2))
    for n in (4, 2, 4, 2):
        torch.manual_seed(n)
        drawn = [[t.clone() for t in call(n)] for _ in range(2)]
        torch.manual_seed(n)
        same(drawn, [call.expected(n) for _ in range(2)])


@device
@routes("full", "breakable")
def test_a_callable_that_launches_nothing_is_recorded_and_replayed(route: str, device: str) -> None:
    x = rand(4, D, device=device)
    call = Recorded(route, device, lambda x: (x, x[1:], x.shape[0]), x, sizes=(4, 2))
    for n in (4, 2, 4):
        x.copy_(rand(4, D, device=device))
        rows, rest, count = call(n)
        same((rows, rest), (x[:n], x[1:n]))
        assert rows.data_ptr() == x.data_ptr() and count == n


@device
@routes("full", "breakable")
def test_three_recordings_in_a_row_hand_on_through_a_buffer_in_any_order(route: str, device: str) -> None:
    x, between = rand(64, D, device=device), torch.zeros(64, D, device=device)
    w = rand(D, D, device=device)
    first = Recorded(route, device, lambda x: (x @ w).relu() + 1, x, sizes=(64, 8))
    second = Recorded(route, device, lambda h: (h @ w).tanh() @ w - h, between, sizes=(64, 8))
    for n in (64, 8, 8, 64):
        x.copy_(rand(64, D, device=device))
        between[:n].copy_(first(n))
        between[:n].copy_(second(n))
        got = second(n)
        h = first.expected(n)
        for _ in range(2):
            h = (h @ w).tanh() @ w - h
        same(got, h)
