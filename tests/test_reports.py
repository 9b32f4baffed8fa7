"""What went wrong in public for others who capture graphs: each test is one reported case, named by its id."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import random
import subprocess
import sys
import threading
import traceback
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
    pool_on,
    right,
    three_pieces,
    usable,
)
from torch import nn

import sgc_backend
from sgc_backend import FullCudaGraphBackend, emulated
from sgc_backend.capture import record
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


# -- rng ---------------------------------------------------------------------------------------------------------------


# RN01
@device
@pytest.mark.parametrize("where", ["first piece", "second piece", "whole"])
def test_dropout_masks_differ_from_call_to_call(where: str, device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        if where == "second piece":
            return F.dropout(ops.double(m.a(x)) * 0 + 1) / 2
        h = F.dropout(m.a(x) * 0 + 1) / 2
        return ops.double(h) / 2 if where == "first piece" else h

    model = Model(fn, a=lin()).to(device)
    x = torch.randn(32, D, device=device)
    if where == "whole":
        backend = captured(device, lambda: model(x))
        call = lambda x: backend.replay(4).clone()  # noqa: E731
    else:
        call = compiled(model, dynamic=False)
    with torch.no_grad():
        call(x)
        masks = [call(x) for _ in range(5)]
        for a, b in itertools.combinations(masks, 2):
            assert not torch.equal(a, b)
        mean = torch.stack([call(x) for _ in range(200)]).mean()
    assert abs(mean.item() - 0.5) < 0.02
    if where == "whole":
        backend.cleanup()
    else:
        assert total("replayed") == 205


def random_state(device: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        if device == "cuda"
        else (torch.get_rng_state, torch.set_rng_state)
    )


# RN02
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_seeds_and_saved_states_act_on_replays_as_on_eager(kind: str, device: str) -> None:
    x = torch.randn(8, D, device=device)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return x * 0 + torch.rand_like(x)

    if kind == "whole":
        backend = captured(device, lambda: eager(x))
        f = lambda x: backend.replay(4).clone()  # noqa: E731
    else:
        f = compiled(eager, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            f(x)
        results = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            results.append((f(x), f(x)))
        same(results[0], results[1])
        assert not torch.equal(results[0][0], results[2][0])
        assert not torch.equal(results[0][0], results[0][1])
        torch.manual_seed(0)
        same((eager(x), eager(x)), results[0])
        get, put = random_state(device)
        state = get()
        first = f(x)
        put(state)
        same(f(x), first)
        torch.manual_seed(5)
        mixed = [f(x), torch.rand_like(x), f(x), torch.rand_like(x)]
        for a, b in itertools.combinations(mixed, 2):
            assert not torch.equal(a, b)
        torch.manual_seed(5)
        same(mixed, [eager(x) if k % 2 == 0 else torch.rand_like(x) for k in range(4)])
    if kind == "whole":
        backend.cleanup()


# RN03
@device
@pytest.mark.parametrize("order", list(itertools.permutations(["inference", "no_grad", "grad"])))
def test_captures_under_any_order_of_modes_work(order: tuple[str, ...], device: str) -> None:
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": contextlib.nullcontext}
    for mode in order:
        torch._dynamo.reset()
        model = Model(lambda m, x: m.b(ops.double(m.a(x)) + torch.rand_like(x) * 0), a=lin(), b=lin())
        model = model.to(device).requires_grad_(False)
        call = compiled(model, dynamic=False)
        before = total("replayed")
        with modes[mode]():
            for _ in range(3):
                x = torch.randn(4, D, device=device)
                same(call(x), model(x))
        assert total("replayed") == before + 2


# -- capture failure ---------------------------------------------------------------------------------------------------


def _mask(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    return y[y > 0].sum() + m.b(x).sum()


HOST_READS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mask": _mask,
    "unique": lambda m, x: torch.unique(m.a(x).round()).sum() + m.b(x).sum(),
    "item": lambda m, x: m.a(x) * m.b(x).sum().item(),
    "tolist": lambda m, x: m.a(x) * m.b(x).sum(1).tolist()[0],
    "repeat_interleave": lambda m, x: torch.repeat_interleave(m.a(x), (m.b(x)[:, 0] > 0).long() + 1, dim=0),
}


# CF01
@device
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_cut_or_broken_at_and_equal_eager(name: str, in_graph: bool, device: str) -> None:
    model = Model(HOST_READS[name], a=lin(), b=lin()).to(device)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=in_graph, capture_dynamic_output_shape_ops=in_graph),
        torch.no_grad(),
    ):
        call = compiled(model, dynamic=False)
        for _ in range(4):
            x = torch.randn(5, D, device=device)
            same(call(x), model(x))
    assert not [c for g in graphs() for c in g.counters.failures]
    assert total("replayed") > 0


# CF01
@device
@pytest.mark.parametrize("name", HOST_READS)
def test_a_host_read_in_a_whole_callable_is_an_error_that_leads_to_its_line(name: str, device: str) -> None:
    if name == "tolist" and device == "cpu":
        pytest.skip("tolist() of a host tensor escapes the emulated device")
    model = Model(HOST_READS[name], a=lin(), b=lin()).to(device)
    x = torch.randn(5, D, device=device)
    # Some reads torch refuses before the capture is hurt; such an error is the user's to see as it is.
    with pytest.raises(RuntimeError, match=r"full, key 4|during CUDA graph capture") as raised:
        captured(device, lambda: model(x))
    cause = raised.value.__cause__ if isinstance(raised.value, CaptureError) else raised.value
    assert "not permitted" in str(cause) or "during CUDA graph capture" in str(cause)
    lines = traceback.extract_tb(cause.__traceback__)
    assert any(frame.name == HOST_READS[name].__name__ and frame.filename == __file__ for frame in lines)
    del raised, cause
    usable(device)
    a_clean_model_works(device)


# CF03
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_every_size_is_warmed_up_with_its_own_shape_before_it_is_captured(kind: str, device: str) -> None:
    _seen_shapes.clear()
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.tunes(m.a(x))), a=lin(), b=lin()).to(device)
    x = torch.randn(64, D, device=device)
    with torch.no_grad():
        if kind == "whole":
            for n in (32, 8, 16):
                backend = captured(device, lambda n=n: model(x[:n]), n)
                same(backend.replay(n), model(x[:n]))
                backend.cleanup()
            return
        call = compiled(model, capture_sizes=[8, 16, 32])
        for n in (32, 8, 16) * 3:
            same(call(x[:n]), model(x[:n]))
    (graph,) = graphs()
    assert len(graph.split.groups) == 1
    assert not graph.counters.failures
    assert sum(graph.counters.replayed.values()) == 6


FIRST_USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "fft": lambda x: torch.fft.fft(x).abs(),
}


# CF04
@device
@pytest.mark.parametrize("name", FIRST_USES)
def test_a_librarys_first_use_on_a_new_thread_inside_a_capture(name: str, device: str) -> None:
    pool = pool_on(device)
    x = torch.randn(64, 64, device=device)
    use = FIRST_USES[name]

    def work() -> None:
        with torch.no_grad():
            try:
                graph, out = record(pool, lambda: use(x), "cold")
            except CaptureError as error:  # a library that can't be made ready beforehand
                assert error.__cause__ is not None
                assert name != "matmul"
            else:
                graph.replay()
                torch.testing.assert_close(out, use(x))
                pool.drop(graph)
            with pool.warming_up():
                use(x)
            graph, out = record(pool, lambda: use(x), "warm")
            graph.replay()
            torch.testing.assert_close(out, use(x))
            del out
            pool.drop(graph)

    in_threads([work])
    usable(device)


COLD = """
import torch
from sgc_backend.capture import record
from sgc_backend.devices import device_of
from sgc_backend.pools import pool_of
x = torch.full((64, 64), 2.0, device="cuda")
graph, out = record(pool_of(device_of(torch.cuda)), lambda: x @ x, "cold")
graph.replay()
assert (out == 256).all()
print("right")
"""


# CF04
@gpu
def test_the_first_matmul_of_a_process_may_be_inside_a_capture() -> None:
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "right", done.stderr


class Ordered(nn.Module):
    """Builds an index on the host at every call, in one of the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.order, self.a = how, [0, 2, 1], lin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.how == "list":
            return h[:, torch.tensor(self.order, device=x.device)] * 2
        if self.how == "arange":
            return h * torch.arange(x.shape[1]).to(x.device) + self.order[0]
        numpy = pytest.importorskip("numpy")
        mask = torch.from_numpy(numpy.array(self.order, dtype="int64")).to(x.device)
        return h[:, mask] * 2


# CF05
@device
@pytest.mark.parametrize("how", ["list", "arange", "numpy"])
def test_tensors_made_of_host_data_follow_the_data(how: str, device: str) -> None:
    model = Ordered(how).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for order in ([0, 2, 1], [1, 0, 5], [0, 2, 1]):
            model.order = order
            for _ in range(3):
                x = torch.randn(4, D, device=device)
                same(call(x), model(x))


# CF05
@device
@pytest.mark.parametrize("how", ["list", "arange"])
def test_a_copy_from_pageable_memory_in_a_whole_callable_is_an_error_or_right(how: str, device: str) -> None:
    model = Ordered(how).to(device)
    x = torch.randn(4, D, device=device)
    try:
        backend = captured(device, lambda: model(x))
    except RuntimeError as error:
        assert isinstance(error, CaptureError) or "during CUDA graph capture" in str(error)
    else:
        for _ in range(3):
            x.copy_(torch.randn(4, D))
            junk = [torch.empty(k, dtype=torch.int64).fill_(7) for k in (3, D, 64)]
            with torch.no_grad():
                same(backend.replay(4), model(x))
            del junk
        backend.cleanup()
    usable(device)
    a_clean_model_works(device)


# CF07
@device
def test_our_own_debug_logging_does_not_touch_tensors(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    with caplog.at_level(logging.DEBUG, logger="sgc_backend"), torch.no_grad():
        call = compiled(model, dynamic=False)
        for _ in range(3):
            x = torch.randn(4, D, device=device)
            same(call(x), model(x))
        backend = captured(device, lambda: model(x))
        same(backend.replay(4), model(x))
        backend.cleanup()
    assert total("replayed") == 2
    assert not [c for g in graphs() for c in g.counters.failures]


# CF07
@gpu  # printing takes every mode off, so that the emulated device does not see it
@pytest.mark.parametrize("device", ["cuda"])
def test_a_users_print_of_a_tensor_is_a_readable_error_and_leaves_nothing(device: str) -> None:
    model = nn.Sequential(lin(), lin()).to(device)
    seen: list[str] = []
    hook = model[0].register_forward_hook(lambda m, args, out: seen.append(f"{out}"))
    x = torch.randn(4, D, device=device)
    with pytest.raises(CaptureError, match="full, key 4"):
        captured(device, lambda: model(x))
    assert len(seen) == 2  # both warm-up runs
    usable(device)
    hook.remove()
    a_clean_model_works(device)


# CF07
@device
def test_a_hook_that_logs_tensors_is_left_to_eager(device: str) -> None:
    logger = logging.getLogger("sgc_test.hook")
    model = nn.Sequential(lin(), lin()).to(device)
    seen: list[str] = []

    @torch._dynamo.disable
    def log(m: Any, args: Any, out: torch.Tensor) -> None:
        seen.append(f"{out}")
        logger.debug("%s", seen[-1])

    model[0].register_forward_hook(log)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, D, device=device)
            seen.clear()
            same(call(x), model(x))
            assert len(seen) == 2  # the compiled call and the reference
            assert seen[0] == seen[1]
    assert not [c for g in graphs() for c in g.counters.failures]
    if device == "cpu":  # some versions of Dynamo leave the whole call to eager
        assert total("replayed") > 0


# CF09
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_a_fork_that_is_never_joined_is_an_error_that_says_so(kind: str, device: str) -> None:
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.forks(m.a(x))), a=lin(), b=lin()).to(device)
    x = torch.randn(4, D, device=device)
    a_clean_model_works(device)
    reserved = pool_on(device).reserved_bytes()
    if kind == "whole":
        for _ in range(3):
            with pytest.raises(CaptureError, match="unjoined"):
                captured(device, lambda: model(x))
    else:
        call = compiled(model, dynamic=False)
        with torch.no_grad():
            for _ in range(3):
                same(call(x), model(x))
        assert any("unjoined" in c for g in graphs() for c in g.counters.failures)
    usable(device)
    assert abs(pool_on(device).reserved_bytes() - reserved) <= 2 << 20
    a_clean_model_works(device)


def _branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x - 1


# CF11
@device
def test_a_branch_on_data_is_never_frozen(device: str) -> None:
    model = Model(_branch).to(device)
    call = compiled(model, dynamic=False)
    ones = torch.ones(4, D, device=device)
    with torch.no_grad():
        for sign in (1, -1, 1, 1, -1, -1, 1):
            same(call(ones * sign), model(ones * sign))
        whole = torch.compile(model, backend=sgc_backend.sgc_piecewise, fullgraph=True, options={"inner": "eager"})
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(ones)
    with pytest.raises(CaptureError, match="full, key 4"):
        captured(device, lambda: model(ones))
    usable(device)
    a_clean_model_works(device)


# -- memory pool -------------------------------------------------------------------------------------------------------


# MP01
@device
@pytest.mark.parametrize("kind", ["compiled", "whole", "recorded", "aborted first"])
def test_the_handle_outlives_every_graph_while_outputs_live(kind: str, device: str) -> None:
    where = module(device)
    pool = pool_on(device)
    kept: list[Any] = []
    if kind == "aborted first":
        x = torch.ones(64, device=device)
        try:
            record(pool, lambda: (x * 2).sum().item(), "aborted")
        except CaptureError as error:
            kept.append(error)
    for cycle in range(3):
        model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
        x = torch.randn(4, D, device=device)
        with torch.no_grad():
            if kind == "compiled":
                call = compiled(model, dynamic=False, outputs="static" if cycle else "clone")
                for _ in range(3):
                    out = call(x)
                same(out, model(x))
                del call
            elif kind == "whole":
                backend = captured(device, lambda model=model, x=x: model(x))
                out = backend.replay(4)
                same(out, model(x))
                del backend
            else:
                graph, out = record(pool, lambda model=model, x=x: model(x), "test")  # really holds pool memory
                graph.replay()
                same(out, model(x))
                pool.drop(graph)
                del graph
        kept.append(out)
        del model, out
        gc.collect()
        torch._dynamo.reset()
        where.empty_cache()
    usable(device)


# MP03
@device
def test_a_recording_survives_the_death_of_the_one_before_it(device: str) -> None:
    n, dtype = (2048, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) / n**0.5 for _ in range(2))
    first = captured(device, lambda: a @ b @ a)
    second = captured(device, lambda: b @ a @ b)
    expected = b @ a @ b
    same(second.replay(4), expected)
    first.cleanup()
    del first
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # what torch's own graph trees do when one of theirs dies
    module(device).empty_cache()
    junk = [torch.full((1 << 20,), 7.0, device=device) for _ in range(64)]
    for _ in range(20):
        same(second.replay(4), expected)
    assert all((j == 7).all() for j in junk)
    second.cleanup()


# MP04
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_scratch_that_an_op_caches_stays_its_own(kind: str, device: str) -> None:
    _scratch.clear()
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.counts_in_scratch(m.a(x))), a=lin(), b=lin()).to(device)
    x = torch.randn(64, D, device=device)

    def expected(n: int) -> torch.Tensor:
        return model.b(model.a(x[:n]) + 1)

    with torch.no_grad():
        if kind == "whole":
            backend = FullCudaGraphBackend(module(device))
            with backend.capture_session():
                for n in (64, 32, 8):
                    backend.capture_one(n, lambda n=n: model(x[:n]))
            call = backend.replay
        else:
            run = compiled(model)
            call = lambda n: run(x[:n])  # noqa: E731
        for n in (64, 32, 8, 8, 64, 32, 64, 8, 32):
            same(call(n), expected(n))
    assert _scratch
    assert all((counter == 0).all() for counter in _scratch.values())
    if kind == "whole":
        backend.cleanup()
    _scratch.clear()


# MP06
@device
@pytest.mark.parametrize("sizes", [(64, 32, 16, 8), (8, 16, 32, 64)])
def test_many_sizes_of_three_models_replay_right_in_any_order(sizes: tuple[int, ...], device: str) -> None:
    bodies: list[Callable[[Any, torch.Tensor], Any]] = [
        lambda m, x: m.b(ops.double(m.a(x))),
        lambda m, x: (m.a(x).relu(), ops.double(m.b(x)).sum(0)),
        lambda m, x: m.a(x).cumsum(0),
    ]
    models = [Model(fn, a=lin(), b=lin()).to(device) for fn in bodies]
    calls = [compiled(model) for model in models]
    decode = FullCudaGraphBackend(module(device))
    x = torch.randn(64, D, device=device)
    with torch.no_grad():
        for n in sizes:
            for call in calls:
                call(torch.randn(n, D, device=device))
                call(torch.randn(n, D, device=device))
            with decode.capture_session():
                decode.capture_one(n, lambda n=n: models[0](x[:n]))
        rng = random.Random(0)
        held = []
        for _ in range(200):
            k, n = rng.randrange(4), rng.choice(sizes)
            if k == 3:
                got, wanted = decode.replay(n), models[0](x[:n])
                same(got, wanted)
                continue
            y = torch.randn(n, D, device=device)
            got, wanted = calls[k](y), models[k](y)
            same(got, wanted)
            held.append((got, wanted))
        for got, wanted in held:
            same(got, wanted)
    assert total("captured") >= 12
    assert total("replayed") >= len(held)
    decode.cleanup()


def wide(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.repeat(1, 64)
    for _ in range(4):
        h = h * 1.01 + 1
    return h.sum(1, keepdim=True)


# MP07
@device
def test_phases_and_sizes_reserve_the_largest_and_not_the_sum(device: str) -> None:
    sizes = [1024 - 80 * k for k in range(12)]
    x = torch.randn(1024, D, device=device)

    def capture(lane: str | None, which: Iterable[int]) -> int:
        backend = FullCudaGraphBackend(module(device), lane=lane)
        with torch.no_grad(), backend.capture_session():
            for n in which:
                backend.capture_one(n, lambda n=n: wide(None, x[:n]))
        kept.append(backend)
        return sgc_backend.pools.pool_of(backend.device, lane).reserved_bytes()

    kept: list[FullCudaGraphBackend] = []
    first = capture(None, sizes[:1])
    assert capture(None, sizes[1:]) <= 1.2 * first
    assert capture(None, sizes) <= 1.2 * first  # another model of the same size
    model = Model(lambda m, x: wide(m, ops.double(x))).to(device)
    call = compiled(model)
    decode_session = FullCudaGraphBackend(module(device))
    with torch.no_grad(), decode_session.capture_session():
        for n in sizes:
            call(x[:n])
    assert total("captured") == 12
    shared = pool_on(device).reserved_bytes()
    assert shared <= 1.2 * first
    apart = sum(capture(f"apart {n}", [n]) for n in sizes[:4])
    assert shared < 0.5 * apart
    for n in reversed(sizes):
        with torch.no_grad():
            same(kept[1].replay(n) if n != 1024 else kept[0].replay(n), wide(None, x[:n]))
            same(call(x[:n]), model(x[:n]))
    for backend in kept:
        backend.cleanup()


# MP08
@device
def test_outputs_of_every_size_share_memory_and_stay_the_callers(device: str) -> None:
    model = Model(lambda m, x: ops.double(x).repeat(1, 500) * 3).to(device)
    call = compiled(model, max_recordings=100)
    opener = FullCudaGraphBackend(module(device))
    x = torch.randn(256, D, device=device)
    with torch.no_grad():
        with opener.capture_session():
            call(x)
            largest = pool_on(device).reserved_bytes()
            for n in range(248, 1, -8):
                call(x[:n])
        assert total("captured") == 32
        assert pool_on(device).reserved_bytes() <= 1.1 * largest
        held = [(n, call(x[:n])) for n in (8, 256, 64, 128, 8)]
        for n, got in held:
            same(got, model(x[:n]))


# MP10
@device
@pytest.mark.parametrize("pad", ["auto", "never"])
@pytest.mark.parametrize("capture_sizes", ["auto", (32, 64, 128)])
def test_lengths_that_come_once_do_not_record_without_limit(capture_sizes: Any, pad: str, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model, dynamic=None, capture_sizes=capture_sizes, pad=pad)
    reserved = []
    with torch.no_grad():
        for _ in range(3):
            for n in range(1, 301):
                x = torch.randn(n, D, device=device)
                torch.testing.assert_close(call(x), model(x))
            reserved.append(pool_on(device).reserved_bytes())
        x = torch.randn(66000, D, device=device)  # over every size
        for _ in range(3):
            same(call(x), model(x))
    assert reserved[2] == reserved[1]
    assert total("captured") <= (3 if capture_sizes != "auto" else 64) + 1  # and one of the graph for the first size
    causes = ("not a capture size", "no capture size holds it within max_padding_ratio")
    uncaptured = sum(g.counters.uncaptured[cause] for g in graphs() for cause in causes)
    if pad == "never":
        assert uncaptured > 600
    else:
        assert (
            uncaptured == (0 if capture_sizes == "auto" else 3 * (14 + 172)) + 3
        )  # a length of 1 has a graph of its own


@contextlib.contextmanager
def little_memory() -> Any:
    gc.collect()
    torch.cuda.empty_cache()
    everything = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 30)) / everything)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# MP12
@gpu
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_out_of_memory_inside_a_capture_gives_everything_back(kind: str) -> None:
    model = Model(lambda m, x: m.b(torch.ops.sgc_test.grabs(m.a(x))), a=lin(), b=lin()).cuda()
    x = torch.randn(4, D, device="cuda")
    pool = pool_on("cuda")
    reserved = pool.reserved_bytes()
    with little_memory(), torch.no_grad():
        if kind == "whole":
            for _ in range(2):
                with pytest.raises(torch.OutOfMemoryError):
                    captured("cuda", lambda: model(x))
        else:
            call = compiled(model, dynamic=False)
            for _ in range(3):
                same(call(x), model(x))
            assert any("OutOfMemoryError" in c for g in graphs() for c in g.counters.failures)
        assert abs(pool.reserved_bytes() - reserved) <= 2 << 20
        usable("cuda")
        model(x)
        a_clean_model_works("cuda")


# MP13
@device
def test_twenty_failed_captures_leak_nothing_and_keep_the_users_error(device: str) -> None:
    where = module(device)
    x = torch.ones(4, device=device)
    capturing: list[bool] = []

    def forward() -> torch.Tensor:
        if where.is_current_stream_capturing():
            big = torch.empty((200 << 20) // 4, device=device)
            raise ValueError(f"the user's own, {big.shape[0]}")
        return x + 1

    a_clean_model_works(device)
    gc.collect()
    where.empty_cache()
    before = where.memory_reserved()
    for _ in range(20):
        with pytest.raises(ValueError, match="the user's own"):
            captured(device, forward)
        capturing.append(where.is_current_stream_capturing())
    gc.collect()
    where.empty_cache()
    assert where.memory_reserved() <= before + (2 << 20)
    assert not any(capturing)
    usable(device)
    assert torch.ones(1 << 20, device=device).sum() == 1 << 20
    a_clean_model_works(device)


@device
def test_rounds_of_compile_capture_replay_and_delete_do_not_grow_the_pool(device: str) -> None:
    pool = pool_on(device)
    x = torch.randn(4, D, device=device)
    rounds = 200 if device == "cuda" else 40
    reserved = []
    with torch.no_grad():
        for k in range(rounds):
            model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
            call = compiled(model, dynamic=False)
            call(x)
            call(x)
            same(call(x), model(x))
            backend = captured(device, lambda model=model: model(x))
            same(backend.replay(4), model(x))
            del model, call, backend
            torch._dynamo.reset()
            if k % 10 == 9:
                gc.collect()
                reserved.append(pool.reserved_bytes())
    assert max(reserved) == reserved[0]


# -- failure and recovery ----------------------------------------------------------------------------------------------


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


# -- threads and several models ----------------------------------------------------------------------------------------


# TH01
@device
@pytest.mark.parametrize("locked", [True, False])
def test_worker_threads_each_get_their_own_result(locked: bool, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    call = compiled(model)
    lock = threading.Lock() if locked else contextlib.nullcontext()

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for k in range(20):
                x = torch.randn(4 + 2 * (k % 2), D, generator=generator).to(device)
                with lock:
                    got = call(x)
                same(got, model(x))

    with torch.no_grad():
        call(torch.randn(4, D, device=device))
    in_threads([lambda seed=seed: work(seed) for seed in range(8)])
    in_threads([lambda: work(8)])  # the old ones are dead
    assert total("replayed") > 150


# TH03
@device
def test_work_of_another_thread_neither_breaks_a_capture_nor_is_broken(device: str) -> None:
    where = module(device)
    stop = threading.Event()
    rounds: list[int] = []

    def background() -> None:
        stream = where.Stream()
        with where.stream(stream):
            while not stop.is_set():
                host = torch.full((1024,), float(len(rounds)))
                if device == "cuda":
                    host = host.pin_memory()
                there = host.to(device, non_blocking=True)
                junk = torch.empty(1 << 16, device=device)
                event = where.Event()
                event.record()
                while not event.query():
                    pass
                assert (there == float(len(rounds))).all()
                del junk
                rounds.append(1)

    def foreground() -> None:
        try:
            while not rounds:
                pass
            x = torch.randn(64, D, device=device)
            layers = [lin().to(device) for _ in range(3)]
            with torch.no_grad():
                for k in range(30):
                    layer, n = layers[k % 3], 4 + 2 * k
                    backend = captured(device, lambda layer=layer, n=n: layer(x[:n]).relu(), n)
                    same(backend.replay(n), layer(x[:n]).relu())
                    assert not backend.counters.failures
                    backend.cleanup()
        finally:
            stop.set()

    in_threads([background, foreground])
    assert rounds


# TH05
@device
@pytest.mark.parametrize("kind", ["compiled", "whole"])
def test_a_replay_is_ordered_with_the_callers_stream(kind: str, device: str) -> None:
    where = module(device)
    model = Model(lambda m, x: ops.double(m.a(x)) if kind == "compiled" else m.a(x), a=lin()).to(device)
    x = torch.zeros(4, D, device=device)
    if kind == "whole":
        backend = captured(device, lambda: model(x))
        f = lambda x: backend.replay(4)  # noqa: E731
    else:
        f = compiled(model, dynamic=False)
    with torch.no_grad():
        expected = [model(torch.full((4, D), float(i), device=device)) + 1 for i in range(100)]
        for _ in range(3):
            f(x)
        where.synchronize()
        streams = [where.Stream() for _ in range(2)]
        got = []
        for i in range(100):
            stream, other = streams[i % 2], streams[(i + 1) % 2]
            stream.wait_stream(other)
            with where.stream(stream):
                if device == "cuda":
                    torch.cuda._sleep(200_000)
                x.fill_(i)
                got.append(f(x) + 1)
        where.synchronize()
        for mine, wanted in zip(got, expected, strict=True):
            same(mine, wanted)
    if kind == "whole":
        backend.cleanup()


def long_kernels(device: str, scale: float) -> Callable[[], torch.Tensor]:
    """A callable that keeps a device busy for long enough that two of them overlap, where nothing orders them."""
    n = 1024 if device == "cuda" else 16
    x = torch.randn(n, n, device=device)

    def chain() -> torch.Tensor:
        h = x
        for _ in range(12 if device == "cuda" else 4):
            h = (h @ x) * scale
            h = h / h.abs().amax()
        return h

    return chain


def pairs_of_replays(device: str, threads: int, pairs: int, guarded: bool) -> int:
    """How many of ``pairs`` pairs of replays, of two models from one pool, were wrong; a stream for each thread."""
    where = module(device)
    backend = FullCudaGraphBackend(where)
    chains = [long_kernels(device, scale) for scale in (1.0, -1.0)]
    with torch.no_grad(), backend.capture_session():
        views = [backend.capture_one(key + 1, chain) for key, chain in enumerate(chains)]
    expected = []
    for key in (1, 2):
        expected.append(backend.replay(key).clone())
        where.synchronize()
    wrong: list[torch.Tensor] = []
    barrier = threading.Barrier(threads)

    def replay(key: int) -> torch.Tensor:
        if guarded:
            with backend.replay_session():
                return backend.replay(key) != expected[key - 1]
        backend.graph(key).replay()
        return views[key - 1] != expected[key - 1]

    def work(number: int) -> None:
        stream = where.Stream()
        try:
            with where.stream(stream):
                barrier.wait(60)
                bad = torch.zeros((), dtype=torch.int64, device=device)
                for _ in range(pairs // threads):
                    # half of the threads in the other order
                    first = replay(1 + number % 2).any()
                    bad += first | replay(2 - number % 2).any()
                wrong.append(bad)
            if device == "cuda":
                stream.synchronize()
        except BaseException:
            barrier.abort()
            raise

    try:
        in_threads([lambda k=k: work(k) for k in range(threads)])
    finally:
        where.synchronize()
        backend.cleanup()
    assert len(wrong) == threads
    return sum(int(w) for w in wrong)


# TH06
@device
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_a_thousand_pairs_of_replays_from_threads_on_their_own_streams_are_right(threads: int, device: str) -> None:
    assert pairs_of_replays(device, threads, 1000, guarded=True) == 0


# TH06
@device
def test_without_the_guard_the_same_replays_are_wrong(device: str) -> None:
    if device == "cpu":
        with pytest.raises((emulated.EmulatedRaceError, threading.BrokenBarrierError)) as raised:
            pairs_of_replays(device, 2, 1000, guarded=False)
        assert raised.type is emulated.EmulatedRaceError
    else:  # whether two of them meet is up to the machine
        assert any(pairs_of_replays(device, 2, pairs, guarded=False) > 0 for pairs in (200, *[1000] * 9))


# TH06
@device
@pytest.mark.parametrize("threads", [2, 8])
def test_two_compiled_models_called_from_threads_on_their_own_streams_are_right(threads: int, device: str) -> None:
    where = module(device)
    first, second = lin().to(device), lin().to(device)
    # Two functions, not two instances of one class: Dynamo moves what it finds under one code object to the front
    # while other threads search there, miss, and compile once more (plain torch does, too).
    models = [lambda x: second(ops.double(first(x))), lambda x: ops.double(first(x).relu()) + x]
    calls = [compiled(model, dynamic=False) for model in models]
    x = torch.randn(16, D, device=device)
    with torch.no_grad():
        for call in calls * 3:
            call(x)
    where.synchronize()

    def work(number: int) -> None:
        stream = where.Stream()
        with where.stream(stream), torch.no_grad():
            bad = torch.zeros((), dtype=torch.int64, device=device)
            mine = torch.randn(16, D, device=device)
            expected = [model(mine) for model in models]
            for _ in range((1000 if device == "cuda" else 200) // threads):
                for call, wanted in zip(calls, expected, strict=True):
                    bad += (call(mine) != wanted).any()
            assert int(bad) == 0

    before = total("replayed")
    in_threads([lambda k=k: work(k) for k in range(threads)])
    assert total("replayed") - before == 2 * ((1000 if device == "cuda" else 200) // threads) * threads


# TH06
@device
def test_captures_begun_at_the_same_time_wait_for_each_other(device: str) -> None:
    x = torch.randn(32, D, device=device)
    layers = [lin().to(device) for _ in range(6)]
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        layer = layers[number]
        barrier.wait(60)
        with torch.no_grad():
            for n in (32, 16, 8):
                backend = captured(device, lambda n=n: layer(x[:n]) + torch.rand_like(x[:n]) * 0, n)
                with backend.replay_session():
                    same(backend.replay(n), layer(x[:n]))
                assert not backend.counters.failures
                backend.cleanup()

    in_threads([lambda k=k: work(k) for k in range(6)])
    usable(device)
