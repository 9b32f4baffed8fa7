"""The cases decode, piecewise, dynamo and dispatch: each way does what it must and meets floors of its own run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from sgc_backend import emulated
from sgc_backend.__main__ import main
from sgc_backend.bench import decode, dispatch, dynamo, piecewise
from sgc_backend.bench.agree import must_agree
from sgc_backend.bench.decoder import ON_HOST
from sgc_backend.bench.peers import why_not_captured
from sgc_backend.bench.tables import say_ratios
from sgc_backend.bench.timing import Ratio

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def module_of(device: str) -> ModuleType:
    return torch.cuda if device == "cuda" else emulated


def quick(case: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = case.measure
    monkeypatch.setattr(case, "measure", lambda *args, rounds=0: real(*args, rounds=2, warm_up=0, in_a_row=1, settle=0))


def result_of(case: str, tmp_path: Any) -> dict[str, Any]:
    file = tmp_path / "bench.json"
    assert main(["bench", case, "--json", str(file)]) == 0
    return json.loads(file.read_text())[case]


def did(row: dict[str, int]) -> tuple[int, ...]:
    return tuple(row[column] for column in ("graphs", "copies", "clones", "ops", "allocations"))


def targets_of(found: dict[str, Any]) -> dict[str, float]:
    """Names and targets of the ratios that have one, of rows of one run."""
    found = json.loads(json.dumps(found))
    assert len({row["run"] for row in found["rows"]}) == 1
    return {r["name"]: r["target"] for r in found["ratios"] if r["target"]}


# -- decode ----------------------------------------------------------------------------------------------------------


def test_a_decode_step_is_its_six_copies_and_one_graph_at_every_batch(tmp_path: Any) -> None:
    counts = result_of("decode", tmp_path)["counts"]
    for n in decode.BATCHES_ON_HOST:
        assert did(counts[f"runner, batch {n}"]) == (1, 6, 0, 0, 0)
        assert did(counts[f"full, batch {n}"]) == did(counts[f"bare replay, batch {n}"]) == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_every_batchs_wall_time_is_set_against_its_own_bare_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(decode, monkeypatch)
    said: list[str] = []
    found = decode._times(decode.Batches(ON_HOST, (1, 2), module_of(device), device), said.append)
    pairs = [f"{way}, batch {n} / bare replay, batch {n}" for way in ("runner", "full") for n in (1, 2)]
    assert targets_of(found) == dict.fromkeys(pairs, 1.02)
    assert all(r["reached"] == (r["wall"] <= 1.02) for r in found["ratios"])  # whatever the host took
    assert any("target of wall" in line for line in said)


# -- piecewise -------------------------------------------------------------------------------------------------------


def test_cuts_in_place_copy_nothing_and_new_results_are_copied_once_each(tmp_path: Any) -> None:
    counts = result_of("piecewise", tmp_path)["counts"]
    for n in piecewise.LAYERS_ON_HOST:
        assert did(counts[f"{n} layers, exact, behind Dynamo"]) == (n + 1, 1, 0, n, 0)  # its input
        assert did(counts[f"{n} layers, exact, by key"]) == (n + 1, 1, 0, n, 0)
        assert did(counts[f"{n} layers, padded, behind Dynamo"]) == (n + 1, n + 1, 0, n, n)
        assert did(counts[f"{n} layers, exact, in turn"]) == (n + 1, 0, 0, n, 0)
        assert did(counts[f"{n} layers, padded, in turn"]) == (n + 1, 0, 0, n, n)
        assert (
            counts[f"{n} layers, exact, behind Dynamo"]["launches"]
            == (counts[f"{n} layers, exact, bare replays"]["launches"])
        )


@pytest.fixture
def stacks() -> Callable[[str], dict[int, piecewise.Stack]]:
    def make(device: str) -> dict[int, piecewise.Stack]:
        return {n: piecewise.Stack(replace(ON_HOST, layers=n), module_of(device), device) for n in (1, 2)}

    return make


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its own recordings
@torch.no_grad()
def test_forwards_and_a_piece_more_are_set_against_cuts_and_replays(
    device: str, monkeypatch: pytest.MonkeyPatch, stacks: Callable[[str], dict[int, piecewise.Stack]]
) -> None:
    quick(piecewise, monkeypatch)
    said: list[str] = []
    made = stacks(device)
    peers = made[1].peers(said.append) if device == "cuda" else {}
    found = piecewise._times(made, peers, said.append)
    if device == "cuda":
        names = {row["name"] for row in found["rows"]}
        skipped = [line for line in said if "skipped" in line]
        assert len(skipped) + sum(f"1 layers, {peer}" in names for peer in piecewise.OVERHEAD_PEERS) == 2
    expected = {
        f"{n} layers, {kind}, {way} / ({n} layers, {kind}, cut ops alone + {n} layers, {kind}, bare replays)": target
        for n in (1, 2)
        for kind, target, ways in (("exact", 1.05, piecewise.WAYS), ("padded", 1.25, piecewise.WAYS[:2]))
        for way in ways
    }
    expected |= {f"a piece more, exact, {way} / cut ops alone + bare replays": 1.05 for way in piecewise.WAYS}
    assert targets_of(found) == expected


@torch.no_grad()
def test_a_way_that_differs_from_eager_is_refused(stacks: Callable[[str], dict[int, piecewise.Stack]]) -> None:
    stack = stacks("cpu")[1]
    right = stack.calls["exact, by key"]
    stack.calls["exact, by key"] = lambda: right() + 1e-6
    with pytest.raises(RuntimeError, match="exact, by key: differs from eager"):
        stack.check({})


@torch.no_grad()
def test_a_forward_that_is_not_one_plan_of_all_layers_is_refused(
    stacks: Callable[[str], dict[int, piecewise.Stack]],
) -> None:
    with pytest.raises(RuntimeError, match=r"exact: replayed \[\] graphs of 1 layers"):
        stacks("cpu")[1]._replayed(lambda: None, "exact")


# -- dynamo ----------------------------------------------------------------------------------------------------------


def test_a_call_at_static_addresses_is_one_graph_and_nothing_else(tmp_path: Any) -> None:
    counts = result_of("dynamo", tmp_path)["counts"]
    for n in dynamo.LAYERS_ON_HOST:
        ours, bare = (
            counts[f"{n} layers, ours (eager), behind Dynamo"],
            counts[f"{n} layers, bare replay of ours (eager)"],
        )
        assert ours == bare
        assert did(ours) == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its own recordings
@torch.no_grad()
def test_a_call_is_set_against_an_empty_backend_and_a_bare_replay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(dynamo, monkeypatch)
    said: list[str] = []
    calls = {n: dynamo.Calls(n, module_of(device), device, said.append) for n in (1, 2)}
    found = targets_of(dynamo._times(calls, module_of(device), said.append))
    for n in (1, 2):
        floor = f"({n} layers, empty backend + {n} layers, bare replay of ours (eager))"
        assert found[f"{n} layers, ours (eager) / {floor}"] == 1.25
        if device == "cuda" and not any("skipped" in line for line in said):
            assert found[f"{n} layers, ours (inductor) / {n} layers, reduce-overhead"] == 0.7
    assert set(found.values()) <= {1.25, 0.7}


@torch.no_grad()
def test_a_staged_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda tensor: None)
    with pytest.raises(RuntimeError, match=r"\[\(1, 1\)\], expected one graph and none staged"):
        dynamo.Calls(1, emulated, "cpu", lambda line: None)


# -- dispatch --------------------------------------------------------------------------------------------------------


def test_more_captured_sizes_make_no_call_do_more(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MANY", 5)
    monkeypatch.setattr(dispatch, "CALLED", 4)
    counts = result_of("dispatch", tmp_path)["counts"]
    assert len(counts) == 2 * (len(dispatch.WAYS) - 1)
    for way in dispatch.WAYS[:-1]:
        one, many = counts[f"{way}, 1 size captured"], counts[f"{way}, 5 sizes captured"]
        assert one == many
        assert one["functions"] > 0


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_many_captured_sizes_are_set_against_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(dispatch, monkeypatch)
    monkeypatch.setattr(dispatch, "CALLED", 4)
    recorded = {len(s): dispatch.Recorded(ON_HOST, s, module_of(device), device) for s in ((4,), (2, 3, 4))}
    found = dispatch._times(recorded, module_of(device), lambda line: None)
    pairs = [f"{way}, 3 sizes captured / {way}, 1 size captured" for way in dispatch.WAYS]
    assert targets_of(found) == dict.fromkeys(pairs, 1.05)


# -- what they share -------------------------------------------------------------------------------------------------


def test_a_target_may_be_of_one_time_alone() -> None:
    said: list[str] = []
    for of, reached in ((("wall",), True), (("host",), False), (("host", "wall"), False)):
        (found,) = say_ratios(said.append, [(Ratio("a / b", host=2.0, wall=1.0), 1.02)], of)
        assert (found["reached"], found["target"]) == (reached, 1.02)
    assert [line.rpartition(": ")[2] for line in said[1::2]] == ["reached", "missed", "missed"]


def test_results_of_other_kernels_may_differ_a_little_and_more_so_behind_more_layers() -> None:
    expected = torch.ones(100)
    ways = {"inductor": lambda: expected * (1 + 1.5e-4)}
    with pytest.raises(RuntimeError, match=r"inductor: differs from eager by 0\.00015"):
        must_agree(expected, ways, inexact=("inductor",))
    must_agree(expected, ways, inexact=("inductor",), layers=64)
    with pytest.raises(RuntimeError, match="allowed is 0"):
        must_agree(expected, ways, layers=64)
    with pytest.raises(RuntimeError, match="differs from eager by nan"):
        must_agree(expected, {"inductor": lambda: expected * float("nan")}, inexact=("inductor",))


def test_why_a_peer_can_not_be_measured_is_told_in_one_line() -> None:
    def fails() -> None:
        raise NotImplementedError("no such thing\nand a long trace")

    def skips() -> None:
        counters["inductor"]["cudagraph_skips"] += 1

    assert why_not_captured(fails) == "NotImplementedError: no such thing"
    assert why_not_captured(skips) == "torch captured nothing"
    calls: list[int] = []
    assert why_not_captured(functools.partial(calls.append, 1), times=3) is None
    assert len(calls) == 3
