"""Which nodes are attention, and over what length they attend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capturable import attend, clean_slate, cuts, ones

from sgc_backend import CutOpError, attention, register_attention

__all__ = ["clean_slate"]


def test_an_op_is_no_attention_until_it_is_registered() -> None:
    assert cuts(lambda x: attend(x, x), ones(4)) == {}


def test_a_registered_attention_is_cut_at_one_row_which_dynamo_makes_a_constant() -> None:
    register_attention("sgc_rules_test::attend")
    (reason,) = cuts(lambda x: attend(x, x), ones(1)).values()
    assert "a length of 1, which may be a dynamic one" in str(reason)


@pytest.mark.parametrize(
    "op",
    ["sgc_rules_test::attend", torch.ops.sgc_rules_test.attend, torch.ops.sgc_rules_test.attend.default, attend],
    ids=["name", "packet", "overload", "custom_op"],
)
def test_a_registered_attention_is_cut_where_a_size_is_dynamic(op: Any) -> None:
    register_attention(op)
    (reason,) = cuts(lambda x: attend(x, x), ones(4)).values()
    assert reason.rule == "attention"
    assert "attend" in str(reason)
    torch._dynamo.reset()
    assert cuts(lambda x: attend(x, x), ones(4), dynamic=False) == {}


def test_a_function_can_not_be_registered() -> None:
    with pytest.raises(CutOpError, match="custom_op"):
        register_attention(torch.relu)


def test_an_attention_that_does_not_exist_can_not_be_registered() -> None:
    with pytest.raises(CutOpError, match="sgc_rules_test::nothing"):
        register_attention("sgc_rules_test::nothing")
    assert attention._attention_ops == set()


def test_attention_is_judged_by_the_keys_and_not_by_the_queries() -> None:
    q, k = ones(1, 2, 6, 8), ones(1, 2, 5, 8)
    torch._dynamo.mark_dynamic(q, 2)
    assert cuts(lambda q, k: F.scaled_dot_product_attention(q, k, k), q, k, dynamic=None) == {}


def test_a_dynamic_batch_alone_does_not_cut_attention() -> None:
    x = ones(3, 2, 6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    assert cuts(lambda x: F.scaled_dot_product_attention(x, x, x), x, dynamic=None) == {}
