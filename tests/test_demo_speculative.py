"""Speculative decoding in the demo: the output is the target's own, whatever the draft guesses."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sgc_backend import emulated
from sgc_backend.__main__ import main
from sgc_backend.demo import serve, speculative
from sgc_backend.demo.engine import Engine
from sgc_backend.demo.findings import capture
from sgc_backend.demo.model import Decoder, DecoderConfig, load
from sgc_backend.demo.prompts import PROMPTS
from sgc_backend.demo.requests import Request
from sgc_backend.demo.speculative import SpeculativeEngine

SMALL = DecoderConfig(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=128)
SIZES = {"max_requests": 3, "max_prefill": 32, "block_size": 8, "max_context": 64}
STEPS = ((5, 9), (20, 1), (1, 30), (9, 4), (30, 12), (3, 3), (8, 8), (2, 2), (7, 5))  # prompt and new tokens


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(seed: int, **changes: int) -> Decoder:
    """A model with weights that mean nothing, and whose layers matter."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(replace(SMALL, **changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[1] ** -0.5)
    return model


def weak_draft(model: Decoder, noise: float) -> Decoder:
    """The model with noise on its weights: right sometimes."""
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        parameter.add_(torch.randn_like(parameter) * parameter.std() * noise if parameter.ndim == 2 else 0)
    return draft


def requests(seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    steps = [STEPS[i] for i in torch.randperm(len(STEPS), generator=generator).tolist()]
    return [
        Request(prompt=bytes(torch.randint(256, (prompt,), generator=generator).tolist()), max_new_tokens=new)
        for prompt, new in steps
    ]


def recorded(engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, serve.Runner]:
    """Let runners on the emulated device serve the engine."""
    monkeypatch.setattr(serve, "PREFILL_SIZES", (8, 32))
    monkeypatch.setattr(serve, "DECODE_SIZES", (1, 2, 3))
    tables, common = engine.table_shape, {"device_module": emulated}
    compiling = {"options": {"inner": "eager"}, **common}
    phases = {
        "prefill": serve.prefill_runner(engine.model, tables, **compiling),
        "draft_prefill": serve.prefill_runner(engine.draft, tables, name="draft prefill", **compiling),
        "verify": serve.decode_runner(engine.model, tables, tokens=engine.draft_tokens + 1, name="verify", **common),
        "propose": speculative.propose_runner(engine.draft, engine.draft_tokens, tables, **common),
        "decode": serve.decode_runner(engine.model, tables, **common),
    }
    for name, runner in phases.items():
        setattr(engine, name, runner)
    capture(list(phases.values()), any_order=True)
    return phases


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_output_is_the_targets_whatever_the_draft_guesses(k: int, seed: int) -> None:
    model, wanted = tiny(seed), requests(seed)
    expected = Engine(model, **SIZES).run(wanted)
    for draft in (tiny(seed + 9, layers=1), weak_draft(model, 0.1)):
        engine = SpeculativeEngine(model, draft, draft_tokens=k, **SIZES)
        assert engine.run(wanted) == expected
        assert engine.counters.accepted < engine.counters.guessed
        assert engine.counters.decode_tokens == sum(request.max_new_tokens - 1 for request in wanted)
        assert engine.allocator.available == engine.allocator.num_blocks
    assert engine.counters.accepted > 0


@pytest.mark.parametrize(("k", "replayed"), [(1, False), (4, False), (3, True)])
def test_a_draft_that_equals_the_target_is_never_wrong(k: int, replayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hole or a stale key in the draft's cache would show as a wrong guess, and guesses that a replay overwrote too.
    model, wanted = tiny(3), requests(3)
    expected = Engine(model, **SIZES).run(wanted)
    engine = SpeculativeEngine(model, copy.deepcopy(model), draft_tokens=k, **SIZES)
    if replayed:
        recorded(engine, monkeypatch)
    assert engine.run(wanted) == expected
    assert engine.counters.acceptance == 1
    assert engine.counters.guessed > 0


@pytest.mark.parametrize("k", [1, 3])
def test_recordings_alone_serve_it_and_requests_join_and_leave_in_the_middle(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = tiny(5), requests(5)
    expected = Engine(model, **SIZES).run(wanted)
    engine = SpeculativeEngine(model, weak_draft(model, 0.1), draft_tokens=k, **SIZES)
    phases = recorded(engine, monkeypatch)
    finished: dict[int, bytes] = {}
    tickets = []
    for request in wanted:
        tickets.append(engine.submit(request))
        for _ in range(2):
            finished |= engine.step()
    assert 0 < len(finished) < len(wanted)
    while not engine.idle:
        finished |= engine.step()
    assert [finished[ticket] for ticket in tickets] == expected
    replayed = {name: sum(runner.counters.replayed.values()) for name, runner in phases.items()}
    assert replayed["prefill"] == replayed["draft_prefill"] == engine.counters.prefill_calls
    assert replayed["propose"] == replayed["verify"] > 0
    assert replayed["verify"] + replayed["decode"] == engine.counters.decode_steps
    assert not any(runner.counters.uncaptured for runner in phases.values())


def test_the_last_token_of_every_request_is_decoded_without_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(6)
    wanted = [Request(prompt=b"ab", max_new_tokens=2), Request(prompt=b"cde", max_new_tokens=2)]
    expected = Engine(model, **SIZES).run(wanted)
    engine = SpeculativeEngine(model, tiny(7, layers=1), **SIZES)
    phases = recorded(engine, monkeypatch)
    assert engine.run(wanted) == expected
    assert engine.counters.guessed == 0
    assert sum(phases["decode"].counters.replayed.values()) == 1
    assert not phases["verify"].counters.replayed


def test_guesses_never_write_outside_of_their_requests_slots() -> None:
    model, k = tiny(8), 5
    engine = SpeculativeEngine(model, tiny(9, layers=1), draft_tokens=k, **SIZES)
    seen = []

    def watched(fn):
        def call(**batch):
            owned = {(i, one.slot(p, 8)) for i, one in enumerate(engine._running) for p in range(last_slot(one) + 1)}
            rows = zip(batch["token_req"].tolist(), batch["slots"].tolist(), strict=True)
            seen.extend(rows)
            assert {row for row in seen[-len(batch["slots"]) :] if row != (-1, -1)} <= owned
            return fn(**batch)

        return call

    def last_slot(one):
        return len(one.request.prompt) + one.request.max_new_tokens - 2

    engine.propose, engine.verify = watched(engine.propose), watched(engine.verify)
    # To the last position of the context, and of the rotary table's use.
    engine.run([Request(prompt=b"a" * 24, max_new_tokens=40), Request(prompt=b"b", max_new_tokens=3)])
    assert (-1, -1) in seen


def test_an_error_between_the_guesses_and_their_check_changes_nothing() -> None:
    model, wanted = tiny(10), requests(10)
    expected = Engine(model, **SIZES).run(wanted)
    engine = SpeculativeEngine(model, weak_draft(model, 0.1), **SIZES)
    working, calls = {name: getattr(engine, name) for name in ("draft_prefill", "propose", "verify")}, []

    def sometimes(name):
        def call(**batch):
            calls.append(name)
            if calls.count(name) % 3 == 1:
                raise KeyError(name)
            return working[name](**batch)

        return call

    for name in working:
        setattr(engine, name, sometimes(name))
    tickets, finished, errors = [engine.submit(request) for request in wanted], {}, set()
    while not engine.idle:
        try:
            finished |= engine.step()
        except KeyError as error:
            errors.add(error.args[0])
    assert errors == set(working)
    assert [finished[ticket] for ticket in tickets] == expected


def test_models_and_sizes_that_do_not_fit_are_refused() -> None:
    model = tiny(11)
    with pytest.raises(ValueError, match="draft_tokens must be positive, got 0"):
        SpeculativeEngine(model, tiny(12), draft_tokens=0, **SIZES)
    with pytest.raises(ValueError, match="another Decoder"):
        SpeculativeEngine(model, model, **SIZES)
    with pytest.raises(ValueError, match=r"vocab 256 .* got 128"):
        SpeculativeEngine(model, tiny(12, vocab=128), **SIZES)
    with pytest.raises(ValueError, match=r"at least 64 positions, got .* 32"):
        SpeculativeEngine(model, tiny(12, max_positions=32), **SIZES)


def test_the_packaged_draft_saves_more_than_half_of_the_steps() -> None:
    model, wanted = load(), [Request(prompt=prompt, max_new_tokens=13) for prompt in PROMPTS[:4]]
    alone = Engine(model, max_requests=4, max_context=256)
    expected = alone.run(wanted)
    engine = SpeculativeEngine(model, load(layers=2), draft_tokens=3, max_requests=4, max_context=256)
    assert engine.run(wanted) == expected
    assert engine.counters.tokens_per_step > 2


def test_the_speculative_demo_passes_on_the_emulated_device_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PREFILL_SIZES", (64, 256))
    monkeypatch.setattr(serve, "PROMPTS", serve.PROMPTS[:4])
    file = tmp_path / "demo.json"
    assert main(["demo", "--speculative", "--device", "emulated", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == []
    memory = found["memory"]
    alone = [count for name, count in memory.items() if name.endswith(" alone")]
    assert len(alone) == 5
    assert memory["all shared"] <= 1.05 * max(alone)
    assert memory["all with a pool each"] == sum(alone)
    assert 0 < found["acceptance"] < 1
    assert found["tokens per target step"] > 1
    text = capsys.readouterr().out
    assert "[ok] every token equals the target's alone, captured" in text
    assert "[ok] all shared is at most 1.05 x the largest phase alone" in text
