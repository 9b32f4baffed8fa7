"""What a runner refuses, and which calls it runs in which bucket."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from test_runner import SPECS, H, Step, attend, backend, call, captured, eager_of, equal, runner_of
from torch import nn

import sgc_backend
from sgc_backend import (
    ROWS,
    DecodeRunner,
    FullCudaGraphBackend,
    InputSpec,
    NotCapturedError,
    OptionError,
    PrefillRunner,
    ReplayError,
    Runner,
    StrictError,
    attention,
    eager_on_graph,
    emulated,
)
from sgc_backend.errors import CaptureError, CaptureNestedError, NestedReplayError

# -- bounds and causes -------------------------------------------------------------------------------------------------


def test_calls_beyond_the_largest_bucket_run_eagerly_and_are_counted() -> None:
    runner = captured(runner_of("full", name="decode of this test"))
    runner(**call(13))
    runner(**call(20))
    assert runner.counters.uncaptured == {"larger than the largest bucket, 12": 2}
    assert sgc_backend.stats()["decode of this test"]["uncaptured"] == {"larger than the largest bucket, 12": 2}
    strict = captured(runner_of("full", strict=True))
    with pytest.raises(StrictError, match="would run eagerly: larger than the largest bucket, 12"):
        strict(**call(13))


def test_max_padding_ratio_bounds_the_bucket() -> None:
    runner = captured(runner_of("full", max_padding_ratio=2))
    for n in (2, 1, 5, 4):
        inputs = call(n)
        expected, _ = eager_of(runner, inputs)
        assert equal(runner(**inputs), expected)
    assert sum(runner.counters.replayed.values()) == 3
    assert runner.counters.uncaptured == {"the bucket of 4 is more than max_padding_ratio 2 times the rows": 1}


def test_a_ladder_covers_max_size_and_no_more() -> None:
    assert PrefillRunner(Step(), SPECS, max_size=100, device_module=emulated).sizes[-3:] == (80, 96, 100)
    sizes = DecodeRunner(Step(), SPECS, max_size=100, device_module=emulated).sizes
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-2:] == (96, 100)
    with pytest.raises(OptionError, match="max_size is 100; split the call"):
        captured(runner_of("full", max_size=12, sizes=(12,))) and None
        DecodeRunner(Step(), SPECS, max_size=100, device_module=emulated)(**call(101))


def test_a_piecewise_ladder_leaves_out_one_row_where_attention_would_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = [1]  # a number of the host, which a recorded attention would keep as it was at capture

    @torch.library.custom_op("sgc_test::attend_to_length", mutates_args=("out",))
    def attend_to_length(q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q * length[0])

    def prefill(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        attend_to_length(x, out)
        return out + 1

    monkeypatch.setattr(attention, "_attention_ops", set())
    sgc_backend.register_attention(attend_to_length)
    specs = [InputSpec("x", (ROWS,), torch.float32)]
    runner = PrefillRunner(prefill, specs, max_size=4, options={"inner": "eager"}, device_module=emulated)
    runner.capture()
    length[0] = 5
    assert runner(x=[1.0]).tolist() == [6.0]
    assert runner(x=[1.0, 2.0]).tolist() == [6.0, 11.0]
    assert runner.sizes == (2, 3, 4)
    assert PrefillRunner(prefill, specs, max_size=1, device_module=emulated).sizes == (1,)
    assert PrefillRunner(prefill, specs, max_size=3, backend="breakable", device_module=emulated).sizes == (1, 2, 3)


def test_floats_are_refused_for_integers_and_taken_for_floats() -> None:
    specs = [InputSpec("tokens", (ROWS,), torch.int32), InputSpec("scale", (ROWS,), torch.float64)]
    runner = DecodeRunner(lambda tokens, scale: tokens * scale, specs, max_size=2, device_module=emulated)
    runner.capture()
    for floats in ([3.5], (3.0,), [3, 0.5]):
        with pytest.raises(OptionError, match=r"input tokens .* it holds floats"):
            runner(tokens=floats, scale=[1] * len(floats))
    assert runner(tokens=[3], scale=[1.1]).tolist() == [3 * 1.1]
    assert runner(tokens=[True], scale=[2]).tolist() == [2.0]
    assert runner(tokens=[], scale=[]).tolist() == []


def test_a_ladder_that_does_not_cover_the_batch_is_refused() -> None:
    with pytest.raises(OptionError, match="the largest bucket is 12 and does not cover max_size 16"):
        runner_of("full", max_size=16)
    with pytest.raises(OptionError, match="give max_size, the most rows that a call has, or sizes"):
        DecodeRunner(Step(), SPECS, device_module=emulated)
    for sizes in ((), (0, 4), ("4",), "4"):
        with pytest.raises(OptionError, match="sizes"):
            runner_of("full", sizes=sizes)


# -- bad input ---------------------------------------------------------------------------------------------------------


@backend
def test_bad_input_is_refused_by_name_and_changes_nothing(backend: str) -> None:
    runner = captured(runner_of(backend))
    good = call(5)
    expected, _ = eager_of(runner, good)
    for change, match in (
        ({"tokens": None}, "input tokens .* is missing; got slots, offsets"),
        ({"more": torch.zeros(5)}, "unknown input more; it takes tokens"),
        (
            {"slots": torch.zeros(6, dtype=torch.int64)},
            r"slots .* expected shape \(5,\), for the 5 rows of tokens, .* got \(6,\)",
        ),
        ({"slots": torch.zeros(5, 1, dtype=torch.int64)}, r"input slots .* got \(5, 1\)"),
        (
            {"slots": torch.zeros(5, dtype=torch.int32)},
            r"slots \(ROWS\) int64: expected .* that dtype, got \(5,\) int32",
        ),
        ({"tokens": torch.zeros(5, 1, dtype=torch.int64)}, r"input tokens .* got \(5, 1\)"),
        ({"offsets": torch.zeros(5, dtype=torch.int64)}, r"offsets \(ROWS \+ 1\) .* expected shape \(6,\)"),
        ({"tokens": torch.zeros(5, dtype=torch.int64, device="meta")}, "tokens .* is on meta"),
        ({"tokens": ["a"] * 5}, "expected a tensor or numbers, got a list"),
    ):
        bad = {k: v for k, v in {**good, **change}.items() if v is not None}
        with pytest.raises(OptionError, match=match):
            runner(**bad)
        assert equal(runner(**good), expected)


@backend
def test_a_runner_that_is_not_captured_or_cleaned_up_says_so(backend: str) -> None:
    runner = runner_of(backend)
    with pytest.raises(NotCapturedError, match=r"call capture\(\) first"):
        runner(**call(3))
    assert runner.eager(**call(3))["h"].shape == (3, H)
    captured(runner)
    runner.cleanup()
    runner.cleanup()
    with pytest.raises(ReplayError, match=r"used after cleanup\(\)"):
        runner(**call(3))
    captured(runner)
    inputs = call(3)
    expected, _ = eager_of(runner, inputs)
    assert equal(runner(**inputs), expected)
    sgc_backend.reset()
    with pytest.raises(NotCapturedError):
        runner(**inputs)


def test_a_call_inside_a_capture_or_a_replay_of_the_pool_is_refused_and_stages_nothing() -> None:
    runner = captured(runner_of("full"))
    other = FullCudaGraphBackend(emulated)
    inputs = call(4)
    runner(**inputs)
    with other.capture_session(), pytest.raises((NestedReplayError, CaptureError)):
        other.capture_one(1, lambda: runner(**call(3))["h"] if emulated.is_current_stream_capturing() else None)
    assert torch.equal(runner.buffers.views(4)["tokens"], inputs["tokens"])
    breakable = sgc_backend.BreakableCudaGraphBackend(emulated)
    replaying = []

    @eager_on_graph
    def inner() -> None:
        if replaying:
            runner(**call(3))

    with breakable.capture_session():
        breakable.capture_one(1, lambda: (torch.ones(2) * 2, inner(), torch.ones(2) * 3)[0])
    replaying.append(True)
    with pytest.raises(NestedReplayError):
        breakable.replay(1)
    assert torch.equal(runner.buffers.views(4)["tokens"], inputs["tokens"])
    with other.capture_session(), pytest.raises(CaptureNestedError):
        other.capture_one(1, lambda: runner.capture() if emulated.is_current_stream_capturing() else torch.ones(1))


@backend
def test_a_failed_capture_leaves_no_recording_and_the_next_succeeds(backend: str) -> None:
    armed = [True]

    class Failing(Step):
        def forward(self, tokens: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> Any:
            if armed[0] and len(tokens) == 12:
                raise RuntimeError("size 12 is cursed")
            return super().forward(tokens, slots, offsets)

    fn = Failing(attend.body if backend == "piecewise" else attend)
    runner = runner_of(backend, fn=fn, sizes=(4, 9, 12, 13))
    with pytest.raises(Exception, match="size 12 is cursed"):
        runner.capture()
    assert not any(runner.backend.can_run(n) for n in runner.sizes)
    with pytest.raises(NotCapturedError):
        runner(**call(3))
    armed[0] = False
    torch._dynamo.reset()
    captured(runner)
    inputs = call(8)
    expected, _ = eager_of(runner, inputs)
    assert equal(runner(**inputs), expected)


def test_results_that_do_not_grow_with_the_rows_are_refused() -> None:
    def returning(fn: Any) -> Runner:
        return runner_of("full", fn=lambda tokens, slots, offsets: fn(tokens))

    with pytest.raises(OptionError, match="result 0 has 4 elements for 4 rows and 5 for 9"):
        returning(lambda t: t[: 4 if len(t) < 9 else 5]).capture()
    with pytest.raises(OptionError, match="the same structure"):
        returning(lambda t: [t] * len(t)).capture()
    with pytest.raises(CaptureError, match=r"key 12: result 0 has shape \(7,\), expected \[12\]"):
        returning(lambda t: t[: 7 if len(t) == 12 else len(t)]).capture()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fn": 3}, "fn must be a module or function"),
        ({"inputs": ()}, "no input has a dimension of ROWS"),
        ({"inputs": ("tokens",)}, "must be a list of InputSpec, it holds 'tokens'"),
        ({"inputs": None}, "must be a list of InputSpec, got None"),
        ({"sizes": None}, "sizes must be a list of ints, got None"),
        ({"inputs": (SPECS[0], SPECS[0])}, "the same name"),
        ({"variants": ()}, "variants is empty"),
        ({"variants": ([],)}, "hashable"),
        ({"variants": (1, 1)}, "twice"),
        ({"variants": "ab"}, "variants must be a list"),
        ({"variants": 3}, "variants must be a list"),
        ({"max_padding_ratio": "x"}, "max_padding_ratio must be None or a number >= 1"),
        ({"max_padding_ratio": True}, "max_padding_ratio must be None or a number >= 1"),
        ({"backend": "breakable", "options": {"strict": "x"}}, "strict must be True or False"),
        ({"backend": "breakable", "options": {"one_break": 1}}, "one_break must be True or False"),
        ({"strict": "no"}, "strict must be True or False"),
        ({"outputs": "copy"}, "outputs must be"),
        ({"max_padding_ratio": 0.5}, "max_padding_ratio"),
        ({"max_padding_ratio": "two"}, "max_padding_ratio must be None or a number"),
        ({"options": 3}, "options must be None or a dict"),
        ({"inputs": SPECS[0]}, "inputs must be a list of InputSpec"),
        ({"inputs": 3}, "inputs must be a list of InputSpec"),
        ({"backend": "piecewise", "options": {"nope": 1}}, "unknown option nope"),
        ({"backend": "graph"}, "backend must be one of"),
        ({"options": {"nope": 1}}, "do not suit backend 'full'"),
        ({"max_size": 0}, "max_size must be"),
    ],
)
def test_bad_arguments_are_refused_at_once(change: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        runner_of(change.pop("backend", "full"), **change)


@backend
def test_host_values_that_go_with_the_rows_are_refused(backend: str) -> None:
    def forward(x: torch.Tensor, slots: Any = None) -> dict[str, Any]:
        eager = attend.body if backend == "piecewise" else attend
        return {"y": eager(x + 1, torch.zeros(2, H), torch.empty_like(x)), "n": x.shape[0], "size": x.shape}

    for sizes in ((4,), (4, 8)):
        runner = runner_of(backend, fn=forward, inputs=[InputSpec("x", (ROWS, H), torch.float32)], sizes=sizes)
        with pytest.raises(OptionError, match=r"result 1 is 8 for 8 rows and 4 for others"):
            runner.capture()


def test_host_values_that_a_larger_bucket_changes_are_refused() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return x + 1, x.shape[0] > 8

    runner = runner_of("full", fn=forward, inputs=[InputSpec("x", (ROWS,), torch.float32)])
    with pytest.raises(OptionError, match=r"result 1 is False for 9 rows|result 1 is (False|True) for"):
        runner.capture()
    assert not runner.backend.can_run(12)


@pytest.mark.parametrize("from_host", [False, True])
def test_an_input_that_is_a_static_result_may_be_another_input_next(from_host: bool) -> None:
    specs = [InputSpec(name, (ROWS,), torch.float32) for name in "xy"]
    runner = runner_of("full", fn=lambda x, y: (x, x + 2 * y), inputs=specs, outputs="static")
    runner.capture()
    first, _ = runner(x=torch.ones(3), y=torch.zeros(3))
    _, total = runner(x=[5.0] * 3 if from_host else torch.full((3,), 5.0), y=first)
    assert torch.equal(total, torch.full((3,), 7.0))


def test_padding_stays_right_where_a_returned_input_is_written() -> None:
    specs = [InputSpec("x", (ROWS,), torch.float32)]
    runner = runner_of("full", fn=lambda x: (x, x.flip(0).cumsum(0)), inputs=specs, outputs="static")
    runner.capture()
    runner(x=torch.ones(3))
    runner.replay(4)[0].fill_(9)
    assert torch.equal(runner(x=torch.ones(3))[1], torch.tensor([0.0, 1.0, 2.0]))


def test_a_call_meanwhile_does_not_stage_into_a_bucket_that_is_being_captured_again() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not runner.backend.device.is_capturing():
            seen.append(bool(x.any()))
        return x * 2 + 1

    runner = runner_of("full", fn=forward, inputs=[InputSpec("x", (ROWS,), torch.float32)])
    runner.capture()
    called: list[bool] = []
    threads: list[threading.Thread] = []
    x, pad = torch.arange(1.0, 4.0), runner.buffers.pad

    def pad_and_be_called(size: int) -> None:
        pad(size)
        threads.append(threading.Thread(target=lambda: called.append(torch.equal(runner(x=x), x * 2 + 1)), daemon=True))
        threads[-1].start()
        threads[-1].join(0.2)  # it waits for the pool

    runner.buffers.pad = pad_and_be_called
    try:
        runner.capture()
    finally:
        del runner.buffers.pad
    for thread in threads:
        thread.join(20)
    assert len(threads) == 5
    assert not any(seen)
    assert called == [True] * 5


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda runner: pickle.loads(pickle.dumps(runner))])
@backend
def test_a_copy_has_buffers_of_its_own_and_nothing_recorded(backend: str, how: Any) -> None:
    inputs = [InputSpec("input", (ROWS, H), torch.float32)]
    runner = runner_of(backend, fn=nn.Linear(H, H), inputs=inputs, options=None)
    x = torch.randn(3, H)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the breakable one breaks nowhere
        runner.capture()
        twin = how(runner)
        with pytest.raises(NotCapturedError, match="nothing is recorded"):
            twin(input=x)
        if backend != "piecewise":  # its compiled code is that of the first one
            twin.capture()
            assert torch.allclose(twin(input=x.numpy()), runner(input=x))
    assert torch.allclose(runner(input=x), runner.eager(input=x))
