"""Reported cases: what can't be captured, and what a capture runs for the first time."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import (
    device,
    pool_on,
    usable,
)
from test_reports import _seen_shapes, a_clean_model_works, captured, gpu, in_threads
from torch import nn

import sgc_backend
from sgc_backend.capture import record
from sgc_backend.errors import CaptureError

__all__ = ["only_graphs_of_this_test"]


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
