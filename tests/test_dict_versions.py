"""DictVersions: every kind of write to a dict is told, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgc_backend.dict_versions import DictVersions

Held = dict[str, Any]

WRITES: dict[str, Callable[[Held], Any]] = {
    "another value": lambda d: d.__setitem__("a", 2),
    "a new key": lambda d: d.__setitem__("c", 3),
    "a deletion": lambda d: d.__delitem__("a"),
    "update": lambda d: d.update(a=5),
    "or": lambda d: d.__ior__({"b": 7}),
    "pop": lambda d: d.pop("b"),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: d.setdefault("z", 1),
    "clear": lambda d: d.clear(),
}


def test_this_build_of_torch_can_tell() -> None:
    assert DictVersions.available()


@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_told_and_where_it_was(how: str) -> None:
    dicts: list[Held] = [{"a": 1, "b": [2]} for _ in range(3)]
    versions = DictVersions(dicts)
    for _ in range(2):
        assert versions.unwritten()
        assert versions.written() == []
    WRITES[how](dicts[1])
    for _ in range(2):
        assert not versions.unwritten()
        (found,) = versions.written()
        assert found is dicts[1]


def test_reading_and_what_lies_deeper_are_no_writes() -> None:
    held: Held = {"a": [1]}
    versions = DictVersions([held])
    held["a"].append(2)
    held.get("b")
    dict(held)
    assert versions.unwritten()


def test_the_dicts_are_kept_so_that_another_in_their_place_is_not_taken_for_them() -> None:
    versions = DictVersions([{"a": k} for k in range(20)])
    others = [{"a": k} for k in range(20)]
    assert versions.unwritten()
    del others
