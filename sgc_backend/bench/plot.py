"""What was measured as a chart: bars of each case's rows, and ratios with a line at their targets.

What is drawn is decided without matplotlib, from the same plain values that JSON keeps; only `plot_to` needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgc_backend import OptionError
from sgc_backend.drafts import draft_of

BAR = 0.8  # height of a row's bars together, in rows
INCHES_A_ROW, INCHES_A_PANEL, WIDTH = 0.26, 1.3, 15
TIMES = {"host µs": "host", "wall µs": "wall"}


@dataclass
class Panel:
    """One chart.

    Attributes:
        title, unit: what is shown.
        names: one a row, from the top.
        series: values by what they are, one for each row; None: not measured.
        targets: for each row what it should stay below; None: nothing was set.
    """

    title: str
    unit: str
    names: list[str]
    series: dict[str, list[float | None]]
    targets: list[float | None] = field(default_factory=list)


def panels(result: Mapping[str, Any]) -> list[Panel]:
    """The charts of a result as ``bench`` writes it to JSON, in the order of its cases."""
    found: list[Panel] = []
    for case, value in result.items():
        if case not in ("environment", "failed") and isinstance(value, Mapping):
            found += _of(case, value)
    return found


def _of(title: str, found: Mapping[str, Any]) -> Iterator[Panel]:
    rows, ratios = found.get("rows"), found.get("ratios")
    if _holds(rows, "name", "host", "wall"):
        yield Panel(title, "µs", [r["name"] for r in rows], {k: [r[v] for r in rows] for k, v in TIMES.items()})
    elif _holds(rows, "peer", "host_p50", "wall_p50"):
        times = {k: [r[f"{v}_p50"] for r in rows] for k, v in TIMES.items()}
        yield Panel(f"{title}: p50", "µs", [r["peer"] for r in rows], times)
    if _holds(ratios, "name", "target"):
        names, targets = [r["name"] for r in ratios], [r["target"] for r in ratios]
        if _holds(ratios, "host", "wall"):
            series = {what: [r[what] for r in ratios] for what in ("host", "wall")}
        else:
            series = {"value": [max(r["values"]) for r in ratios]}
        yield Panel(f"{title}: ratios", "ratio", names, series, targets)
    for what in ("seconds", "MiB"):
        values = found.get(what)
        if isinstance(values, Mapping) and values:
            yield _table(f"{title}: {what}", what, values)
    counts = found.get("counts")
    if isinstance(counts, Mapping) and counts:
        yield _table(f"{title}: what one call does", "count", counts)
    for part in found.get("forwards", ()):
        yield from _of(f"{title}, {part['phase']} {part['size']}", part)


def _holds(rows: Any, *columns: str) -> bool:
    return isinstance(rows, Sequence) and bool(rows) and all(column in rows[0] for column in columns)


def _table(title: str, unit: str, values: Mapping[Any, Any]) -> Panel:
    """One row a key; where what is behind it has columns, one series a column."""
    first = next(iter(values.values()))
    if not isinstance(first, Mapping):
        return Panel(title, unit, [str(name) for name in values], {unit: list(values.values())})
    return Panel(
        title, unit, [str(n) for n in values], {str(c): [row.get(c) for row in values.values()] for c in first}
    )


@contextlib.contextmanager
def plot_to(path: str | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A writer of a result's chart to ``path``, which is replaced when the chart is written and not before.

    What would keep it from being written is refused here, before anything is measured. ``path=None`` writes nothing.

    Raises:
        OptionError: matplotlib is missing; the name's ending is none that it can write; the folder can't be written to.
    """
    if path is None:
        yield lambda result: None
        return
    try:
        from matplotlib.figure import Figure  # the extra [plot], which nothing else needs
    except ImportError as error:
        raise OptionError(
            f'--plot {path} needs matplotlib: pip install "sgc-backend[plot]" (the import said: {error})'
        ) from error
    kind, known = os.path.splitext(path)[1][1:].lower(), sorted(Figure().canvas.get_supported_filetypes())
    if kind not in known:
        raise OptionError(f"--plot {path}: the name must end with one of .{', .'.join(known)}")
    with draft_of(path, "--plot") as (draft, keep):

        def write(result: Mapping[str, Any]) -> None:
            environment = result.get("environment", {})
            heading = ", ".join(f"{k} {environment[k]}" for k in ("device", "torch", "date") if k in environment)
            _draw(Figure, panels(result), heading).savefig(draft, format=kind)
            keep()

        yield write


def _draw(figure_class: Any, charts: Sequence[Panel], heading: str) -> Any:
    heights = [INCHES_A_PANEL + INCHES_A_ROW * len(c.names) * max(1.0, len(c.series) / 2) for c in charts]
    figure = figure_class(figsize=(WIDTH, max(sum(heights), 1) + 0.5), layout="constrained")
    figure.suptitle(heading)
    if charts:
        axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
        for chart, row in zip(charts, axes, strict=True):
            _draw_one(row[0], chart)
    return figure


def _draw_one(axes: Any, chart: Panel) -> None:
    height, rows = BAR / max(len(chart.series), 1), range(len(chart.names))
    for number, (what, values) in enumerate(chart.series.items()):
        places = [row - BAR / 2 + height * (number + 0.5) for row in rows]
        bars = axes.barh(places, [v or 0 for v in values], height=height, label=what)
        axes.bar_label(bars, labels=[_text(v) for v in values], fontsize=7, padding=2)
    for row, target in zip(rows, chart.targets, strict=False):
        if target is not None:
            axes.plot([target, target], [row - 0.5, row + 0.5], color="black", linewidth=1.5)
    axes.set_yticks(list(rows), chart.names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title(chart.title, loc="left", fontsize=9)
    axes.set_xlabel(chart.unit + (", black: target" if _any(chart.targets) else ""), fontsize=8)
    axes.legend(fontsize=7, loc="lower right")


def _any(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
