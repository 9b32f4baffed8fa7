"""What went wrong in public for others who capture graphs: each test is one reported case, named by its id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import (
    Injector,
    Whole,
    device,
    failing_piece,
    module,
    right,
    three_pieces,
)

from sgc_backend import FullCudaGraphBackend
from sgc_backend.errors import CaptureError

__all__ = ["only_graphs_of_this_test"]


gpu = pytest.mark.gpu


# Ops of this file, registered once a process.

_seen_shapes: set[Any] = set()
_scratch: dict[Any, torch.Tensor] = {}


@torch.library.custom_op("sgc_test::tunes", mutates_args=())
def tunes(x: torch.Tensor) -> torch.Tensor:
    key = (x.device, x.shape)
    if key not in _seen_shapes:  # as an autotuner does for a shape that it meets first
        _seen_shapes.add(key)
        module(x.device.type).synchronize()
    return x * 3


@torch.library.custom_op("sgc_test::counts_in_scratch", mutates_args=())
def counts_in_scratch(x: torch.Tensor) -> torch.Tensor:
    stream = module(x.device.type).current_stream().cuda_stream
    key = (x.device, stream, x.shape)
    if key not in _scratch:
        _scratch[key] = torch.zeros_like(x)
    counter = _scratch[key]
    counter.add_(1)
    out = x + counter
    counter.sub_(1)
    return out


@torch.library.custom_op("sgc_test::forks", mutates_args=())
def forks(x: torch.Tensor) -> torch.Tensor:
    where = module(x.device.type)
    side = where.Stream()
    side.wait_stream(where.current_stream())
    with where.stream(side):
        x.clone()
    return x * 2


@torch.library.custom_op("sgc_test::grabs", mutates_args=())
def grabs(x: torch.Tensor) -> torch.Tensor:
    if module(x.device.type).is_current_stream_capturing():
        torch.empty(8 << 30, dtype=torch.uint8, device=x.device)
    return x * 2


for _op in (tunes, counts_in_scratch, forks, grabs):
    _op.register_fake(lambda x: torch.empty_like(x))


def captured(where: Any, fn: Callable[[], Any], key: int = 4) -> FullCudaGraphBackend:
    """A wrapper with ``fn`` recorded under ``key``."""
    backend = FullCudaGraphBackend(module(where))
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(key, fn)
    return backend


def a_clean_model_works(device: str) -> None:
    """The backend and the wrapper still capture and replay right."""
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=False)
    before = total("replayed")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, D, device=device)
            same(call(x), model(x))
        assert total("replayed") >= before + 2
        backend = captured(device, lambda: model(x))
        same(backend.replay(4), model(x))
    backend.cleanup()


def in_threads(jobs: Iterable[Callable[[], None]]) -> None:
    """Run every job on a thread of its own; raises the first error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# FR01
@device
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_one_failed_size_does_not_wedge_the_others(piece: int, device: str) -> None:
    model, reference = three_pieces(device)
    call = compiled(model)
    right(call, model, reference, 32, device)
    (graph,) = graphs()
    with failing_piece(graph, piece, Injector(device, "raise", 1)):
        right(call, model, reference, 32, device)
    assert (32,) not in graph.plans
    assert sum(graph.counters.failures.values()) == 1
    for n in (16, 32, 16, 32, 16):
        right(call, model, reference, n, device)
    assert graph.counters.replayed[(16,)] == 2
    a_clean_model_works(device)


# FR01
@device
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_one_failed_key_of_a_wrapper_does_not_wedge_the_others(at: str, device: str) -> None:
    subject = Whole(device)
    counting = Injector(device, "raise", -1)
    subject.capture(16, counting)
    k = {"first": 0, "middle": counting.seen // 2, "last": counting.seen - 1}[at]
    with pytest.raises(ArithmeticError, match="injected"):
        subject.capture(32, Injector(device, "raise", k))
    assert not subject.backend.can_run(32)
    subject.replays_right(16)
    subject.capture(32)
    subject.replays_right(32)
    subject.replays_right(16)
    a_clean_model_works(device)
    subject.backend.cleanup()


# FR02
@device
def test_random_numbers_work_after_a_failed_capture(device: str) -> None:
    x = torch.ones(64, 64, device=device)
    fails: list[int] = [1]

    def forward() -> torch.Tensor:
        h = F.dropout(x)
        if fails and module(device).is_current_stream_capturing():
            h.sum().item()
        return h

    with pytest.raises(CaptureError):
        captured(device, forward)
    torch.randn(4, device=device)
    torch.manual_seed(1)
    first = F.dropout(x)
    torch.manual_seed(1)
    same(F.dropout(x), first)
    fails.clear()
    backend = captured(device, forward)
    torch.manual_seed(1)
    same(backend.replay(4), first)
    assert not torch.equal(backend.replay(4), first)
    backend.cleanup()


# FR04
@device
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_a_capture_whose_end_fails_answers_its_call_and_writes_once(piece: int, device: str) -> None:
    model, reference = three_pieces(device)
    call = compiled(model, dynamic=False)
    right(call, model, reference, 8, device)
    (graph,) = graphs()
    counting = Injector(device, "raise", -1)
    with failing_piece(graph, piece, counting):
        right(call, model, reference, 8, device)
    graph.release()
    right(call, model, reference, 8, device)
    # A fork at the last op that is never joined: nothing but the end of the capture can tell.
    with failing_piece(graph, piece, Injector(device, "unjoined", counting.seen - 1)):
        right(call, model, reference, 8, device)
    assert any("invalidated" in cause for cause in graph.counters.failures)
    for _ in range(3):
        right(call, model, reference, 8, device)
    graph.release()  # what torch._dynamo.reset() and sgc_backend.reset() do: then it is tried again
    before = sum(graph.counters.replayed.values())
    for _ in range(3):
        right(call, model, reference, 8, device)
    assert sum(graph.counters.replayed.values()) == before + 2
