"""The shapes benchmark: what it counts, what it compares with eager, and where it stops."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgc_backend import OptionError, emulated
from sgc_backend.__main__ import main
from sgc_backend.bench import shapes
from sgc_backend.bench.peers import Peer, chosen_peers, tree_size
from sgc_backend.bench.shapes import Shapes


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LENGTHS", 12)
    monkeypatch.setattr(shapes, "LONGEST_ON_HOST", 16)


@pytest.fixture
def bench() -> Iterator[Shapes]:
    with torch.no_grad():
        yield Shapes(emulated, "cpu")


def eagerly(change: Callable[[torch.Tensor, Any], Any] = lambda out, model: out) -> Callable[[Any, Any], Peer]:
    return lambda model, module: Peer(lambda x: change(model(x), x))


def test_each_peers_recordings_and_graphs_are_counted_and_no_time_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "shapes", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["failed"] == []
    found = result["shapes"]
    assert len(set(found["lengths"])) == 12
    assert set(found["lengths"]) <= set(range(1, 17))
    eager, ours = found["rows"]
    assert (eager["peer"], ours["peer"]) == ("eager", "ours-eager")
    assert (eager["recordings"], eager["graphs"], eager["difference"]) == (None, 0, 0)
    assert 1 <= ours["recordings"] <= 12
    assert ours["recompiled"] == 0
    assert ours["difference"] <= 1
    assert {r["target"] for r in found["ratios"]} == {64, 0, 1.10}
    text = capsys.readouterr().out
    assert "<= 64: reached" in text
    assert "µs" not in text
    assert "p50" not in text


def test_the_length_that_dynamo_compiles_apart_is_not_a_recompilation(
    bench: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.lengths = [5, 1, 7, 5]
    row, ratios = bench.peer("ours-eager", chosen_peers(None, "cpu")["ours-eager"], 60)
    assert (row["graphs"], row["recompiled"]) == (2, 0)
    assert next(r["values"][0] for r in ratios if "recordings" in r["name"]) == row["recordings"] - 1


def a_little_in_the_last_row(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:-1], out[-1:] * (1.0003 if len(x) > 8 else 1)])


@pytest.mark.parametrize("wrong", [a_little_in_the_last_row, lambda out, x: out * float("nan")])
def test_a_peer_that_is_wrong_in_one_row_fails_the_run(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "chosen_peers", lambda names, device: {"wrong": eagerly(wrong)})
    assert main(["bench", "shapes"]) == 1
    assert "FAILED: wrong differs from eager by" in capsys.readouterr().out


def test_a_peer_that_runs_out_of_time_is_measured_by_what_it_managed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(shapes, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert main(["bench", "shapes", "--peers", "eager", "--seconds", "5"]) == 0
    assert "eager: 5 s were over after 5 of 12 lengths; those are measured" in capsys.readouterr().out


def test_a_peer_is_called_until_a_pass_records_nothing_more(bench: Shapes) -> None:
    bench.lengths = [3, 4]
    row, _ = bench.peer("ours-eager", chosen_peers(None, "cpu")["ours-eager"], 60)
    assert row["recordings"] == 2  # one call warms up, the next one records
    assert row["uncaptured"] == 0


def test_on_a_gpu_ours_is_timed_against_recordings_at_exact_sizes(
    bench: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = functools.partial(shapes.measure, warm_up=0, in_a_row=1, settle=0)
    monkeypatch.setattr(shapes, "measure", quick)
    monkeypatch.setattr(shapes, "ROUNDS", 1)
    bench.times, bench.lengths = True, [3, 4, 6]
    row, ratios = bench.peer("ours-eager", chosen_peers(None, "cpu")["ours-eager"], 60)
    assert row["samples"] == 3 * shapes.TIMED_PASSES
    assert 0 < row["host_p50"] <= row["host_p99"]
    assert 0 < row["first pass s"] <= row["steady s"]
    last = json.loads(json.dumps(ratios[-1]))
    assert last["name"] == "ours-eager: p50 host / wall of 3 lengths to exact sizes"
    assert (len(last["values"]), last["target"]) == (2, 1.15)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its own recordings
def test_every_peer_runs_on_a_gpu_and_torchs_recordings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ON_GPU", shapes.ON_HOST)
    monkeypatch.setattr(shapes, "LONGEST_ON_GPU", 16)
    monkeypatch.setattr(shapes, "LENGTHS", 4)
    found = shapes.run(lambda line: None)
    assert found["failed"] == []
    rows = {row["peer"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "inductor", "reduce-overhead", "ours-inductor", "ours-eager"]
    assert rows["reduce-overhead"]["recordings"] == 4
    assert all(row["wall_p50"] > 0 for row in rows.values())


def test_an_unknown_peer_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "shapes", "--peers", "eager,inductr"]) == 1
    assert "no inductr on this device; there are: eager, ours-eager" in capsys.readouterr().err
    with pytest.raises(OptionError):
        chosen_peers("reduce-overhead", "cpu")
    assert list(chosen_peers("ours-eager, eager", "cuda")) == ["ours-eager", "eager"]
    assert list(chosen_peers(None, "cuda")) == ["eager", "inductor", "reduce-overhead", "ours-inductor", "ours-eager"]


def test_options_that_could_do_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "shapes", "--seconds", "nan"]) == 1
    assert "--seconds must be a number > 0, got nan" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "memory", "--peers", "eager"])
    assert "--peers and --seconds are for the case shapes, got memory" in capsys.readouterr().err


def test_recordings_in_torchs_trees_are_counted_at_every_depth() -> None:
    leaf = SimpleNamespace(children={})
    root = SimpleNamespace(children={7: [leaf, leaf]})
    assert tree_size({}) == 0
    assert tree_size({1: [root], 2: [leaf]}) == 4
