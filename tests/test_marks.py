"""The ops that users name: what resolves, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sgc_backend import CutOpError, register_attention
from sgc_backend.marks import Marks, resolve_op


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""


@pytest.mark.parametrize(
    "name",
    [
        "sgc_rules_test::atend",
        "sgc_rule_test::attend",
        "aten::relu.Scalar",
        "aten::relu.default.more",
        "aten.relu",
        "relu",
        "aten::",
        "::relu",
        "",
        "aten::relu ",
        # The rest is found there, and is no operator.
        "aten::name",
        "aten::__file__",
        "aten::relu.",
    ],
)
def test_a_name_that_resolves_to_nothing_is_an_error(name: str) -> None:
    with pytest.raises(CutOpError) as caught:
        resolve_op(name)
    assert repr(name) in str(caught.value)


def test_an_op_in_both_lists_is_an_error_that_names_it() -> None:
    with pytest.raises(CutOpError, match=r"in both cut_ops and capturable_ops: aten::relu"):
        Marks.of(["aten::relu"], [torch.ops.aten.relu])


def test_no_marks_are_no_names() -> None:
    assert Marks.of((), ()) == Marks()


@pytest.mark.parametrize("wrong", [torch.nn.Linear, torch.nn.ReLU(), 3, None])
def test_what_is_no_op_is_refused(wrong: object) -> None:
    with pytest.raises(CutOpError):
        register_attention(wrong)  # type: ignore[arg-type]
    with pytest.raises(CutOpError):
        Marks.of([wrong], [])
