"""The wrappers benchmark: every way gives eager's result, does what it must and no more, and meets its own floors."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sgc_backend import emulated
from sgc_backend.__main__ import main
from sgc_backend.bench import wrappers
from sgc_backend.bench.attention import attend
from sgc_backend.bench.breakable_peer import breakable_peer
from sgc_backend.bench.decoder import ON_HOST, causal
from sgc_backend.bench.forwards import IN_TURN, Forwards

LAYERS = ON_HOST.layers


@pytest.fixture
def forwards() -> Iterator[Forwards]:
    with torch.no_grad():
        yield Forwards("decode", (4,), ON_HOST, emulated, "cpu", ("eager",))


def test_each_way_replays_its_graphs_runs_its_cuts_and_copies_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "wrappers", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["wrappers"]["forwards"]
    assert [(f["phase"], f["size"]) for f in found] == [
        ("decode", 256),
        ("decode", 16),
        ("decode", 1),
        ("prefill", 256),
    ]
    for forward in found:
        counts = forward["counts"]

        def did(name: str, counts: dict[str, Any] = counts) -> tuple[int, ...]:
            return tuple(counts[name][column] for column in ("graphs", "copies", "clones", "ops"))

        assert did("full") == (1, 1, 0, 0)
        assert did("breakable") == did("breakable (functions)") == (LAYERS + 1, 0, 0, LAYERS)
        assert did("tc_piecewise") == (LAYERS + 1, 1, 0, LAYERS)  # its input
        assert did("piecewise") == (LAYERS + 1, 1, 1, LAYERS)  # its input and its output
        for name in ("breakable", "tc_piecewise", "piecewise"):
            assert did(f"{IN_TURN} of {name}") == (LAYERS + 1, 0, 0, LAYERS)
            assert counts[name]["launches"] == counts[f"bare replays of {name}"]["launches"] > 0
        assert counts["full"]["launches"] == counts["bare replay"]["launches"]
        assert set(forward["relative error"].values()) == {0.0}
    text = capsys.readouterr().out
    assert "decode 256: what one call does" in text
    assert "µs" not in text


def test_times_are_set_against_floors_of_the_same_run(forwards: Forwards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        wrappers, "measure", functools.partial(wrappers.measure, rounds=2, warm_up=0, in_a_row=1, settle=0)
    )
    said: list[str] = []
    found = json.loads(json.dumps(wrappers._times(forwards, 4, said.append)))
    assert len({row["run"] for row in found["rows"]}) == 1
    targets = {r["name"]: r["target"] for r in found["ratios"] if r["target"]}
    assert targets == {
        "full / (bare replay + one packed copy)": 1.30,
        "full, check_addresses=False / (bare replay + one packed copy)": 1.30,
        "breakable / (cut ops alone + bare replays of breakable)": 1.05,
        "breakable (functions) / (cut ops alone + bare replays of breakable (functions))": 1.05,
        "tc_piecewise / (cut ops alone + bare replays of tc_piecewise)": 1.05,
        "piecewise / (cut ops alone + bare replays of piecewise)": 1.05,
    }
    assert all(any(line.startswith(name) for line in said) for name in targets)


@pytest.mark.gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@torch.no_grad()
def test_every_way_agrees_on_a_gpu_and_every_ratio_is_made(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        wrappers, "measure", functools.partial(wrappers.measure, rounds=2, warm_up=0, in_a_row=1, settle=0)
    )
    sizes = (16, 1)
    forwards = Forwards(phase, sizes, ON_HOST, torch.cuda, "cuda", ("eager", "inductor"))
    for n in sizes:
        found = wrappers._times(forwards, n, lambda line: None)
        exact = {name for name, error in found["relative error"].items() if error == 0}
        assert exact >= {"full", "breakable", "tc_piecewise", "piecewise"}
        assert sum(r["target"] is not None for r in found["ratios"]) == 6


@pytest.mark.parametrize("name", ["full", "breakable", "tc"])
def test_a_way_that_differs_from_eager_is_refused(
    forwards: Forwards, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = getattr(forwards, name)
    right = way.replay
    monkeypatch.setattr(way, "replay", lambda key: right(key) + 1e-6)
    with pytest.raises(RuntimeError, match=rf"{name}\w*, decode 4: differs from eager"):
        forwards.check(4)


def test_graphs_that_are_not_one_more_than_the_layers_are_refused(
    forwards: Forwards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "_replayed", lambda n: {"piecewise": []})
    with pytest.raises(RuntimeError, match="piecewise made 0 graphs of 2 layers"):
        forwards.floors(4)


def test_the_op_attends_over_the_tokens_before_or_over_a_cache() -> None:
    q, k, v, out = (torch.randn(5, 2, 8) for _ in range(4))
    attend(q, k, v, out)
    assert torch.equal(out, causal(q, k, v))
    assert torch.allclose(out[0], v[0])  # the first token sees itself alone
    k_cache, v_cache = (torch.randn(7, 2, 3, 8) for _ in range(2))
    attend(q, k_cache, v_cache, out)
    expected = F.scaled_dot_product_attention(q[2, :, None], k_cache[2], v_cache[2])[:, 0]
    assert torch.allclose(out[2], expected, atol=1e-6)


def test_the_breakable_peer_is_left_out_where_it_cant_run() -> None:
    assert breakable_peer("cpu") is None
