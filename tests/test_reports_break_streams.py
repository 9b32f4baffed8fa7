"""Reported cases: streams and threads around eager breaks, warm-up and capture."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import D, lin, ops
from routes import Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module, pool_on, usable
from test_reports import a_clean_model_works, gpu, in_threads
from test_reports_breakable import SIZES, broken

from sgc_backend import BreakableCudaGraphBackend, eager_on_graph
from sgc_backend.cuda_device import CudaDevice
from sgc_backend.emulated_device import EmulatedDevice
from sgc_backend.errors import CaptureError

__all__ = ["only_graphs_of_this_test"]


# -- streams and threads around breaks ---------------------------------------------------------------------------------


def busy(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(2_000_000)


# BR03
@device
@pytest.mark.parametrize("joined", ["in the same break", "in the next break", "behind the model"])
def test_work_that_a_break_starts_on_another_stream_is_ordered_as_it_is_eagerly(joined: str, device: str) -> None:
    where = module(device)
    side, event = where.Stream(), where.Event()
    shared = torch.zeros(66, D, device=device)

    @eager_on_graph
    def starts(y: torch.Tensor) -> None:
        current = where.current_stream()
        side.wait_stream(current)
        with where.stream(side):
            busy(device)
            shared[: y.shape[0]].copy_(y)
            event.record(side)
        if joined == "in the same break":
            current.wait_event(event)

    @eager_on_graph
    def joins() -> None:
        if joined == "in the next break":
            where.current_stream().wait_event(event)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        starts(y)
        z = (x + 1).relu()
        joins()
        return z if joined == "behind the model" else z + shared[: x.shape[0]]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for _ in range(50):
        x.copy_(torch.randn(66, D))
        where.current_stream().wait_stream(side)  # what starts() reads must not be overwritten
        n = random.choice(SIZES)
        busy(device)
        got = call(n).clone()
        where.current_stream().wait_event(event)
        mine = shared.clone()
        where.current_stream().wait_stream(side)
        same(got, call.expected(n))
        where.synchronize()
        same(mine[:n], x[:n] * 2)


def kept_for(side: Any, y: torch.Tensor) -> torch.Tensor:
    """A copy that a side stream may read after the break has returned: ``y`` itself is written over by what follows."""
    kept = y.clone()
    if kept.is_cuda:
        kept.record_stream(side)
    return kept


# BR03
@device
def test_a_capture_begins_while_work_of_a_break_is_under_way_on_another_stream(device: str) -> None:
    where = module(device)
    side = where.Stream()
    shared = torch.zeros(66, D, device=device)

    @eager_on_graph
    def starts(y: torch.Tensor) -> None:
        kept = kept_for(side, y)
        side.wait_stream(where.current_stream())
        with where.stream(side):
            busy(device)
            shared[: y.shape[0]].copy_(kept)  # nobody waits for it here

    def forward(x: torch.Tensor) -> torch.Tensor:
        starts(x * 2)
        return (x + 1).relu()

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=())
    for k in range(50):
        call.record(SIZES[k % 3])
        same(call(SIZES[k % 3]), (x[: SIZES[k % 3]] + 1).relu())
    where.synchronize()
    same(shared[:32], x[:32] * 2)


# BR03
@device
def test_a_wait_inside_a_segment_for_what_a_break_recorded_is_never_dropped_in_silence(device: str) -> None:
    where = module(device)
    side, event = where.Stream(), where.Event()

    @eager_on_graph
    def starts(y: torch.Tensor) -> None:
        side.wait_stream(where.current_stream())
        with where.stream(side):
            y.clone()
            event.record(side)

    def forward(x: torch.Tensor) -> torch.Tensor:
        starts(x * 2)
        where.current_stream().wait_event(event)  # of work outside of the capture: a graph can't hold that
        return x + 1

    x = torch.randn(66, D, device=device)
    with pytest.raises(CaptureError, match=r"key 12.*(segment|captur)"):
        Recorded("breakable", device, forward, x, sizes=(12,))
    usable(device)
    a_clean_model_works(device)


# BR03
@gpu  # the emulated device has no external events
@pytest.mark.parametrize("device", ["cuda"])
def test_a_segment_may_wait_for_an_external_event_that_a_break_records(device: str) -> None:
    try:
        event = torch.cuda.Event(external=True)
    except TypeError:
        pytest.skip("this torch has no external events")
    side = torch.cuda.Stream()
    shared = torch.zeros(66, D, device=device)

    @eager_on_graph
    def starts(y: torch.Tensor) -> None:
        kept = kept_for(side, y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy(device)
            shared[: y.shape[0]].copy_(kept)
            event.record(side)

    def forward(x: torch.Tensor) -> torch.Tensor:
        starts(x * 2)
        z = (x + 1).relu()
        torch.cuda.current_stream().wait_event(event)
        return z + shared[: x.shape[0]]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for k in range(50):
        x.copy_(torch.randn(66, D))
        n = SIZES[k % 3]
        same(call(n), (x[:n] + 1).relu() + x[:n] * 2)


# BR04
@device
@routes()
def test_captures_of_every_kind_live_with_a_thread_that_allocates_copies_and_asks(route: str, device: str) -> None:
    where = module(device)
    stop = threading.Event()
    rounds: list[int] = []

    def background() -> None:
        stream = where.Stream()
        with where.stream(stream):
            while not stop.is_set():
                host = torch.full((256,), float(len(rounds)))
                if device == "cuda":
                    host = host.pin_memory()
                there = host.to(device, non_blocking=True)
                event = where.Event()
                event.record()
                while not event.query():
                    pass
                if device == "cuda":
                    stream.synchronize()
                else:
                    where.synchronize()  # what a capture in "global" mode dies of there
                assert (there == float(len(rounds))).all()
                rounds.append(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        for _ in range(4):
            h = second(broken(h).tanh() if route == "breakable" else ops.double(h).tanh())
        return h

    def foreground() -> None:
        x = torch.randn(66, D, device=device)
        try:
            while not rounds:
                pass
            for k in range(20 if route in ("full", "breakable") else 3):
                torch._dynamo.reset()
                n = (12, 10, 8)[k % 3]
                call = Recorded(route, device, forward, x, sizes=(n,))
                same(call(n), call.expected(n))
                if call.backend is not None:
                    assert not call.backend.counters.failures
                    call.backend.cleanup()
        finally:
            stop.set()

    first, second = lin().to(device), lin().to(device)
    in_threads([background, foreground])
    assert rounds
    assert not [c for g in graphs() for c in g.counters.failures]


# -- between the warm-up and the capture -------------------------------------------------------------------------------


@contextlib.contextmanager
def noted(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[list[str]]:
    """What is asked of the device, in order: "synchronize" and "begin", between what the test notes itself."""
    kind = CudaDevice if device == "cuda" else EmulatedDevice
    order: list[str] = []
    synchronize, begin = kind.synchronize, kind.capture_begin

    def spied_synchronize(self: Any) -> None:
        order.append("synchronize")
        synchronize(self)

    def spied_begin(self: Any, *args: Any) -> None:
        order.append("begin")
        begin(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "synchronize", spied_synchronize)
        patch.setattr(kind, "capture_begin", spied_begin)
        yield order


# BR05
@device
@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize("measure", [False, True])
@routes()
def test_the_device_is_waited_for_between_each_warm_up_and_its_capture(
    route: str, measure: bool, in_session: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (measure and not in_session) or (route != "compiled" and not in_session):
        pytest.skip("wrappers capture in sessions, and only those measure")
    where = module(device)
    x = torch.randn(66, D, device=device)
    run: Any = None

    @torch.library.custom_op(f"sgc_test::warms_{next(serial)}", mutates_args=())
    def warms(x: torch.Tensor) -> torch.Tensor:
        if not where.is_current_stream_capturing():
            order.append("warm")
            side = where.Stream()
            side.wait_stream(where.current_stream())
            with where.stream(side):
                busy(device)
                x.clone()  # owned by work that nobody waits for
        return x * 2

    warms.register_fake(lambda x: torch.empty_like(x))
    pool_on(device).prepare_thread()
    with noted(monkeypatch, device) as order, torch.no_grad():
        if route == "compiled":
            run = compiled(lambda x: warms(x.view(-1, D)) + 1)
            opener = BreakableCudaGraphBackend(module(device))
            session = opener.capture_session(measure=measure) if in_session else contextlib.nullcontext()
            with session:
                for n in SIZES:
                    run(x[:n])
                    run(x[:n])
        else:
            Recorded(route, device, lambda x: warms(x.view(-1, D)) + 1, x, sizes=SIZES, measure=measure)
    assert order.count("begin") >= 3
    assert order.count("warm") >= 3
    for k, what in enumerate(order):
        if what == "begin":
            before = [w for w in order[:k] if w != "begin"]
            assert before and before[-1] == "synchronize", order[: k + 1]
    if run is not None:
        assert total("captured") == 3


serial = itertools.count()


# BR05
@gpu
@pytest.mark.parametrize("device", ["cuda"])
@routes()
def test_temporaries_of_warm_up_work_on_another_stream_are_not_overwritten_by_the_capture(
    route: str, device: str
) -> None:
    side = torch.cuda.Stream()
    sums: list[torch.Tensor] = []
    layer = lin().to(device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return late(layer(x)) * 2

    @torch.library.custom_op(f"sgc_test::late_{next(serial)}", mutates_args=())
    def late(x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            temporary = torch.ones(1 << 20, device=device)
            temporary.record_stream(side)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                sums.append(temporary.sum())
        return x + 1

    late.register_fake(lambda x: torch.empty_like(x))
    x = torch.randn(66, D, device=device)
    call = Recorded(route, device, forward, x, sizes=SIZES)
    for n in SIZES * 2:
        same(call(n), (layer(x[:n]) + 1) * 2)
    torch.cuda.synchronize()
    assert all(int(s) == 1 << 20 for s in sums)
