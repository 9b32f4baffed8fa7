"""The benchmarks' charts: what is drawn of which figures, and what is refused before anything is measured."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from sgc_backend import OptionError
from sgc_backend.__main__ import main
from sgc_backend.bench import CASES
from sgc_backend.bench.plot import Panel, panels, plot_to


def row(name: str, host: float, wall: float) -> dict[str, Any]:
    return {"name": name, "host": host, "wall": wall}


ROWS = [row("bare", 4.0, 9.0), row("ours", 5.0, 10.0)]
RATIOS = [row("ours / bare", 1.25, 1.11) | {"target": 1.3}, row("eager / ours", 9.0, 3.0) | {"target": None}]


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)


def test_rows_are_bars_and_ratios_have_their_targets() -> None:
    assert panels({"environment": {"device": "x"}, "overhead": {"rows": ROWS, "ratios": RATIOS}, "failed": []}) == [
        Panel("overhead", "µs", ["bare", "ours"], {"host µs": [4.0, 5.0], "wall µs": [9.0, 10.0]}),
        Panel(
            "overhead: ratios",
            "ratio",
            ["ours / bare", "eager / ours"],
            {"host": [1.25, 9.0], "wall": [1.11, 3.0]},
            [1.3, None],
        ),
    ]


def test_a_case_in_parts_has_charts_of_each() -> None:
    parts = [{"phase": "decode", "size": 4, "rows": ROWS}, {"phase": "prefill", "size": 8, "rows": ROWS}]
    assert [p.title for p in panels({"wrappers": {"forwards": parts}})] == ["wrappers, decode 4", "wrappers, prefill 8"]


def test_memory_seconds_and_counts_are_bars_by_name() -> None:
    found = panels(
        {
            "memory": {"MiB": {"prefill alone": 322.0}},
            "compile": {"seconds": {"ours": {8: 1.0, 64: 1.2}}},
            "overhead": {"counts": {"bare": {"graphs": 1, "copies": 0}}},
            "shapes": {
                "rows": [{"peer": "eager", "host_p50": 1.0, "wall_p50": 2.0}],
                "ratios": [{"name": "p50", "values": [1.0, 1.1], "target": 1.15}],
            },
        }
    )
    assert found == [
        Panel("memory: MiB", "MiB", ["prefill alone"], {"MiB": [322.0]}),
        Panel("compile: seconds", "seconds", ["ours"], {"8": [1.0], "64": [1.2]}),
        Panel("overhead: what one call does", "count", ["bare"], {"graphs": [1], "copies": [0]}),
        Panel("shapes: p50", "µs", ["eager"], {"host µs": [1.0], "wall µs": [2.0]}),
        Panel("shapes: ratios", "ratio", ["p50"], {"value": [1.1]}, [1.15]),
    ]


def test_a_missing_matplotlib_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, without_matplotlib: None
) -> None:
    monkeypatch.setitem(CASES, "overhead", lambda say: pytest.fail("measured"))
    file = tmp_path / "bench.png"
    assert main(["bench", "overhead", "--plot", str(file)]) == 1
    assert 'needs matplotlib: pip install "sgc-backend[plot]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_needs_matplotlib_where_nothing_is_drawn(without_matplotlib: None) -> None:
    with plot_to(None) as plot:
        plot({"overhead": {"rows": ROWS}})


@pytest.mark.parametrize(
    ("name", "said"), [("bench.docx", r"must end with one of .*\.png"), ("no/bench.png", "No such file or directory")]
)
def test_a_chart_that_could_not_be_written_is_refused_first(tmp_path: Path, name: str, said: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OptionError, match=said), plot_to(str(tmp_path / name)):
        pytest.fail("measured")


def test_the_chart_is_written_in_the_format_that_its_name_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(CASES, "overhead", lambda say: {"rows": ROWS, "ratios": RATIOS})
    assert main(["bench", "overhead", "--plot", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "a.json").read_text())["overhead"]["rows"] == ROWS
    assert main(["bench", "overhead", "--plot", str(tmp_path / "a.svg")]) == 0
    assert "ours / bare" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 1000
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.json", "a.png", "a.svg"]


def test_a_chart_stays_as_it_was_where_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def fails(say: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setitem(CASES, "overhead", fails)
    file = tmp_path / "a.png"
    file.write_text("before")
    with pytest.raises(KeyError):
        main(["bench", "overhead", "--plot", str(file)])
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
