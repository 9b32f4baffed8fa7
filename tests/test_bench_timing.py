"""The benchmarks' clock: what it calls when, what it makes of it, and which rows it refuses to compare."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace

import pytest

from sgc_backend.bench import timing
from sgc_backend.bench.timing import measure, ratio, slope, sweep

EACH_ONCE = {"in_a_row": 1, "settle": 0}


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""


class Bed:
    """A device and a clock that move only when they are told to, and a log of what was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.queued, self.log = 0, 0, []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=lambda: self.now))

    def call(self, name: str, host: int, device: int):
        def run() -> str:
            assert not self.queued, "the device was not idle"
            self.log.append(name)
            self.now += host * 1000
            self.queued = device * 1000
            return name

        return run

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def test_host_time_ends_when_the_call_returns_and_wall_time_when_the_device_is_done(bed: Bed) -> None:
    bed.queued = 9000  # of whoever was there before
    rows = measure(
        {"a": bed.call("a", 5, 7), "b": bed.call("b", 1, 0)}, bed.synchronize, rounds=3, warm_up=1, **EACH_ONCE
    )
    assert (rows["a"].host, rows["a"].wall) == (5, 12)
    assert (rows["b"].host, rows["b"].wall) == (1, 1)
    assert rows["a"].samples == 3


def test_each_round_runs_every_call_once_and_rounds_differ_in_order(bed: Bed) -> None:
    names = ["a", "b", "c", "d"]
    measure({n: bed.call(n, 1, 1) for n in names}, bed.synchronize, rounds=20, warm_up=5, **EACH_ONCE)
    rounds = [bed.log[k : k + 4] for k in range(0, len(bed.log), 4)]
    assert len(rounds) == 25
    assert all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) > 5


def test_a_row_runs_some_times_in_a_row_and_its_first_calls_do_not_count(bed: Bed) -> None:
    costs = iter([50, 50, 3, 3, 3] * 4)

    def call() -> None:
        bed.now += next(costs) * 1000
        bed.log.append("b")

    rows = measure({"a": bed.call("a", 1, 1), "b": call}, bed.synchronize, rounds=4, warm_up=0, in_a_row=3, settle=2)
    assert (rows["b"].host, rows["b"].host_p90, rows["b"].samples) == (3, 3, 12)
    assert all(len(set(bed.log[k : k + 5])) == 1 for k in range(0, 40, 5))


def test_warm_up_rounds_do_not_count(bed: Bed) -> None:
    costs = iter([1000] * 4 + [3] * 5)

    def call() -> None:
        bed.now += next(costs) * 1000

    row = measure({"a": call}, bed.synchronize, rounds=5, warm_up=4, **EACH_ONCE)["a"]
    assert row.host == row.host_p90 == 3


def test_a_median_is_not_moved_by_an_outlier_that_the_ninth_decile_shows(bed: Bed) -> None:
    costs = iter([2] * 8 + [900] * 2)

    def call() -> None:
        bed.now += next(costs) * 1000

    row = measure({"a": call}, bed.synchronize, rounds=10, warm_up=0, **EACH_ONCE)["a"]
    assert (row.host, row.host_p90) == (2, 900)


def test_no_result_is_freed_while_a_call_is_timed(bed: Bed) -> None:
    class Result:
        def __del__(self) -> None:
            bed.now += 50_000

    def call() -> Result:
        bed.now += 1000
        return Result()

    assert measure({"a": call}, bed.synchronize, rounds=4, warm_up=0, **EACH_ONCE)["a"].wall == 1


def test_the_collector_is_as_it_was_also_after_an_error(bed: Bed) -> None:
    def fails() -> None:
        assert not gc.isenabled()
        raise KeyError("x")

    with pytest.raises(KeyError):
        measure({"a": fails}, bed.synchronize)
    assert gc.isenabled()


def test_no_rounds_are_refused(bed: Bed) -> None:
    with pytest.raises(ValueError, match="rounds and in_a_row must be 1 or more, got 0 and 5"):
        measure({"a": bed.call("a", 1, 1)}, bed.synchronize, rounds=0)


def test_a_ratio_is_over_the_sum_of_its_floor(bed: Bed) -> None:
    calls = {"row": bed.call("row", 12, 12), "one": bed.call("one", 1, 3), "two": bed.call("two", 2, 3)}
    rows = measure(calls, bed.synchronize, rounds=1, warm_up=0, **EACH_ONCE)
    found = ratio(rows["row"], rows["one"], rows["two"])
    assert (found.name, found.host, found.wall) == ("row / (one + two)", 4, 24 / 9)
    assert ratio(rows["row"], rows["one"]).name == "row / one"


def test_rows_of_different_runs_are_not_compared(bed: Bed) -> None:
    first, second = (
        measure({"row": bed.call("row", 1, 1), "floor": bed.call("floor", 1, 1)}, bed.synchronize, rounds=1)
        for _ in range(2)
    )
    with pytest.raises(ValueError, match=r"row was measured in run \d+, its floor in another: floor \(run \d+\)"):
        ratio(first["row"], first["floor"], second["floor"])
    with pytest.raises(ValueError, match="needs a floor"):
        ratio(first["row"])


def test_a_sweep_calls_each_size_once_a_pass_in_an_order_of_its_own(bed: Bed) -> None:
    passes = 20
    found = sweep(lambda n: bed.call(str(n), n, 2)(), range(1, 6), bed.synchronize, passes=passes)
    rounds = [bed.log[k : k + 5] for k in range(0, len(bed.log), 5)]
    assert all(sorted(r) == ["1", "2", "3", "4", "5"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 5
    assert (found.samples, found.host_p50, found.wall_p50) == (5 * passes, 3, 5)


def test_a_sweeps_99th_percentile_shows_what_comes_once_in_fifty_calls(bed: Bed) -> None:
    found = sweep(lambda n: bed.call("", 1, n)(), [1] * 49 + [900], bed.synchronize, passes=4)
    assert (found.wall_p50, found.wall_p99, found.host_p99) == (2, 901, 1)


def test_a_sweep_of_nothing_is_refused(bed: Bed) -> None:
    with pytest.raises(ValueError, match="got 0 sizes and 1 passes"):
        sweep(lambda n: None, [], bed.synchronize, passes=1)
    with pytest.raises(ValueError, match="got 1 sizes and 0 passes"):
        sweep(lambda n: None, [1], bed.synchronize, passes=0)


def test_a_slope_is_the_difference_of_rows_over_that_of_their_floors(bed: Bed) -> None:
    costs = {"2": (10, 4), "10": (50, 12), "cuts 2": (4, 2), "cuts 10": (20, 2), "bare 2": (2, 0), "bare 10": (2, 0)}
    t = measure({n: bed.call(n, *c) for n, c in costs.items()}, bed.synchronize, rounds=2, warm_up=0, **EACH_ONCE)
    floors = [t["cuts 2"], t["bare 2"]], [t["cuts 10"], t["bare 10"]]
    found, step = slope("a piece more", (t["2"], t["10"]), floors, steps=8)
    assert (found.name, found.host, found.wall) == ("a piece more", 2.5, 3.0)
    assert step == {"host": 5, "wall": 6, "floor host": 2, "floor wall": 2}
    flat, _ = slope("nothing", (t["2"], t["10"]), ([t["bare 2"]], [t["bare 10"]]), steps=8)
    assert math.isnan(flat.host)
    other = measure({"2": bed.call("2", 1, 1)}, bed.synchronize, rounds=1, warm_up=0, **EACH_ONCE)["2"]
    with pytest.raises(ValueError, match="in another: 2 "):
        slope("mixed", (t["2"], t["10"]), ([other], [t["bare 10"]]), steps=8)
    with pytest.raises(ValueError, match="steps must be 1 or more, got 0"):
        slope("none", (t["2"], t["10"]), floors, steps=0)
    with pytest.raises(ValueError, match="none needs floors"):
        slope("none", (t["2"], t["10"]), ([], [t["bare 10"]]), steps=8)
