"""PrefillRunner and DecodeRunner: any number of rows inside few recordings, over every wrapper."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from models import ops
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
    ShapeKey,
    StrictError,
    attention,
    eager_on_graph,
    emulated,
)
from sgc_backend.errors import CaptureError, CaptureNestedError, NestedReplayError

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])
backend = pytest.mark.parametrize("backend", ["full", "piecewise", "breakable"])
H, SLOTS = 16, 32


def module(device: str) -> Any:
    return torch.cuda if device == "cuda" else emulated


@eager_on_graph
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(q + cache[:-1].sum(0))


class Step(nn.Module):
    """Small whole numbers throughout, so that every order of summation gives the same bits."""

    def __init__(self, attend: Any = attend) -> None:
        super().__init__()
        self.attend = attend
        self.embedding = nn.Parameter(torch.randint(-2, 3, (8, H)).float(), requires_grad=False)
        self.weight = nn.Parameter(torch.randint(-1, 2, (H, H)).float(), requires_grad=False)
        self.register_buffer("cache", torch.zeros(SLOTS + 1, H))

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> dict[str, Any]:
        x = self.embedding[tokens]
        self.cache.index_copy_(0, torch.where(slots < 0, SLOTS, slots), x)
        h = ops.double(self.attend(x @ self.weight, self.cache, torch.empty_like(x)))
        return {"h": h, "t": (h + 1).t(), "lengths": offsets.diff(), "all": [self.weight.sum(), "text", None]}


SPECS = (
    InputSpec("tokens", (ROWS,), torch.int64),
    InputSpec("slots", (ROWS,), torch.int64, pad=-1),
    InputSpec("offsets", (ROWS + 1,), torch.int64, pad="last"),
)


def runner_of(kind: str, device: str = "cpu", fn: Any = None, **settings: Any) -> Runner:
    options = {"inner": "eager", "cut_ops": ("sgc_test::double",)} if kind == "piecewise" else None
    cls = DecodeRunner if kind == "full" else PrefillRunner
    settings = {"sizes": (4, 9, 12), "inputs": SPECS, "backend": kind, "options": options, **settings}
    made = cls(
        fn or Step(attend.body if kind == "piecewise" else attend).to(device),
        settings.pop("inputs"),
        device_module=module(device),
        **settings,
    )
    return made


def call(n: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.randint(0, 8, (n,), device=device),
        "slots": torch.randperm(SLOTS, device=device)[:n],
        "offsets": torch.arange(n + 1, device=device) * 2,
    }


def equal(a: Any, b: Any) -> bool:
    flat = torch.utils._pytree.tree_leaves
    one, two = flat(a), flat(b)
    return len(one) == len(two) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, two, strict=True)
    )


def eager_of(runner: Runner, inputs: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Eager's result and cache, with the runner's cache as it was before."""
    cache = runner.fn.cache
    before = cache.clone()
    out = runner.eager(**inputs)
    after = cache[:-1].clone()
    cache.copy_(before)
    return out, after


def captured(runner: Runner) -> Runner:
    """Without the warning of a callable that breaks nowhere; piecewise compiles size 1 apart."""
    with contextlib.ExitStack() as stack:
        if runner.backend.kind == "breakable" and not isinstance(runner.fn, Step):
            stack.enter_context(pytest.warns(UserWarning, match="broke nowhere"))
        runner.capture()
    return runner


@device
@backend
def test_every_number_of_rows_equals_eager_in_any_order(backend: str, device: str) -> None:
    runner = captured(runner_of(backend, device))
    draw = random.Random(0)
    for _ in range(40):
        n = draw.randint(0, 14)
        inputs = call(n, device)
        expected, cache = eager_of(runner, inputs)
        assert equal(runner(**inputs), expected), n
        assert torch.equal(runner.fn.cache[:-1], cache), n
    counters = runner.counters
    assert set(counters.captured) == {ShapeKey(4), ShapeKey(9), ShapeKey(12)}
    assert set(counters.uncaptured) <= {"larger than the largest bucket, 12", "warm-up"}
    runner.cleanup()


@device
def test_inputs_may_come_from_the_host_in_any_mix(device: str) -> None:
    runner = captured(runner_of("full", device))
    for n in (3, 7, 12, 1):
        inputs = call(n, device)
        expected, _ = eager_of(runner, inputs)
        mixed = {
            "tokens": inputs["tokens"].tolist(),
            "slots": inputs["slots"].cpu().numpy(),
            "offsets": inputs["offsets"] if n % 2 else inputs["offsets"].cpu(),
        }
        assert equal(runner(**mixed), expected)


def test_the_largest_bucket_is_recorded_first_with_progress() -> None:
    runner = runner_of("full", variants=("a", "b"), fn=lambda tokens, slots, offsets, variant: tokens + len(variant))
    steps: list[tuple[int, int, str]] = []
    runner.capture(progress=lambda done, of, key: steps.append((done, of, str(key))))
    assert steps == [(k + 1, 6, key) for k, key in enumerate(("12/a", "12/b", "9/a", "9/b", "4/a", "4/b"))]


@backend
def test_each_variant_has_recordings_of_its_own(backend: str) -> None:
    weights = {"up": 3, "down": -5}

    def fn(tokens: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, variant: str) -> torch.Tensor:
        return ops.double(tokens * weights[variant])

    runner = captured(runner_of(backend, fn=fn, variants=tuple(weights)))
    for n, variant in ((5, "up"), (5, "down"), (12, "up"), (3, "down")):
        inputs = call(n)
        assert torch.equal(runner(variant=variant, **inputs), inputs["tokens"] * 2 * weights[variant])
    with pytest.raises(OptionError, match="unknown variant None; there are 'up', 'down'"):
        runner(**call(3))


def test_several_tokens_a_request_are_one_row() -> None:
    specs = (InputSpec("tokens", (ROWS * 4,), torch.int64), InputSpec("lengths", (ROWS,), torch.int64))
    runner = DecodeRunner(
        lambda tokens, lengths: (tokens.view(-1, 4) + lengths[:, None]).flatten(),
        specs,
        sizes=(2, 8),
        device_module=emulated,
    )
    runner.capture()
    for n in (1, 5, 2):
        tokens, lengths = torch.arange(n * 4), torch.arange(n)
        got = runner(tokens=tokens, lengths=lengths)
        assert torch.equal(got, runner.eager(tokens=tokens, lengths=lengths))
    with pytest.raises(OptionError, match=r"input tokens \(ROWS \* 4\) int64"):
        runner(tokens=torch.arange(6), lengths=torch.arange(2))


def test_one_bucket_is_enough_to_find_what_grows() -> None:
    runner = captured(runner_of("full", sizes=(H,)))  # as many rows as hidden: shapes alone would not tell
    inputs = call(5)
    expected, _ = eager_of(runner, inputs)
    assert equal(runner(**inputs), expected)


def test_results_are_the_callers_unless_static() -> None:
    runner, static = captured(runner_of("full")), captured(runner_of("full", outputs="static"))
    one = runner(**call(3))
    kept = one["h"].clone()
    runner(**call(3))
    assert torch.equal(one["h"], kept)
    a, b = static(**call(3)), static(**call(4))
    assert a["h"].data_ptr() == b["h"].data_ptr()


def test_an_input_that_is_returned_may_be_reshaped_in_place() -> None:
    runner = DecodeRunner(
        lambda a: (a, a * 1),
        [InputSpec("a", (ROWS, 3), torch.int64)],
        sizes=(3, 6),
        outputs="static",
        device_module=emulated,
    )
    runner.capture()
    for n in (3, 2, 3, 2, 6):
        given = torch.arange(3 * n).view(n, 3)
        assert torch.equal(runner(a=given)[0].t_(), given.t())
        same, copied = runner(a=given)
        assert torch.equal(same, given) and torch.equal(copied, given)


def test_static_results_may_be_the_next_inputs() -> None:
    specs = (InputSpec("a", (ROWS,), torch.int64), InputSpec("b", (ROWS,), torch.int64))
    runner = DecodeRunner(lambda a, b: (a + b, a), specs, sizes=(2, 4, 8), outputs="static", device_module=emulated)
    runner.capture()
    for sizes in ((8, 3), (3, 8), (4, 4)):
        n = min(sizes)
        a, b = torch.arange(sizes[0]), torch.arange(sizes[0]) * 10
        total, first = runner(a=a, b=b)
        again = runner(a=first[:n], b=total[:n])
        assert torch.equal(again[0], (a + a + b)[:n])


def test_buckets_may_be_written_in_place_and_replayed() -> None:
    runner = captured(runner_of("full"))
    inputs = call(9)
    expected, _ = eager_of(runner, inputs)
    views = runner.views(9)
    for name, value in inputs.items():
        views[name].copy_(value)
    assert equal(runner.replay(9), expected)
    assert runner.replay(9, rows=2)["h"].shape == (2, H)
    inputs = call(7)
    expected, _ = eager_of(runner, inputs)
    views["slots"].fill_(1)  # what is beyond the next call's rows must be padding again
    views["slots"][3:].fill_(2)
    assert equal(runner(**inputs), expected)
    with pytest.raises(OptionError, match="5 is no bucket"):
        runner.views(5)
    with pytest.raises(OptionError, match="rows must be between 0 and the bucket's 9"):
        runner.replay(9, rows=10)


def test_padding_is_made_anew_where_the_callable_writes_its_inputs() -> None:
    def advance(tokens: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out = tokens * 10 + slots
        tokens.add_(1)
        return torch.cat([out, tokens])[: 2 * len(out)] + slots.sum()

    runner = captured(
        runner_of("full", fn=advance, inputs=(*SPECS[:1], InputSpec("slots", (ROWS,), torch.int64), SPECS[2]))
    )
    for n in (2, 3, 3, 2, 4, 3):
        inputs = call(n)
        padded = {k: nn.functional.pad(v, (0, 4 - n)) for k, v in inputs.items()}
        expected = advance(**padded)
        got = runner(**inputs)
        assert torch.equal(got, expected[: 2 * n])


@device
def test_all_buckets_of_mixed_wrappers_in_one_pool_equal_eager_in_1000_random_orders(device: str) -> None:
    runners = [runner_of(kind, device, name=kind) for kind in ("piecewise", "breakable", "full")]
    with runners[0].capture_session():
        for runner in runners:
            captured(runner)
    (pool,) = sgc_backend.memory_report().pools
    draw = random.Random(1)
    inputs = {n: call(n, device) for n in (1, 4, 6, 9, 10, 12)}
    for _ in range(1000):
        runner, n = draw.choice(runners), draw.choice(list(inputs))
        expected, cache = eager_of(runner, inputs[n])
        assert equal(runner(**inputs[n]), expected), (runner.backend.name, n)
        assert torch.equal(runner.fn.cache[:-1], cache)
    assert sum(sum(r.counters.replayed.values()) for r in runners) == 1000
    assert not any(set(r.counters.uncaptured) for r in runners)
    del pool


def test_threads_may_share_a_runner() -> None:
    runner = captured(runner_of("full", fn=lambda tokens, slots, offsets: tokens * 3 + slots))
    wrong: list[int] = []

    def serve(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(100):
            n = draw.randint(1, 12)
            tokens = torch.full((n,), draw.randint(0, 99))
            out = runner(tokens=tokens, slots=torch.arange(n), offsets=torch.arange(n + 1))
            if not torch.equal(out, tokens * 3 + torch.arange(n)):
                wrong.append(n)

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_may_share_a_runner_on_a_gpu() -> None:
    weight = torch.randint(-1, 2, (512, 512), device="cuda").float()
    specs = (InputSpec("x", (ROWS, 512), torch.float32),)
    runner = DecodeRunner(lambda x: (x @ weight) @ weight, specs, sizes=(64, 256), device_module=torch.cuda)
    runner.capture()
    wrong: list[int] = []

    @torch.no_grad()
    def serve(seed: int) -> None:
        draw = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(50):
                x = torch.full((draw.randint(1, 256), 512), float(draw.randint(0, 9)), device="cuda")
                if not torch.equal(runner(x=x), (x @ weight) @ weight):
                    wrong.append(step)

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- bounds and causes -----------------------------------------------------------------------------------------------


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


# -- bad input -------------------------------------------------------------------------------------------------------


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
