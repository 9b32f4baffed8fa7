"""The cases capture and memory: what is recorded by each side, what is compared, and where a session's time goes."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgc_backend import emulated
from sgc_backend.__main__ import main
from sgc_backend.bench import capture, memory
from sgc_backend.bench.capture import Sizes
from sgc_backend.bench.decoder import ON_HOST
from sgc_backend.bench.profiled import TOP, profiled


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LONGEST_ON_HOST", 8)


@pytest.fixture
def bench() -> Iterator[Sizes]:
    with torch.no_grad():
        yield Sizes(ON_HOST, 8, emulated, "cpu")


def test_both_sides_record_every_size_and_piece_and_no_time_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "capture", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["capture"]
    assert found["sizes"] == [8, 4, 3, 2]
    assert found["recordings"] == found["plain recordings"] == 4 * found["pieces"] == 4 * (ON_HOST.layers + 1)
    assert not {"seconds", "ratios", "profile"} & set(found)
    assert " s, " not in capsys.readouterr().out


def test_on_a_gpu_the_session_is_set_against_forwards_and_the_memory_against_plain_recordings(
    bench: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what is taken outside of the allocator before anything, with plain recordings, with ours beside them, and shared
    taken = iter([1 << 20, (1 << 20) + 12 * 4096, (1 << 20) + 12 * 5120, (1 << 20) + 12 * 5632])
    monkeypatch.setattr(bench, "outside", lambda: next(taken))
    bench.times, bench.sharing = True, bench._compiled(7, share_executables=True)
    found = json.loads(json.dumps(capture._measured(bench, ON_HOST, lambda line: None, False)))
    assert found["KiB outside a recording"] == {
        "ours": 1.0,
        "ours with share_executables": 0.5,
        "plain": 4.0,
        "memory_report": 0.0,
    }
    assert set(found["seconds"]) == {"two eager forwards per size", "session", "plain recordings by hand"}
    speed, space, shared = found["ratios"]
    assert [ratio["target"] for ratio in found["ratios"]] == [1.3, 0.25, 0.25]
    assert (space["values"], shared["values"]) == ([0.25], [0.125])
    assert space["reached"]
    assert speed["values"] == [found["seconds"]["session"] / found["seconds"]["two eager forwards per size"]]


@pytest.mark.gpu
@torch.no_grad()
def test_recordings_take_memory_outside_the_pool_on_a_gpu() -> None:
    bench = Sizes(ON_HOST, 256, torch.cuda, "cuda")
    found = capture._measured(bench, ON_HOST, lambda line: None, True)
    # Other processes on the device take memory and give it back meanwhile.
    assert "PYTEST_XDIST_WORKER" in os.environ or found["KiB outside a recording"]["plain"] > 0
    assert len(found["profile"]["top"]) == TOP


def test_a_recording_by_hand_that_differs_from_eager_is_refused(bench: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    block = bench.plain.blocks[0]
    right = block.in_front
    monkeypatch.setattr(block, "in_front", lambda x: tuple(2 * t for t in right(x)))
    real = bench.check

    def check(n: int, way: Callable[[], Any]) -> None:
        monkeypatch.setattr(block, "in_front", right)  # eager is right
        real(n, way)

    with pytest.raises(RuntimeError, match="8 rows: differs from eager"):
        bench.plain.record(bench.x, [8], check)


def test_a_profile_tells_where_the_session_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "capture", "--profile", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["capture"]["profile"]
    if not found["lost"]:
        assert set(found["parts"]) == {*capture.PARTS, "rest"}
        assert all(found["parts"][name] > 0 for name in capture.PARTS)
    assert len(found["top"]) == TOP
    assert sum(found["parts"].values()) <= 1.2 * found["total"]
    assert "capture_begin" in capsys.readouterr().out


def test_a_profile_parts_time_and_sees_the_collector() -> None:
    def inner() -> None:
        time.sleep(0.02)

    def outer() -> None:
        inner()
        gc.collect()

    stem = Path(__file__).stem
    found = profiled(outer, {"inner": ([(stem, "inner")], []), "outer besides": ([(stem, "outer")], [(stem, "inner")])})
    assert 0.02 <= found.parts["inner"] <= found.total
    assert 0 < found.parts["outer besides"] <= found.total - 0.02
    assert found.collections == 1
    assert 0 < found.collecting <= found.parts["outer besides"]
    assert found.top[0][2].endswith("sleep>") or "gc.collect" in found.top[0][2]
    assert not any("collector" in str(callback) for callback in gc.callbacks)


def test_a_profile_of_another_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "memory", "--profile"])
    assert "--profile is for the case capture, got memory" in capsys.readouterr().err


def test_ours_with_both_phases_is_set_against_eagers_peak_where_that_was_measured() -> None:
    rows = {memory.EAGER: 100.0, "prefill alone": 90.0, "ours, ascending": 111.0, "ours, prefill first": 110.0}
    found = memory._against_eager({**rows, "ours, piecewise prefill alone": 1.0})
    assert [(r["name"], r["values"], r["target"], r["reached"]) for r in found] == [
        ("ours, ascending / eager's peak", [1.11], 1.10, False),
        ("ours, prefill first / eager's peak", [1.10], 1.10, True),
    ]
    del rows[memory.EAGER]
    assert memory._against_eager(rows) == []
