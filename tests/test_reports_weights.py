"""What went wrong in public for others who capture graphs: weights and state that move, are shared, cast or updated."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable

import pytest
import torch
from models import D, Model, lin, ops
from routes import Churn, Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from torch import nn

import sgc_backend
from sgc_backend import eager_on_graph
from sgc_backend.errors import ReplayError

__all__ = ["only_graphs_of_this_test"]


SIZES = (24, 12, 8)  # none is D: Dynamo would take the two for one size


class Weighted(nn.Module):
    """State of every kind that models have: parameters, buffers, a plain tensor derived from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = lin(), nn.Linear(D, D, bias=False)
        self.register_buffer("scale", torch.rand(D))
        self.register_buffer("cache", torch.zeros(8, D), persistent=False)
        self.refresh()

    def refresh(self) -> None:
        self.transposed = self.b.weight.detach().t().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = ops.double(self.a(x)) * self.scale
        return h @ self.transposed + self.b(x) + self.cache[0]


def weighted(device: str) -> Weighted:
    model = Weighted().to(device)
    model.refresh()  # to() doesn't see a plain attribute
    return model


def _write(m: Weighted) -> None:
    for t in (*m.parameters(), *m.buffers()):
        t.copy_(torch.randn_like(t))
    m.transposed.copy_(m.b.weight.t())


def _swap_data(m: Weighted) -> None:
    for t in (*m.parameters(), *m.buffers()):
        t.data = torch.randn_like(t)


def _new_parameter(m: Weighted) -> None:
    m.a.weight = nn.Parameter(torch.randn_like(m.a.weight))
    m.b.weight = nn.Parameter(torch.randn_like(m.b.weight), requires_grad=False)


def _one_of_many(m: Weighted) -> None:
    m.a.bias = nn.Parameter(torch.randn_like(m.a.bias))


def _new_module(m: Weighted) -> None:
    m.a = lin().to(m.scale.device)


def _new_buffer(m: Weighted) -> None:
    m.scale = torch.rand_like(m.scale)
    m.register_buffer("cache", torch.randn_like(m.cache), persistent=False)


def _load_assigned(m: Weighted) -> None:
    m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True)


def _load(m: Weighted) -> None:
    m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()})


def _away_and_back(m: Weighted) -> None:
    device = m.scale.device
    if device.type == "cpu":  # there is nowhere else to go, but what comes back lies elsewhere
        for t in (*m.parameters(), *m.buffers()):
            t.data = t.data.clone() + 1
        return
    m.to("cpu")
    m.cpu().a.weight.add_(1)
    m.to(device)


def _offloaded(m: Weighted) -> None:
    kept = {k: v.detach().clone() for k, v in m.state_dict().items()}
    for t in (*m.parameters(), *m.buffers()):
        t.data = torch.empty(0, device=t.device)
    junk = [torch.full((D, D), 7e7, device=m.scale.device) for _ in range(16)]
    del junk
    for k, t in m.named_parameters():
        t.data = kept[k] * 2
    m.scale.data, m.cache.data = kept["scale"] + 1, torch.randn(8, D, device=kept["scale"].device)


def _derived(m: Weighted) -> None:
    m.b.weight.copy_(torch.randn_like(m.b.weight))
    m.refresh()


def _resized(m: Weighted) -> None:
    m.cache = torch.randn(32, D, device=m.cache.device)


# torch 2.11 itself keeps weak references to the tensors that Dynamo traced, as long as the graph's fakes are kept.
EXCHANGES = torch.__version__ >= "2.13"


def _exchanged(m: Weighted) -> None:
    torch.utils.swap_tensors(m.a.weight, nn.Parameter(torch.randn_like(m.a.weight)))


def _converted_by_exchange(m: Weighted) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.load_state_dict({k: torch.randn_like(t) for k, t in m.state_dict().items()})
        m.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES: dict[str, Callable[[Weighted], None]] = {
    f.__name__[1:]: f
    for f in (
        _write,
        _load,
        _swap_data,
        _new_parameter,
        _one_of_many,
        _new_module,
        _new_buffer,
        _load_assigned,
        _away_and_back,
        _offloaded,
        _derived,
        _resized,
        *((_exchanged, _converted_by_exchange) if EXCHANGES else ()),
    )
}
IN_PLACE = ("write", "load")


# WS01
@device
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_state_is_what_the_next_compiled_call_uses(change: str, dynamic: bool, device: str) -> None:
    model = Weighted().to(device)
    model.refresh()
    x = torch.randn(26, D, device=device)
    call = Recorded("compiled", device, model, x, sizes=SIZES if dynamic else (8,))
    churn = Churn(device, D, D * D, 8 * D)
    with torch.no_grad():
        for _ in range(3):
            captured = total("captured")
            CHANGES[change](model)
            gc.collect()
            churn()
            for n in (SIZES if dynamic else (8,)) * 2:
                x.copy_(torch.randn(26, D))
                same(call(n), model(x[:n]))
            if change in IN_PLACE:
                assert total("captured") == captured
    assert churn.unharmed()
    assert total("replayed") > 0


# WS01
@device
@pytest.mark.parametrize("change", ["new_parameter", "new_buffer", "new_module", "swap_data"])
def test_weights_that_are_swapped_to_and_fro_are_recorded_once_each(change: str, device: str) -> None:
    model = weighted(device)
    other = copy.deepcopy(model)
    CHANGES[change](other)
    states = [
        {k: t.data for k, t in (*m.named_parameters(), *m.named_buffers())}  # two sets that both stay alive
        for m in (model, other)
    ]
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(12):
            for name, t in (*model.named_parameters(), *model.named_buffers()):
                t.data = states[k % 2][name]
            x = torch.randn(8, D, device=device)
            same(call(x), model(x))
    assert total("captured") <= 2


# WS01
@device
def test_weights_that_move_at_every_call_do_not_record_without_limit(device: str) -> None:
    model = weighted(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(40):
            _swap_data(model)
            x = torch.randn(8, D, device=device)
            same(call(x), model(x))
    assert total("captured") <= 20
    assert len([p for g in graphs() for by in g.plans.values() for p in by]) <= 2


# WS01
@device
@routes("tc_piecewise", "full", "breakable")
@pytest.mark.parametrize("change", IN_PLACE)
def test_state_written_in_place_is_what_every_wrapper_replays(change: str, route: str, device: str) -> None:
    model = Weighted().to(device)
    model.refresh()
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES)
    with torch.no_grad():
        for _ in range(3):
            CHANGES[change](model)
            for n in SIZES:
                same(call(n), model(x[:n]))


# WS01
@device
@routes("tc_piecewise", "full", "breakable")
@pytest.mark.parametrize("change", [c for c in CHANGES if c not in IN_PLACE])
def test_moved_state_is_refused_by_every_wrapper_until_it_is_captured_again(
    change: str, route: str, device: str
) -> None:
    model = Weighted().to(device)
    model.refresh()
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES)
    churn = Churn(device, D, D * D, 8 * D)
    with torch.no_grad():
        for _ in range(3):
            CHANGES[change](model)
            gc.collect()
            churn()
            for n in SIZES:
                try:
                    got = call(n)
                except ReplayError as error:
                    assert re.search(r"moved since key \d+ was captured|its weights are gone", str(error))
                else:
                    assert device == "cuda"  # whose allocator may have given all of it the same place again
                    same(got, model(x[:n]))
            call.record(*SIZES)
            for n in SIZES * 2:
                x.copy_(torch.randn(26, D))
                same(call(n), model(x[:n]))
    assert churn.unharmed()


# WS01
@device
@routes("tc_piecewise", "full", "breakable")
def test_weights_that_come_back_to_where_they_were_are_replayed_again(route: str, device: str) -> None:
    model = weighted(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=(8,))
    home = model.a.weight.data
    with torch.no_grad():
        model.a.weight.data = torch.empty(0, device=device)  # offloaded
        with pytest.raises(ReplayError, match="moved"):
            call(8)
        home.copy_(torch.randn(D, D))
        model.a.weight.data = home
        same(call(8), model(x[:8]))


# WS01
@device
def test_a_break_uses_the_weights_of_its_replay(device: str) -> None:
    model = weighted(device)
    whole = eager_on_graph(lambda y: model(y))
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: whole(x * 2) + 1, x, sizes=SIZES)
    with torch.no_grad():
        for change in CHANGES:
            CHANGES[change](model)
            for n in SIZES:
                same(call(n), model(x[:n] * 2) + 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = lin(), lin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(ops.double(self.a(x)).tanh()) + x


# WS04
@device
@pytest.mark.parametrize("how", ["modules", "compile()", "method", "function"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_layers_that_share_code_use_their_own_weights(how: str, dynamic: bool, device: str) -> None:
    blocks = [Block().to(device) for _ in range(4)]
    if how == "modules":
        calls = [compiled(b, dynamic=dynamic) for b in blocks]
    elif how == "compile()":
        calls = [copy.copy(b) for b in blocks]
        for b in calls:
            options = {"inner": "eager", "cut_ops": ("sgc_test::double",), "capture_sizes": None}
            b.compile(backend=sgc_backend.sgc_piecewise, dynamic=dynamic, options=options)
    elif how == "method":
        calls = [compiled(b.forward, dynamic=dynamic) for b in blocks]
    else:
        one = compiled(lambda block, x: block(x), dynamic=dynamic)
        calls = [lambda x, b=b: one(b, x) for b in blocks]
    sizes = (12, 8) if dynamic else (8,)
    with torch.no_grad():
        for n in sizes * 4:
            x = torch.randn(n, D, device=device)
            mine = wanted = x
            for call, block in zip(calls, blocks, strict=True):
                same(call(x), block(x))
                mine, wanted = call(mine), block(wanted)
            same(mine, wanted)
        for call, block in zip(reversed(calls), reversed(blocks), strict=True):
            same(call(x), block(x))
    assert total("captured") <= 4 * len(sizes)
    assert total("replayed") > 20


# WS04
@device
@pytest.mark.parametrize("kind", ["tensor", "parameter", "marked static"])
def test_one_function_with_several_weights_as_arguments(kind: str, device: str) -> None:
    weights = [torch.randn(D, D, device=device) for _ in range(3)]
    if kind == "parameter":
        weights = [nn.Parameter(w, requires_grad=False) for w in weights]
    elif kind == "marked static":
        for w in weights:
            torch._dynamo.mark_static_address(w)
    fn = lambda x, w: ops.double(x @ w).relu() @ w + 1  # noqa: E731
    call = compiled(fn, dynamic=False)
    with torch.no_grad():
        for k in (0, 0, 0, 1, 0, 2, 1, 0, 2, 2, 1):
            x = torch.randn(8, D, device=device)
            same(call(x, weights[k]), fn(x, weights[k]))
        weights[1].copy_(torch.randn(D, D))
        same(call(x, weights[1]), fn(x, weights[1]))
        same(call(x, weights[1].clone()), fn(x, weights[1]))
    assert total("captured") <= 4
    assert total("replayed") > 0


# WS04
@device
def test_functional_calls_with_other_weights_use_those(device: str) -> None:
    block = Block().to(device)
    sets = [{k: torch.randn_like(v) for k, v in block.state_dict().items()} for _ in range(2)]
    call = compiled(lambda x, p: torch.func.functional_call(block, p, (x,)), dynamic=False)
    with torch.no_grad():
        for k in (0, 0, 0, 1, 1, 0, 1):
            x = torch.randn(8, D, device=device)
            same(call(x, sets[k]), torch.func.functional_call(block, sets[k], (x,)))


# WS04
@device
def test_tied_weights_are_one_weight(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))) @ m.a.weight, a=lin(), b=lin()).to(device)
    model.b.weight = model.a.weight
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(9):
            x = torch.randn(8, D, device=device)
            same(call(x), model(x))
            if k == 3:
                model.a.weight.mul_(2)
            elif k == 5:
                model.b.weight = nn.Parameter(torch.randn_like(model.a.weight))
            elif k == 7:
                model.a.weight = model.b.weight


# WS04
@device
def test_layers_that_die_take_their_recordings_along_and_new_ones_come(device: str) -> None:
    one = compiled(lambda block, x: block(x), dynamic=False)
    x = torch.randn(8, D, device=device)
    with torch.no_grad():
        for _ in range(6):
            block = Block().to(device)
            for _ in range(3):
                same(one(block, x), block(x))
            del block
            gc.collect()
            assert not [p for g in graphs() for by in g.plans.values() for p in by]
