"""What went wrong in public for others who capture graphs: breaks, what goes in and out of them, and what is around."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from routes import Churn, Recorded, routes
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module, pool_on, usable
from test_reports import a_clean_model_works, gpu, in_threads

from sgc_backend import BreakableCudaGraphBackend, eager_on_graph
from sgc_backend.cuda_device import CudaDevice
from sgc_backend.emulated_device import EmulatedDevice
from sgc_backend.errors import CaptureError, ReplayError

__all__ = ["only_graphs_of_this_test"]

SIZES = (64, 32, 12)  # none is D: Dynamo would take the two for one size


@torch.library.custom_op("sgc_test::times_world_", mutates_args=("x",))
def times_world_(x: torch.Tensor) -> None:
    x.mul_(3)


@torch.library.custom_op("sgc_test::times_world", mutates_args=())
def times_world(x: torch.Tensor) -> torch.Tensor:
    return x * 3


times_world_.register_fake(lambda x: None)
times_world.register_fake(lambda x: torch.empty_like(x))

# -- what goes into a break --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Given:
    first: torch.Tensor
    rest: list[torch.Tensor]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return broken(x * 2).relu() + 1


def _view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return broken(y[:, 1:9]).relu() + y.sum(1, keepdim=True)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return broken_nested({"a": [x * 2, (x + 1,)], "n": 3}, given=Given(x * 5, [x - 1])).relu()


def _later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = broken(x + 1)
    w = z * 3
    del z
    return broken(y) + broken(w)  # y was made two segments ago


def _own_result(x: torch.Tensor) -> torch.Tensor:
    return broken(broken(broken(x * 2))) + 1


def _several(x: torch.Tensor) -> torch.Tensor:
    a, b = two(x * 2)
    c = a.relu() + b
    return broken(b) + c + broken(a)


broken = eager_on_graph(lambda y: y.cumsum(0))
two = eager_on_graph(lambda y: (y + 1, y.flip(0)))
broken_nested = eager_on_graph(lambda d, given: d["a"][0] * d["n"] + d["a"][1][0] + given.first + given.rest[0])
INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (_plain, _view, _nested, _later, _own_result, _several)
}


# BR01
@device
@pytest.mark.parametrize("name", INTO)
def test_what_a_break_gets_is_its_own_buckets_whatever_was_captured_later(name: str, device: str) -> None:
    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, INTO[name], x, sizes=SIZES)
    other = Recorded("breakable", device, lambda x: broken((x - 3).tanh()) * 1e6, x, sizes=SIZES)
    order = [64, 32, 12, 64, *random.Random(0).choices(SIZES, k=20)]
    for n in order:
        x.copy_(torch.randn(66, D))
        other(random.Random(n).choice(SIZES))  # its values lie where those of the others lay
        for m in SIZES:
            if m != n:
                call(m)
        same(call(n), call.expected(n))


# BR01
@device
def test_a_break_that_keeps_what_it_got_finds_the_values_of_the_last_replay_there(device: str) -> None:
    kept: list[torch.Tensor] = []

    @eager_on_graph
    def keeps(y: torch.Tensor) -> torch.Tensor:
        kept[:] = [y]
        return y + 1

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: keeps(x * 2) * 3, x, sizes=(12,))
    for _ in range(3):
        x.copy_(torch.randn(66, D))
        same(call(12), call.expected(12))
    usable(device)


class Metadata:
    """A plain object that carries tensors to a break, as forward contexts do."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.scale: Any = None


by_object = eager_on_graph(lambda y, meta: y * meta.scale + (0 if meta.rows is None else meta.rows))


# BR01
@device
def test_an_object_that_carries_the_callers_own_tensors_into_a_break_is_read_at_replay(device: str) -> None:
    meta = Metadata()
    meta.scale = torch.tensor(2.0, device=device)
    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: by_object(x + 1, meta) - 1, x, sizes=SIZES)
    for k, n in enumerate(SIZES * 2):
        meta.scale = torch.tensor(float(k), device=device)
        same(call(n), call.expected(n))


# BR01
@device
@pytest.mark.parametrize("held", ["attribute", "in a list", "in a dict", "in an object"])
def test_an_object_that_carries_tensors_of_a_segment_into_a_break_is_refused(held: str, device: str) -> None:
    meta = Metadata()
    meta.scale = 1.0
    read = eager_on_graph(lambda y, meta: y + unwrapped(meta.rows))

    def unwrapped(value: Any) -> torch.Tensor:
        while not isinstance(value, torch.Tensor):
            value = (
                value.rows if isinstance(value, Metadata) else value["rows"] if isinstance(value, dict) else value[0]
            )
        return value

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows: Any = x * 2
        if held == "in a list":
            rows = [rows]
        elif held == "in a dict":
            rows = {"rows": rows}
        elif held == "in an object":
            inner = Metadata()
            inner.rows, rows = rows, inner
        meta.rows = rows
        return read(x + 1, meta) - 1

    x = torch.randn(66, D, device=device)
    with pytest.raises(CaptureError, match=r"Metadata.*can't be followed"):
        Recorded("breakable", device, forward, x, sizes=SIZES)
    meta.rows = None
    usable(device)
    a_clean_model_works(device)


# -- what comes out of a break -----------------------------------------------------------------------------------------

OUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "fresh": lambda y: y * 2,
    "several": lambda y: (y * 2, {"b": y + 1}),
    "another dtype": lambda y: y.double(),
    "transposed": lambda y: (y * 2).t().contiguous().t(),
    "a slice of something larger": lambda y: torch.cat((y, y + 1))[3 : 3 + y.shape[0]],
    "0-dim": lambda y: y.sum(),
    "broadcast": lambda y: y[:1].clone().expand(y.shape),
}


# BR02
@device
@pytest.mark.parametrize("name", OUT)
def test_the_memory_of_a_breaks_result_is_never_somebody_elses(name: str, device: str) -> None:
    marked = eager_on_graph(OUT[name])
    tensors = lambda r: [r] if isinstance(r, torch.Tensor) else [r[0], r[1]["b"]]  # noqa: E731

    def forward(x: torch.Tensor) -> torch.Tensor:
        return sum((t.float() * 3 + x.sum() for t in tensors(marked(x * 2))), x.mean())  # type: ignore[no-any-return]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    gc.collect()
    module(device).empty_cache()
    # The bytes of every result, and what rounding makes of them.
    churn = Churn(device, *(n * D for n in SIZES), *(n * D * 2 for n in SIZES), 1, 8, 128)
    for _ in range(4):
        churn()
    for n in SIZES * 3:
        x.copy_(torch.randn(66, D))
        same(call(n), call.expected(n))
        churn()
    assert churn.unharmed()


# BR02
@device
@pytest.mark.parametrize("whole", [True, False])
def test_a_view_of_the_bodys_own_cache_is_the_cache_when_a_segment_writes_to_it(whole: bool, device: str) -> None:
    cache = torch.zeros(66, D, device=device)

    @eager_on_graph
    def lookup(y: torch.Tensor) -> torch.Tensor:
        rows = cache if whole else cache[: y.shape[0]]  # another object each time, the same memory
        rows[: y.shape[0]].copy_(y)
        return rows.view(rows.shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        lookup(x * 2).add_(1)
        return cache * 2

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for n in (12, 64, 32, 12):
        x.copy_(torch.randn(66, D))
        before = cache.clone()
        got, mine = call(n).clone(), cache.clone()
        cache.copy_(before)
        same(got, call.expected(n))
        same(mine, cache)


# BR02
@device
@pytest.mark.parametrize("written", [False, True])
def test_a_view_of_the_bodys_own_cache_that_moves_is_followed_or_refused(written: bool, device: str) -> None:
    cache = torch.randn(66, D, device=device)
    at = [0]
    row = eager_on_graph(lambda y: cache[at[0] : at[0] + 1])

    def forward(x: torch.Tensor) -> torch.Tensor:
        r = row(x * 2)
        return x + (r.add_(1) if written else r)

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for n in SIZES:
        before = cache.clone()
        got = call(n).clone()
        cache.copy_(before)
        same(got, call.expected(n))
    at[0] = 7
    if written:
        with pytest.raises(ReplayError, match="returned memory that it keeps"):
            call(12)
    else:
        same(call(12), call.expected(12))
    usable(device)


# BR02
@device
@pytest.mark.parametrize("outputs", ["a break's result", "a view of it", "both"])
def test_a_breaks_result_that_is_the_output_lives_until_the_next_replay(outputs: str, device: str) -> None:
    def forward(x: torch.Tensor) -> Any:
        z = broken(x * 2)
        return {"a break's result": z, "a view of it": z[1:], "both": (z, z.t(), x + 1)}[outputs]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    churn = Churn(device, *(n * D for n in SIZES))
    for n in SIZES * 2:
        x.copy_(torch.randn(66, D))
        got = call(n)
        churn()
        same(got, call.expected(n))
    assert churn.unharmed()


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


# -- collectives as breaks and cuts ------------------------------------------------------------------------------------

WORLD = 3.0
REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place, the same tensor returned": lambda y: y.mul_(WORLD),
    "in place, nothing returned": lambda y: (y.mul_(WORLD), None)[1],
    "a new tensor": lambda y: y.clone().mul_(WORLD),
    "a tuple": lambda y: (y.clone().mul_(WORLD), None),
    "a tuple with the same tensor": lambda y: (y.mul_(WORLD), y),
    "a new tensor of another layout": lambda y: (y.t().contiguous() * WORLD).t(),
    "a view of a gathered one": lambda y: torch.cat((y, y * WORLD, y))[y.shape[0] : 2 * y.shape[0]],
    "a list": lambda y: [y * WORLD],
}


# BR07
@device
@pytest.mark.parametrize("flavour", REDUCTIONS)
def test_a_reduction_as_a_break_reaches_the_next_segment_in_every_flavour(flavour: str, device: str) -> None:
    body = REDUCTIONS[flavour]
    reduces = eager_on_graph(body)
    first, second = lin().to(device), lin().to(device)

    def forward(reduce: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        r = reduce(h)
        r = r[0] if isinstance(r, (tuple, list)) else r
        h = h if r is None else r
        h = second(h).relu()
        r = reduce(h)  # and once more
        r = r[0] if isinstance(r, (tuple, list)) else r
        return (h if r is None else r) + h

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: forward(reduces, x), x, sizes=SIZES)
    with torch.no_grad():
        for k in range(10):
            x.copy_(torch.randn(66, D))
            n = SIZES[k % 3]
            same(call(n), forward(body, x[:n]))


# BR07
@device
@routes("compiled", "tc_piecewise")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_reduction_as_a_cut_reaches_the_next_piece(in_place: bool, route: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        if in_place:
            ops.times_world_(h)
        else:
            h = ops.times_world(h)
        return m.b(h).relu() + h

    model = Model(fn, a=lin(), b=lin()).to(device)
    x = torch.randn(66, D, device=device)
    cuts = ("sgc_test::times_world_", "sgc_test::times_world")
    call = Recorded(route, device, model, x, sizes=SIZES, cuts=cuts)
    with torch.no_grad():
        for k in range(10):
            x.copy_(torch.randn(66, D))
            n = SIZES[k % 3]
            same(call(n), model(x[:n]))
    assert any(g.kind != "piece" for g in graphs()[0].split.groups)


@contextlib.contextmanager
def alone_in_a_group(device: str) -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("no process group can be made here")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist
    finally:
        dist.destroy_process_group()


# BR07
@device
@pytest.mark.parametrize("flavour", ["all_reduce", "all_reduce, async", "functional", "gather into"])
def test_a_real_collective_as_a_break(flavour: str, device: str) -> None:
    first, second = lin().to(device), lin().to(device)
    with alone_in_a_group(device) as dist:
        import torch.distributed._functional_collectives as functional

        @eager_on_graph
        def reduces(y: torch.Tensor) -> Any:
            if flavour == "all_reduce":
                dist.all_reduce(y)
                return y * 3
            if flavour == "all_reduce, async":
                dist.all_reduce(y, async_op=True).wait()
                return y.mul_(3)
            if flavour == "functional":
                return functional.all_reduce(y, "sum", dist.group.WORLD) * 3
            out = torch.empty_like(y)
            dist.all_gather([out], y)
            return out.mul_(3)

        x = torch.randn(66, D, device=device)
        call = Recorded("breakable", device, lambda x: second(reduces(first(x))).relu(), x, sizes=SIZES)
        with torch.no_grad():
            for k in range(10):
                x.copy_(torch.randn(66, D))
                n = SIZES[k % 3]
                same(call(n), second(first(x[:n]) * 3).relu())


# BR07
@device
@pytest.mark.parametrize("flavour", ["all_reduce", "functional"])
def test_a_real_collective_in_a_compiled_model(flavour: str, device: str) -> None:
    with alone_in_a_group(device) as dist:
        import torch.distributed._functional_collectives as functional

        def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
            h = m.a(x)
            if flavour == "all_reduce":
                dist.all_reduce(h)
            else:
                h = functional.all_reduce(h, "sum", dist.group.WORLD)
            return m.b(h).relu() + 1

        model = Model(fn, a=lin(), b=lin()).to(device)
        call = compiled(model, dynamic=False)
        with torch.no_grad():
            for _ in range(6):
                x = torch.randn(4, D, device=device)
                same(call(x), m_without(model, x))
        assert total("replayed") > 0
        assert not [c for g in graphs() for c in g.counters.failures]


def m_without(model: Any, x: torch.Tensor) -> torch.Tensor:
    """What the model gives in a world of one: a sum over one rank changes nothing."""
    return model.b(model.a(x)).relu() + 1
