"""ShapeKey: frozen, hashable, and strict about what it is made of."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from sgc_backend import ROWS, DecodeRunner, FullCudaGraphBackend, InputSpec, OptionError, ShapeKey, emulated


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""


def test_equal_keys_are_one_dictionary_key() -> None:
    recordings = {ShapeKey(8): "a", ShapeKey(8, "lora"): "b", ShapeKey(16): "c"}
    assert recordings[ShapeKey(8)] == "a"
    assert recordings[ShapeKey(8, variant="lora")] == "b"
    assert len(recordings) == 3


def test_size_and_variant_both_tell_keys_apart() -> None:
    assert ShapeKey(8) != ShapeKey(9)
    assert ShapeKey(8, 1) != ShapeKey(8, 2)
    assert ShapeKey(8) != ShapeKey(8, 0)


def test_a_key_can_not_be_changed() -> None:
    key = ShapeKey(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.size = 9  # type: ignore[misc]


@pytest.mark.parametrize("variant", [None, "lora", 3, ("draft", 4), frozenset({1}), torch.float16])
def test_any_hashable_is_a_variant(variant: object) -> None:
    assert {ShapeKey(1, variant): 1}[ShapeKey(1, variant)] == 1


@pytest.mark.parametrize("size", [-1, 1.0, "8", None, True, torch.tensor(8), (8,)])
def test_a_size_that_is_no_int_from_zero_is_refused(size: object) -> None:
    with pytest.raises(OptionError, match=r"ShapeKey\.size must be an int >= 0"):
        ShapeKey(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", [[1], {}, {1}, ([],)])
def test_a_variant_that_is_not_hashable_is_refused_without_a_chained_error(variant: object) -> None:
    with pytest.raises(OptionError, match=f"must be hashable, got {type(variant).__name__}") as caught:
        ShapeKey(8, variant)  # type: ignore[arg-type]
    assert caught.value.__suppress_context__


def test_a_bare_int_is_the_key_of_that_size_without_a_variant() -> None:
    recordings = {ShapeKey(8): "a", ShapeKey(8, "lora"): "b"}
    assert recordings[8] == "a"  # type: ignore[index]
    assert ShapeKey(8) == 8
    assert ShapeKey(8, "lora") != 8
    assert ShapeKey(1) != True  # noqa: E712
    assert True not in {ShapeKey(1)}


@pytest.mark.parametrize("key", [ShapeKey(8), ShapeKey(8, "lora"), ShapeKey(8, ("draft", 4))])
def test_a_key_survives_being_copied_and_sent(key: ShapeKey) -> None:
    for again in (copy.copy(key), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert again == key
        assert hash(again) == hash(key)


def test_zero_is_a_size() -> None:
    assert ShapeKey(0).size == 0


def test_an_int_becomes_a_key_and_a_key_stays_itself() -> None:
    key = ShapeKey(8, "lora")
    assert ShapeKey.of(key) is key
    assert ShapeKey.of(8) == ShapeKey(8)


@pytest.mark.parametrize("bad", [-1, "8", 2.0, True, None])
def test_what_becomes_no_key_is_refused(bad: object) -> None:
    with pytest.raises(OptionError):
        ShapeKey.of(bad)  # type: ignore[arg-type]


def test_a_key_reads_as_its_size_and_variant() -> None:
    assert str(ShapeKey(8)) == "8"
    assert str(ShapeKey(8, "lora")) == "8/lora"
    assert str(ShapeKey(8, 0)) == "8/0"


def test_no_two_keys_read_alike() -> None:
    variants = [
        None,
        "None",
        1,
        "1",
        1.5,
        "1.5",
        True,
        "True",
        (1, 2),
        "(1, 2)",
        "a/b",
        "'a/b'",
        "nan",
        "inf",
        float("inf"),
    ]
    keys = {ShapeKey(size, variant) for size in (1, 2) for variant in variants if variant is not True}
    assert len({str(key) for key in keys}) == len(keys)


def test_a_number_of_an_enum_is_its_size() -> None:
    import enum

    bucket = enum.IntEnum("Bucket", {"SMALL": 4})
    backend = FullCudaGraphBackend(emulated)
    x = torch.ones(4)
    with backend.capture_session():
        backend.capture_one(bucket.SMALL, lambda: x + 1)
    for key in (4, bucket.SMALL, ShapeKey(4), ShapeKey(bucket.SMALL)):
        assert backend.can_run(key)
        assert torch.equal(backend.replay(key), x + 1)
    assert ShapeKey(1) != True  # noqa: E712


@pytest.mark.parametrize("variant", [float("nan"), torch.tensor(float("nan")), torch.tensor([1, 2])])
def test_a_variant_under_which_nothing_would_be_found_is_refused(variant: Any) -> None:
    with pytest.raises(OptionError, match="must be equal to itself"):
        ShapeKey(4, variant)
    with pytest.raises(OptionError, match="must be equal to itself"):
        DecodeRunner(len, [InputSpec("x", (ROWS,), torch.int64)], sizes=[1], variants=[variant], device_module=emulated)
