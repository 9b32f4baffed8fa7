"""What is in a key: sizes and numbers that pieces see, and nothing else."""

from __future__ import annotations

import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total

__all__ = ["only_graphs_of_this_test"]


def test_python_numbers_are_values_of_the_key() -> None:
    model = Model(lambda m, x, k: m.a(x) * k, a=lin())
    call = compiled(model)
    with torch.no_grad():
        for k in (1.0, 2.0, 0.5, 2.0, 2.0, 1.0, 7, 7, 9, 7):
            x = torch.randn(4, D)
            same(call(x, k), model(x, k))


def test_two_dynamic_dimensions_are_both_in_the_key() -> None:
    model = Model(lambda m, x: m.a(x).sum(1), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for b, s in [(2, 8), (2, 16), (4, 8), (8, 2)] * 3:
            x = torch.randn(b, s, D)
            same(call(x), model(x))
    assert total("replayed") == 8


def test_a_size_that_only_cuts_see_is_not_in_the_key() -> None:
    model = Model(lambda m, x, y: ops.double(m.a(x)).sum() + ops.double(y)[-1].sum(), a=lin())
    call = compiled(model, cut_ops=(*CUTS, torch.sum))
    with torch.no_grad():
        for n in (3, 5, 7, 9, 11):
            x, y = torch.randn(4, D), torch.randn(n, D)
            same(call(x, y), model(x, y))


def test_zeros_of_both_signs_are_two_values() -> None:
    model = Model(lambda m, x, s: m.a(x) * s, a=lin())
    call = compiled(model)
    with torch.no_grad():
        for s in (0.5, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
            x = torch.randn(4, D)
            got = call(x, s)
            assert torch.equal(torch.signbit(got), torch.signbit(model(x, s)))


def test_where_an_input_lies_in_its_storage_is_not_in_the_key() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, capture_sizes=[4])
    big = torch.randn(40, D)
    with torch.no_grad():
        for start in (0, 3, 9, 4, 20, 7):
            same(call(big[start : start + 4]), model(big[start : start + 4]))
    assert total("captured") == 1
    assert total("replayed") == 5
