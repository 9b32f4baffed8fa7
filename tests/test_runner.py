"""PrefillRunner and DecodeRunner: any number of rows inside few recordings, over every wrapper."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import pytest
import torch
from models import ops
from torch import nn

import sgc_backend
from sgc_backend import (
    ROWS,
    DecodeRunner,
    InputSpec,
    OptionError,
    PrefillRunner,
    Runner,
    ShapeKey,
    eager_on_graph,
    emulated,
)

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
    with pytest.raises(OptionError, match="rows must be an int from 0 to the bucket's 9"):
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
