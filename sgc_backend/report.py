"""explain and stats: what was split, cut, recorded and run, in words and as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .groups import Split
from .recorders import recorders
from .stats import key_text


def stats() -> dict[str, dict[str, Any]]:
    """Counters of everything alive, by name.

    Returns:
        For each compiled graph and wrapper: ``replayed``, ``captured`` and ``evicted`` by key, ``uncaptured``,
        ``failures`` and ``uncompiled`` by cause. Plain types, fit for JSON.
    """
    return {r.name: r.counters.as_dict() for r in sorted(recorders(), key=lambda r: natural(r.name))}


def natural(name: str) -> tuple[Any, ...]:
    """Sort key that puts "graph 10" behind "graph 9"."""
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split())


@dataclass
class Explanation:
    """What `explain` found; ``str()`` gives the text.

    Attributes:
        graphs: the compiled graphs that the call ran, in order.
        breaks: why Dynamo broke the graph, each reason once: Dynamo counts an attempt as well as the break itself.
    """

    graphs: list[Any] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        graphs, breaks = len(self.graphs), len(self.breaks)
        lines = [f"{graphs} Dynamo graph{'s' * (graphs != 1)}, {breaks} kind{'s' * (breaks != 1)} of graph break"]
        if not graphs:
            lines.append("  nothing that was called is compiled with sgc_piecewise")
        lines.extend(f"  break: {reason.strip().splitlines()[0]}" for reason in self.breaks)
        for graph in self.graphs:
            lines.extend(graph_lines(graph))
        return "\n".join(lines)


def graph_lines(graph: Any) -> list[str]:
    """One compiled graph in words."""
    split: Split | None = getattr(graph, "split", None)
    if split is None:
        return [f"{graph.name}: whole, uncaptured: {graph.cause}", *_counter_lines(graph)]
    lines = [f"{graph.name}: {len(split.pieces)} pieces, {sum(len(g.cuts) for g in split.cuts)} cuts"]
    if graph.after is not None:
        lines.append(f"  a capture failed in an op: {graph.after.name}, which cuts it, takes the calls to come")
    padding = graph.padding
    if padding is None:
        lines.append(f"  not padded: {graph.not_padded}")
    elif padding.buckets.dynamic:
        names = ", ".join(sorted(map(str, padding.buckets.dynamic)))
        lines.append(f"  padded: {names} rounded up to recorded sizes; cuts see the real rows")
    kinds: dict[str, list[str]] = {}
    for spec in graph.inputs:
        kinds.setdefault(spec.kind, []).append(spec.label + (" (written)" if spec.written else ""))
    for kind, labels in kinds.items():
        shown = ", ".join(labels[:4]) + (f", ... {len(labels) - 4} more" if len(labels) > 4 else "")
        lines.append(f"  {kind} inputs: {len(labels)} ({shown})")
    for group in split.groups:
        if group.kind == "piece":
            lines.append(f"  piece {group.index}: {group.kernels} ops that launch, {len(group.outputs)} results")
            if group.index in graph.uncompiled:
                lines.append(f"    not compiled, runs eagerly: {graph.uncompiled[group.index].cause}")
            continue
        if not group.cuts:
            lines.append(f"  views {group.index}: run eagerly, no kernel")
        for cut in group.cuts:
            where = f"  at {cut.source}" if cut.source else ""
            lines.append(f"  cut {group.index}: {cut.name}: {cut.reason}{where}")
    if graph.plans:
        lines.append("  recordings: " + ", ".join(f"{key_text(k)} ({len(p)})" for k, p in list(graph.plans.items())))
    else:
        lines.append("  recordings: none yet")
    return [*lines, *_counter_lines(graph)]


def _counter_lines(graph: Any) -> list[str]:
    counters = graph.counters
    lines = []
    if counters.replayed:
        lines.append("  replayed: " + ", ".join(f"{key_text(k)} x{n}" for k, n in list(counters.replayed.items())))
    for cause, count in list(counters.uncaptured.items()):
        lines.append(f"  uncaptured x{count}: {cause}")
    return lines


def explained(call: Callable[[], Any], calls: int) -> Explanation:
    """Run ``call`` ``calls`` times and tell which compiled graphs ran and where Dynamo broke.

    Raises:
        Exception: whatever ``call`` raises.
    """
    from torch._dynamo.utils import (
        counters,  # torch._dynamo is heavy; only who asks for an explanation pays for it
    )

    before_runs = {id(r): _runs(r) for r in recorders()}
    before_breaks = dict(counters["graph_break"])
    for _ in range(calls):
        call()
    ran = [r for r in recorders() if _runs(r) > before_runs.get(id(r), 0) and r.kind == "compiled"]
    for graph in ran:  # which takes those in that take over and haven't run yet
        after = getattr(graph, "after", None)
        if after is not None and not any(r is after for r in ran):
            ran.append(after)
    breaks = [r for r, count in counters["graph_break"].items() if count > before_breaks.get(r, 0)]
    return Explanation(sorted(ran, key=lambda r: natural(r.name)), breaks)


def _runs(recorder: Any) -> int:
    return sum(recorder.counters.replayed.values()) + sum(recorder.counters.uncaptured.values())
