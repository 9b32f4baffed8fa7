"""The commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sgc_backend.__main__ import main
from sgc_backend.demo import serve


def test_the_demo_passes_on_the_emulated_device_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PREFILL_SIZES", (64, 256))
    monkeypatch.setattr(serve, "PROMPTS", serve.PROMPTS[:5])
    file = tmp_path / "demo.json"
    assert main(["demo", "--device", "emulated", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == []
    memory = found["memory"]
    assert memory["both shared"] <= 1.02 * max(memory["prefill alone"], memory["decode alone"])
    assert memory["both with a pool each"] == memory["prefill alone"] + memory["decode alone"]
    text = capsys.readouterr().out
    assert "[ok] every token equals eager's" in text
    assert "attends over a dynamic length" in text


def test_a_failed_check_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "run_demo", lambda **_: {"failed": ["something"]})
    assert main(["demo"]) == 1


def test_a_json_path_that_cannot_be_written_is_said_before_the_demo_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "run_demo", lambda **_: pytest.fail("ran"))
    assert main(["demo", "--json", "/nonexistent/folder/file.json"]) == 1
    assert "--json /nonexistent/folder/file.json" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["demo"], ["bench", "overhead"]):
        assert main([*arguments, "--json", str(tmp_path)]) == 1
        assert "it is a folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("how", [[], ["--speculative"]])
def test_a_demo_on_cuda_needs_a_device(how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda", *how]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err


def test_an_unknown_command_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve"])
    assert stopped.value.code == 2


def test_the_memory_bench_prints_where_it_ran_and_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "memory", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["environment"]["device"].startswith("emulated")
    rows = found["memory"]["MiB"]
    larger = found["memory"]["larger phase MiB"]
    assert rows["ours, prefill first"] <= 1.02 * larger
    for order in ("prefill first", "decode first", "interleaved", "ascending"):
        assert rows[f"ours, {order}, any_order"] <= 1.10 * larger
    assert rows["a pool each"] > rows["ours, prefill first"]
    text = capsys.readouterr().out
    assert text.index("torch:") < text.index("reserved")


def test_an_unknown_bench_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memroy"]) == 1
    assert "no bench case memroy; there are: overhead" in capsys.readouterr().err
