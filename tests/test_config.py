"""Options: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch

from sgc_backend import OptionError
from sgc_backend.config import AUTO_LIMIT, INNER_COMPILERS, Options, auto_sizes, emulation_asked_for


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""
    monkeypatch.setenv("SGC_DEVICE", "emulated")


def a_function(x: torch.Tensor) -> torch.Tensor:
    return x


VALID = {
    "capture_sizes": ["auto", None, [1, 2, 4], (8,), {4, 2}, frozenset({3}), range(1, 5)],
    "max_recordings": [0, 1, 1000],
    "cut_ops": [(), [], ("aten::add.Tensor",), {"aten::relu"}, [torch.ops.aten.relu.default, a_function]],
    "capturable_ops": [(), [], ["aten::relu"], frozenset({"aten::relu"}), [torch.relu]],
    "inner": [*INNER_COMPILERS, a_function],
    "pad": ["auto", "never"],
    "max_padding_ratio": [1, 1.0, 2.5, float("inf")],
    "outputs": ["clone", "static"],
    "capture": ["lazy", "session"],
    "share_executables": [True, False],
    "strict": [True, False],
    "lane": [None, "draft", "a b"],
    "device_module": [None, types.SimpleNamespace(graph_pool_handle=lambda: (0, 1))],
}

INVALID = {
    "capture_sizes": ["Auto", "", "all", [], (), 16, 1.5, [0], [-1], [1.0], [True], ["1"], iter([1, 2]), {1: 2}],
    "max_recordings": [-1, 1.0, True, None, "64"],
    "cut_ops": ["aten::relu", None, 3, [3], [None], {"aten::relu": 1}, a_function],
    "capturable_ops": ["aten::relu", None, 3, [3.0], [["aten::relu"]]],
    "inner": ["cudagraphs", "", None, 1],
    "pad": ["always", "", None, True, "Auto"],
    "max_padding_ratio": [0.99, 0, -1, float("nan"), True, "2", None],
    "outputs": ["copy", None, True],
    "capture": ["eager", None, False],
    "share_executables": [0, 1, None, "yes"],
    "strict": [0, 1, None, "yes"],
    "lane": ["", 0, True, ["draft"], b"draft"],
    "device_module": [object(), "cuda", "", ".torch", "os", 0],
}


def cases(table: dict[str, list]) -> list:
    return [pytest.param(n, v, id=f"{n}-{k}") for n, values in table.items() for k, v in enumerate(values)]


@pytest.mark.parametrize(("name", "value"), cases(VALID))
def test_a_valid_value_is_taken(name: str, value: object) -> None:
    taken = getattr(Options.of({name: value}), name)
    if isinstance(value, (list, tuple, set, frozenset, range)):
        assert isinstance(taken, tuple)
        assert set(taken) == set(value)
    else:
        assert taken is value


@pytest.mark.parametrize(("name", "value"), cases(INVALID))
def test_a_bad_value_is_refused_by_the_options_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        Options.of({name: value})


def test_every_option_has_valid_and_invalid_cases_here() -> None:
    names = {f.name for f in dataclasses.fields(Options)}
    assert names == set(VALID) == set(INVALID)


def test_defaults_are_valid_and_are_what_no_options_give() -> None:
    assert Options.of(None) == Options.of({}) == Options()
    defaults = Options()
    assert (defaults.capture_sizes, defaults.inner, defaults.outputs) == ("auto", "inductor", "clone")
    assert (defaults.capture, defaults.strict, defaults.pad) == ("lazy", False, "auto")


def test_an_unknown_name_is_named_together_with_the_valid_ones() -> None:
    with pytest.raises(OptionError) as caught:
        Options.of({"capture_size": [1], "strict": True})
    message = str(caught.value)
    assert message.startswith("unknown option capture_size;")
    for field in dataclasses.fields(Options):
        assert field.name in message


def test_several_unknown_names_are_all_named_in_order() -> None:
    with pytest.raises(OptionError, match="unknown options a, b;"):
        Options.of({"b": 1, "a": 2})


@pytest.mark.parametrize("options", [[], "auto", [("strict", True)], 3])
def test_options_that_are_no_dict_are_refused(options: object) -> None:
    with pytest.raises(OptionError, match="must be a dict"):
        Options.of(options)  # type: ignore[arg-type]


def test_a_message_shows_the_value_that_came() -> None:
    with pytest.raises(OptionError, match="got 'inductr'"):
        Options.of({"inner": "inductr"})
    with pytest.raises(OptionError, match="holds -3"):
        Options.of({"capture_sizes": [4, -3]})


def test_an_options_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="pad"):
        Options.of({"pad": "maybe"})


def test_capture_sizes_are_sorted_and_freed_of_duplicates() -> None:
    assert Options.of({"capture_sizes": [8, 2, 8, 4, 2]}).capture_sizes == (2, 4, 8)
    assert Options.of({"capture_sizes": {16, 1}}).capture_sizes == (1, 16)
    assert Options.of({"capture_sizes": range(3, 0, -1)}).capture_sizes == (1, 2, 3)


def test_a_callers_lists_are_copied() -> None:
    sizes, cuts, keeps = [4, 2], ["aten::relu"], ["aten::add"]
    options = Options.of({"capture_sizes": sizes, "cut_ops": cuts, "capturable_ops": keeps})
    sizes.append(64)
    cuts.append("aten::mul")
    keeps.clear()
    assert options.capture_sizes == (2, 4)
    assert options.cut_ops == ("aten::relu",)
    assert options.capturable_ops == ("aten::add",)


def test_options_are_frozen_and_keyword_only() -> None:
    options = Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("auto")  # type: ignore[misc]


def test_the_ladder_ascends_and_starts_with_every_small_size() -> None:
    ladder = auto_sizes()
    assert ladder[:12] == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    assert all(a < b for a, b in itertools.pairwise(ladder))
    assert ladder[-1] == AUTO_LIMIT


def test_the_ladders_gap_is_at_most_a_fifth_of_the_size_above() -> None:
    ladder = auto_sizes()
    for below, above in itertools.pairwise(ladder[7:]):
        assert (above - below) * 5 <= above


def test_the_ladder_grows_with_the_logarithm_of_its_limit() -> None:
    assert len(auto_sizes(8192)) == 8 + 4 * 10
    assert len(auto_sizes(16384)) == len(auto_sizes(8192)) + 4


@pytest.mark.parametrize("limit", [1, 5, 8, 9, 100, 1000, 8192])
def test_the_ladder_stops_at_its_limit(limit: int) -> None:
    ladder = auto_sizes(limit)
    assert ladder == tuple(s for s in auto_sizes(8192) if s <= limit)


def test_auto_takes_the_ladders_sizes_and_no_others() -> None:
    auto = Options()
    ladder = set(auto_sizes())
    assert {n for n in range(AUTO_LIMIT + 100) if auto.is_capture_size(n)} == ladder
    assert not auto.is_capture_size(2 * AUTO_LIMIT)


def test_listed_sizes_are_the_only_ones_taken() -> None:
    options = Options(capture_sizes=[4, 16])
    assert [n for n in range(20) if options.is_capture_size(n)] == [4, 16]


def test_none_takes_any_size() -> None:
    assert all(Options(capture_sizes=None).is_capture_size(n) for n in (0, 1, 17, 10**6))


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("emulated", True)])
def test_emulation_is_asked_for_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    if value is None:
        monkeypatch.delenv("SGC_DEVICE")
    else:
        monkeypatch.setenv("SGC_DEVICE", value)
    assert emulation_asked_for() is asked


@pytest.mark.parametrize("value", ["cuda", "Emulated", "1", " emulated"])
def test_any_other_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SGC_DEVICE", value)
    with pytest.raises(OptionError, match="SGC_DEVICE must be 'emulated' or unset"):
        emulation_asked_for()


def test_the_ladder_fits_into_the_default_number_of_recordings() -> None:
    assert len(auto_sizes()) <= Options().max_recordings
