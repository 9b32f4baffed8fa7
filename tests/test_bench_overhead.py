"""The overhead benchmark: each way gives eager's result, does what it must and no more, and meets its own floors."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from sgc_backend import emulated
from sgc_backend.__main__ import main
from sgc_backend.bench import overhead
from sgc_backend.bench.decoder import ON_HOST
from sgc_backend.bench.overhead import RUNNERS, Steps


def test_each_way_copies_its_inputs_and_replays_one_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "overhead", "--json", str(file)]) == 0
    counts = json.loads(file.read_text())["overhead"]["counts"]

    def did(name: str) -> tuple[int, ...]:
        return tuple(counts[name][column] for column in ("graphs", "copies", "clones", "ops"))

    for name in RUNNERS:
        clones = int(name == "outputs=clone")
        assert did(f"runner, six device inputs, {name}") == (1, 6, clones, 0)
        # Six tensors are made (of arrays: the host's are the device's here), packed into one block, and that sent.
        assert did(f"runner, six host inputs, {name}") == (1, 6 + 1, clones, 6)
        assert did(f"runner, six lists, {name}") == (1, 6 + 1, clones, 6)
        if not clones:
            assert did(f"full, {name}") == (1, 1, 0, 0)
    assert {row["launches"] for row in counts.values()} == {0, counts["bare replay"]["launches"]}
    text = capsys.readouterr().out
    assert "overhead: what one call does" in text
    assert "µs" not in text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_times_are_set_against_floors_of_the_same_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        overhead, "measure", functools.partial(overhead.measure, rounds=2, warm_up=0, in_a_row=1, settle=0)
    )
    said: list[str] = []
    steps = Steps(ON_HOST, torch.cuda if device == "cuda" else emulated, device)
    found = json.loads(json.dumps(overhead._times(steps, said.append)))
    assert len({row["run"] for row in found["rows"]}) == 1
    assert {row["name"] for row in found["rows"]} >= {"what moved", "bare replay", "one packed copy"}
    targets = {r["name"]: r["target"] for r in found["ratios"] if r["target"]}
    assert targets == {
        f"{way}, {name} / (bare replay + {floor})": 1.30
        for name in RUNNERS
        if name != "outputs=clone"
        for way, floor in (
            ("full", "one packed copy"),
            ("runner, six host inputs", "one packed copy"),
            ("runner, six device inputs", "one call that copies six"),
        )
    }
    assert all(any(line.startswith(name) for line in said) for name in targets)


@torch.no_grad()
def test_a_way_that_differs_from_eager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(ON_HOST, emulated, "cpu")
    runner = steps.runners["outputs=static"]
    right = runner._results.cut
    monkeypatch.setattr(runner._results, "cut", lambda *args, **settings: right(*args, **settings) + 1)
    with pytest.raises(RuntimeError, match="runner, six host inputs, outputs=static: differs from eager"):
        steps.check()
