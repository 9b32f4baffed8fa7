"""Which keys are recorded: retries, room under max_recordings, static inputs that move."""

from __future__ import annotations

from typing import Any

import torch
from models import D, Model, lin
from test_backend import compiled, device, graphs, only_graphs_of_this_test, same, total
from test_padding import _lead, _residual, model_of, near, padded

__all__ = ["only_graphs_of_this_test"]


def test_max_recordings_bounds_the_recordings() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, max_recordings=2)
    with torch.no_grad():
        for n in (2, 3, 4, 5) * 3:
            x = torch.randn(n, D)
            same(call(x), model(x))
    (graph,) = graphs()
    assert sum(graph.counters.captured.values()) == 2
    assert graph.counters.uncaptured["max_recordings reached"] > 0


@device
def test_recordings_that_nobody_uses_make_room(device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model, max_recordings=3)
    with torch.no_grad():
        for n in [8, 8, 16, 16, 32, 32, *[100, 200, 300] * 120]:
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert sorted(graph.plans) == [(112,), (224,), (320,)]
    assert dict(graph.counters.evicted) == {(8,): 1, (16,): 1, (32,): 1}


@device
def test_recordings_that_take_turns_do_not_push_each_other_out(device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model, max_recordings=3)
    with torch.no_grad():
        for n in [8, 16, 32, 100, 200] * 40:
            x = _lead(n, device)
            near(call(x), model(x))
    (graph,) = graphs()
    assert not graph.counters.evicted
    assert graph.counters.uncaptured["max_recordings reached"] == 78  # the first call of each warms up


@device
def test_recordings_that_come_back_before_room_is_made_do_not_add_up(device: str) -> None:
    model = model_of(_residual, device)
    call = padded(model, max_recordings=3)
    with torch.no_grad():
        for n in [8, 8, 16, 16, 32, 32, *[16, 32, 100] * 100]:
            call(_lead(n, device))
            (graph,) = graphs()
            if graph._admission._idle:
                call(_lead(8, device))
            assert len(graph.plans) <= 3
    assert graph.counters.uncaptured["max_recordings reached"] > 64


def test_a_capture_that_failed_is_tried_again_later_and_not_for_ever() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        call(torch.randn(4, D))
        (graph,) = graphs()
        whole, tries = graph.recordable, []

        def fails(*args: Any) -> Any:
            tries.append(1)
            raise ArithmeticError("passing by")

        graph.recordable = [fails]
        for _ in range(60):
            x = torch.randn(4, D)
            same(call(x), model(x))
        assert len(tries) == 4
        graph.release()
        call(torch.randn(4, D))
        call(torch.randn(4, D))  # fails once more
        graph.recordable = whole
        for _ in range(4):
            x = torch.randn(4, D)
            same(call(x), model(x))
    assert total("replayed") == 2


def test_inputs_that_move_at_every_call_stop_being_recorded() -> None:
    model = Model(lambda m, x: m.a(x) + m.cache[:4], a=lin())
    call = compiled(model)
    with torch.no_grad():
        kept = []
        for _ in range(30):
            kept.append(model.cache)
            model.cache = torch.randn(64, D)
            x = torch.randn(4, D)
            same(call(x), model(x))
    assert total("captured") < 12
    assert any("update them in place" in c for g in graphs() for c in g.counters.uncaptured)


def test_inputs_that_move_at_every_call_are_not_tried_again_and_again() -> None:
    model = Model(lambda m, x: m.a(x) + m.cache[:4], a=lin())
    call = compiled(model)
    kept = []
    with torch.no_grad():
        for _ in range(80):
            kept.append(model.cache)
            model.cache = torch.randn(64, D)
            call(torch.randn(4, D))
    assert total("captured") < 16
