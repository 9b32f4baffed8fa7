"""What PyTorch's own tests hold its CUDA graph trees to, where it concerns inference, asked of this backend.

Here, and in test_graph_trees_calls.py ("calls" below), are only the behaviours that no other test held yet:

- static inputs: addresses checked, recorded again when moved, in-place updates seen -- test_reports_weights.py;
  shared, empty and swapped ones of several layers -- test_by_address.py; unaligned, expanded, overlapping -- here
- inputs written, aliased, expanded, unaligned, fed back, with offsets -- test_reports_mutation.py, test_semantics.py
- results that alias inputs or one another -- test_reports_mutation.py, test_piecewise.py; one of them dropped -- here
- live results across calls and graphs, after a reset -- test_reports_replay.py; nothing kept alive by us -- here
- a static result that the next replay overwrites, handed back, written -- test_reports_replay.py, test_piecewise.py
- constants, functions without inputs, results without memory, tensors on meta -- here
- random numbers: seeds and states -- test_reports.py; every way to draw -- calls
- dynamic shapes, keys, limits on recordings -- test_reports_shapes.py, test_backend.py; mixed kinds of calls -- calls
- Python and host scalars -- test_reports_replay.py; index_put with accumulate -- test_reports_mutation.py
- one function compiled twice, dispatch over instances -- test_reports_api.py, test_semantics.py
- warm-up, side streams, threads -- test_reports.py, test_reports_breakable.py; autocast -- test_reports_weights.py
- reasons for not capturing -- test_capturable.py, test_backend.py; several devices -- calls
- failures in a capture, and what they leave -- test_injection.py, test_reports.py
- cuts in the middle: their results, writes, sizes from data, branches -- test_split.py, test_reports_splitting.py
- memory: phases and sizes share it -- test_memory.py, test_reports.py; depth costs none -- here
- state that layers keep themselves (batch norm, spectral norm), lazy layers -- here
- whole callables: random numbers, nothing to launch, one after the other -- calls; the rest -- test_full.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aliasing import calls_as_eager
from models import D, Model, lin, ops
from test_backend import compiled, device, graphs, only_graphs_of_this_test, same, total
from test_injection import pool_on
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import sgc_backend

__all__ = ["only_graphs_of_this_test"]


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device)


def replayed_all_but(warm_ups: int, calls: int) -> None:
    """Of ``calls`` calls all were replays but the warm-ups, and nothing failed."""
    assert total("replayed") == calls - warm_ups
    assert not [c for g in graphs() for c in g.counters.failures]


# -- what doesn't depend on the inputs ---------------------------------------------------------------------------------


@device
def test_results_that_never_change_are_the_callers_to_write_to(device: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.arange(3, device=device), torch.full((2, 2), 1.5, device=device), x + 1, x.new_zeros(4)

    call, held = compiled(fn, dynamic=False), []
    for k in range(5):
        x = rand(3, D, device=device)
        held.append(call(x))
        same(held[-1], fn(x))
        for result in held[-1]:
            result.fill_(k)
    for k, results in enumerate(held):  # neither computed again nor shared by two calls
        assert all(bool((result == k).all()) for result in results)
    replayed_all_but(1, 5)


@device
def test_a_tensor_from_around_the_function_is_read_written_and_returned_as_it_is_then(device: str) -> None:
    count, table = torch.zeros(3, device=device), rand(3, device=device)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count.add_(1)
        return x + count[0], table, table * 2

    call = compiled(fn, dynamic=False)
    for k in range(6):
        x = rand(3, D, device=device)
        got = call(x)
        same(got, (x + (k + 1), table, table * 2))
        assert got[1] is table
        assert count.tolist() == [k + 1.0] * 3
        table.mul_(1.25)
    replayed_all_but(1, 6)


@device
@pytest.mark.parametrize("fn", [lambda d: torch.ones(4, device=d) * 2, lambda d: torch.rand(4, device=d)])
def test_a_function_without_inputs_is_replayed_and_gives_new_results(fn: Callable[..., Any], device: str) -> None:
    call = compiled(lambda: fn(device), dynamic=False)
    results = []
    for k in range(5):
        torch.manual_seed(k)
        got = call()
        torch.manual_seed(k)
        same(got, fn(device))
        results.append(got)
    assert len({r.data_ptr() for r in results}) == 5
    replayed_all_but(1, 5)


@device
def test_what_has_no_memory_comes_and_goes_as_in_eager(device: str) -> None:
    class Empties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, D, device=device))

        def forward(self, x: torch.Tensor, e: torch.Tensor) -> Any:
            h = ops.double(x[:0])
            return x + 1, e * 2, h @ x.t(), torch.empty(0, device=device), (h, {}, [], None), self.none.sum(0) + x

    model = Empties()
    call = compiled(model, dynamic=False)
    calls_as_eager(call, model, lambda k: (rand(3, D, device=device), rand(0, 4, device=device)))
    replayed_all_but(1, 5)


@device
def test_tensors_on_meta_do_not_keep_the_rest_from_being_captured(device: str) -> None:
    call = compiled(lambda x, m: (x + 1, m * 2), dynamic=False)
    for _ in range(4):
        x = rand(3, D, device=device)
        got, shape = call(x, torch.empty(5, device="meta"))
        same(got, x + 1)
        assert shape.device.type == "meta" and shape.shape == (5,)
    replayed_all_but(1, 4)


# -- static inputs as modules have them --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Static inputs that are unaligned, expanded, and over one storage; two of them are written."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.w = nn.Parameter(rand(D * D + 1, device=where)[1:].view(D, D))
        self.register_buffer("rows", rand(1, D, device=where).expand(3, D))
        whole = rand(D + 4, D, device=where)
        self.register_buffer("head", whole[:D])
        self.register_buffer("tail", whole[4:])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.tail.mul_(0.5)
        h = x @ self.w + self.rows
        ops.add_one_(self.head)
        return h @ self.head, self.tail.sum(0), self.tail[1:], self.rows[0]


@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_static_inputs_that_lie_oddly_are_read_and_written_where_they_lie(inner: str, device: str) -> None:
    model = Odd(device)
    call, reference = compiled(model, dynamic=False, inner=inner), copy.deepcopy(model)  # keeps what shares memory
    with torch.no_grad():
        for _ in range(5):
            x = rand(3, D, device=device)
            got, wanted = call(x), reference(x)
            torch.testing.assert_close(got, wanted)
            assert got[2].data_ptr() == model.tail[1:].data_ptr()
            assert got[3].data_ptr() == model.rows.data_ptr()
            torch.testing.assert_close(model.state_dict(), reference.state_dict())
    replayed_all_but(1, 5)


UPDATING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(D),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(lin()),
}


@device
@pytest.mark.parametrize("name", UPDATING)
def test_layers_that_keep_statistics_update_them_once_a_call(name: str, device: str) -> None:
    model = UPDATING[name]().to(device).train()
    calls_as_eager(compiled(model, dynamic=False), model, lambda k: (rand(4, D, device=device),), 6)
    replayed_all_but(1, 6)


@device
def test_a_lazy_layer_that_gets_its_weights_in_its_first_call_is_captured(device: str) -> None:
    model = nn.LazyLinear(4).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(5):
            x = rand(3, D, device=device)
            same(call(x), model(x))
            model.weight.mul_(1.5)
    assert total("replayed") >= 3


@device
def test_weights_whose_storage_is_given_back_and_filled_again_are_the_new_ones(device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call, others = compiled(model, dynamic=False), []
    with torch.no_grad():
        for k in range(8):
            x = rand(3, D, device=device)
            same(call(x), model(x))
            if k % 3 == 2:
                for weight in model.parameters():
                    values, storage = weight.clone() * 1.5, weight.untyped_storage()
                    count = storage.nbytes()
                    storage.resize_(0)
                    others.append(torch.full((D * D,), 7e7, device=device))  # takes its place
                    storage.resize_(count)
                    weight.copy_(values)
        assert all(bool((t == 7e7).all()) for t in others)
    assert total("replayed") >= 5


# -- whose memory it is ------------------------------------------------------------------------------------------------


@device
def test_one_of_two_results_over_one_storage_may_go_first(device: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 3
        return h[:2], h[2:], h.t()

    call, held = compiled(fn, dynamic=False), []
    for k in range(9):
        x = rand(4, D, device=device)
        got, wanted = list(call(x)), list(fn(x))
        for results in (got, wanted):
            del results[k % 3]
            results[0].add_(1)  # seen through the one that overlaps it
        held.append((got, wanted))
    for got, wanted in held:
        same(got, wanted)
    replayed_all_but(1, 9)


@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_arguments_and_results_die_with_their_last_owner_in_every_phase(outputs: str, device: str) -> None:
    model = Model(lambda m, x, y: (m.b(ops.double(m.a(x))) + y, ops.double(y)), a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=False, outputs=outputs)
    with torch.no_grad():
        for k in range(5):  # warm-up, capture, replays
            x, y = rand(3, D, device=device), rand(3, D, device=device)
            given = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
            results = call(x, y)
            del x, y
            assert all(ref.expired() for ref in given)
            made = [StorageWeakRef(t.untyped_storage()) for t in results]
            del results
            if outputs == "clone" or k == 0:
                assert all(ref.expired() for ref in made)
    replayed_all_but(1, 5)


@device
def test_a_deep_model_takes_no_more_of_the_pool_than_a_shallow_one(device: str) -> None:
    taken = []
    for depth in (4, 24):
        layers = [nn.Linear(256, 256).to(device) for _ in range(depth)]

        def fn(x: torch.Tensor, layers: list[nn.Module] = layers) -> torch.Tensor:
            for layer in layers:
                x = ops.double(layer(x).relu()).tanh()
            return x

        call = compiled(fn, dynamic=False)
        with torch.no_grad():
            for _ in range(3):
                x = rand(512, 256, device=device)
                same(call(x), fn(x))
        taken.append(pool_on(device).reserved_bytes())
        torch._dynamo.reset()
        sgc_backend.reset()
    assert taken[1] <= taken[0] * 1.02
