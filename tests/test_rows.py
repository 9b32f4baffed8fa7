"""Rows: how dimensions grow with a call's rows, found and undone."""

from __future__ import annotations

import pytest
import torch

from sgc_backend import ROWS, OptionError
from sgc_backend.rows import Rows, cut_to, growth


def test_lengths_and_rows_are_each_others_inverse() -> None:
    for rows in (ROWS, ROWS * 4, ROWS + 1, 3 * ROWS + 2, (ROWS + 1) * 2):
        for n in (0, 1, 7):
            assert rows.rows(rows.length(n)) == n
    assert (ROWS * 4).rows(6) is None
    assert (ROWS + 2).rows(1) is None
    assert [str(r) for r in (ROWS, ROWS * 4, ROWS + 1)] == ["ROWS", "ROWS * 4", "ROWS + 1"]


@pytest.mark.parametrize("wrong", [lambda: ROWS * 0, lambda: ROWS * 1.5, lambda: ROWS + -1, lambda: ROWS * True])
def test_what_no_dimension_can_be_is_refused(wrong) -> None:
    with pytest.raises(OptionError, match="ROWS can be"):
        wrong()


def test_it_reads_in_messages_as_it_is_written() -> None:
    assert [repr(rows) for rows in (ROWS, ROWS * 4, ROWS * 2 + 1)] == ["ROWS", "ROWS * 4", "ROWS * 2 + 1"]


def test_growing_dimensions_are_found_from_two_shapes() -> None:
    assert growth("y", (2, 8), 2, (5, 8), 5) == ((0, ROWS),)
    assert growth("y", (8, 6), 2, (8, 15), 5) == ((1, ROWS * 3),)
    assert growth("mask", (2, 2), 2, (5, 5), 5) == ((0, ROWS), (1, ROWS))
    assert growth("offsets", (3,), 2, (6,), 5) == ((0, Rows(1, 1)),)
    assert growth("constant", (4, 4), 2, (4, 4), 5) == ()


@pytest.mark.parametrize(
    ("one", "two"), [((2, 8), (2,)), ((2,), (4,)), ((5,), (2,)), ((2,), (20,))], ids=["ndim", "ratio", "less", "much"]
)
def test_shapes_that_do_not_grow_with_the_rows_are_refused(one, two) -> None:
    with pytest.raises(OptionError, match="y has"):
        growth("y", one, 2, two, 5)


def test_cutting_gives_the_view_that_the_rows_fill() -> None:
    whole = torch.arange(60).view(2, 6, 5)
    part = cut_to(whole, ((1, ROWS * 3), (2, ROWS + 1)), 1)
    assert torch.equal(part, whole[:, :3, :2])
    assert part.data_ptr() == whole.data_ptr()
