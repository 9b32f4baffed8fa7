"""What the breakable wrapper refuses, and what a refusal leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_breakable import device, module

import sgc_backend
from sgc_backend import BreakableCudaGraphBackend, eager_on_graph, emulated
from sgc_backend.errors import CaptureError, NestedReplayError, NotCapturedError, OptionError, ReplayError


def test_an_exception_in_a_break_is_the_one_that_is_seen_and_leaves_everything_clean() -> None:
    trouble: list[int] = []

    @eager_on_graph
    def broken(y: torch.Tensor) -> torch.Tensor:
        if trouble:
            raise LookupError("in the break")
        return y + 1

    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        trouble.append(1)
        with pytest.raises(LookupError, match="in the break"):
            backend.capture_one(4, lambda: broken(x * 2) * 2)
        assert not backend.can_run(4)
        trouble.clear()
        backend.capture_one(4, lambda: broken(x * 2) * 2)
    trouble.append(1)
    with pytest.raises(LookupError, match="in the break"):
        backend.replay(4)
    trouble.clear()
    assert torch.equal(backend.replay(4), (x * 2 + 1) * 2)


@device
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_segment_that_fails_leaves_nothing_and_the_next_capture_works(where: int, device: str) -> None:
    broken = eager_on_graph(lambda y: y + 1)
    backend = BreakableCudaGraphBackend(module(device))
    x = torch.ones(4, device=device)
    syncs = [False]

    def forward() -> torch.Tensor:
        y = x * 2
        for segment in range(3):
            if syncs[0] and segment == where and backend.device.is_capturing():
                y = y * y.sum().item()
            y = y * 3
            if segment < 2:
                y = broken(y)
        return y

    syncs[0] = True
    with backend.capture_session():
        with pytest.raises(CaptureError, match=f"segment {2 * where}"):
            backend.capture_one(4, forward)
        assert not backend.can_run(4)
        syncs[0] = False
        backend.capture_one(4, forward)
    torch.manual_seed(0)
    first = torch.rand(3, device=device)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3, device=device))
    assert torch.equal(backend.replay(4), forward())
    backend.cleanup()


def test_breaks_that_differ_between_warm_up_and_capture_are_refused() -> None:
    one, two = eager_on_graph(lambda y: y + 1), eager_on_graph(lambda y: y + 2)
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    for late, message in ((two, "in the warm-up run it was"), (None, "0 breaks were captured, the warm-up run had 1")):
        runs: list[int] = []

        def forward(late: Any = late, runs: list[int] = runs) -> torch.Tensor:
            runs.append(1)
            fn = one if len(runs) < 3 else late
            return fn(x * 2) if fn is not None else x * 2

        with backend.capture_session(), pytest.raises(CaptureError, match=message):
            backend.capture_one(4, forward)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (lambda y: y + 1, lambda y: (y + 1, y), "when it was captured it returned"),
        (lambda y: y + 1, lambda y: (y + 1)[:2], r"returned \(2,\) torch.float32"),
        (lambda y: y + 1, lambda y: (y + 1).double(), "torch.float64"),
        (lambda y: y[1:], lambda y: y[1:] + 1, "returned a view of its argument when it was captured"),
    ],
)
def test_a_break_that_returns_something_else_at_replay_is_named(then: Any, now: Any, message: str) -> None:
    body = [then]
    changing = eager_on_graph(lambda y: body[0](y))
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(4, lambda: changing(x * 2) * 2)
    body[0] = now
    with pytest.raises(ReplayError, match=message):
        backend.replay(4)
    body[0] = then
    backend.replay(4)


def test_a_replay_inside_a_break_of_the_same_pool_is_refused() -> None:
    full = sgc_backend.FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with full.capture_session():
        full.capture_one(4, lambda: x + 1)
    nested = eager_on_graph(capture_stub=lambda y: y + 1)(lambda y: full.replay(4) + y)
    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(4, lambda: nested(x * 2))
    with pytest.raises(NestedReplayError, match="inside a replay"):
        backend.replay(4)


def test_errors_name_what_is_missing() -> None:
    backend = BreakableCudaGraphBackend(emulated)
    with pytest.raises(NotCapturedError, match="breakable: nothing is recorded under key 4; recorded: none"):
        backend.replay(4)
    with pytest.raises(OptionError, match="capture_stub must be a callable"):
        eager_on_graph(lambda: None, capture_stub=3)
    with pytest.raises(CaptureError, match="outside a capture session"):
        backend.capture_one(4, lambda: None)


def test_a_break_on_another_stream_than_the_captures_is_refused_and_leaves_all_working() -> None:
    plain = eager_on_graph(lambda y: y + 1)
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        if backend.device.is_capturing():
            side = emulated.Stream()
            side.wait_stream(emulated.current_stream())
            with emulated.stream(side):
                return plain(x * 2)
        return plain(x * 2)

    with backend.capture_session():
        with pytest.raises(CaptureError, match="on another stream"):
            backend.capture_one(4, forward)
        backend.capture_one(4, lambda: plain(x * 2))
    assert torch.equal(backend.replay(4), x * 2 + 1)


def test_a_refused_break_that_the_callable_swallows_is_still_an_error() -> None:
    one, two = eager_on_graph(lambda y: y + 1), eager_on_graph(lambda y: y + 2)
    runs: list[int] = []
    x = torch.ones(4)

    def forward() -> torch.Tensor:
        runs.append(1)
        try:
            return (one if len(runs) < 3 else two)(x * 2)
        except CaptureError:
            return x

    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session(), pytest.raises(CaptureError, match="in the warm-up run it was"):
        backend.capture_one(4, forward)


def test_a_result_whose_tensors_cannot_be_followed_is_refused() -> None:
    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    hidden = eager_on_graph(lambda y: Holder(y))
    backend = BreakableCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session(), pytest.raises(CaptureError, match="can't be followed"):
        backend.capture_one(4, lambda: hidden(x * 2).tensor)


@pytest.mark.parametrize("change", [lambda y: y.t_(), lambda y: y.unsqueeze_(0), lambda y: y.resize_(1)])
def test_a_break_that_changes_its_arguments_shape_in_place_is_refused(change: Callable[[torch.Tensor], Any]) -> None:
    @eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        change(y)
        return y.reshape(-1).clone()

    x = torch.arange(6.0).view(2, 3)
    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session(), pytest.raises(CaptureError, match="changed the shape of its argument in place"):
        backend.capture_one(2, lambda: body(x * 2))
