"""Which recorded sizes serve which real ones."""

from __future__ import annotations

import random

import pytest
import sympy

from sgc_backend.buckets import Buckets, conditions_of
from sgc_backend.config import AUTO_LIMIT, auto_sizes

S, T = sympy.symbols("s0 s1", integer=True, positive=True)


def buckets(ladder: object = (2, 4, 8, 16), ratio: float = 2.0, condition: object = None, **options: object) -> Buckets:
    symbols = options.pop("symbols", (S,))
    exact = bool(options.pop("exact", False))
    return Buckets(symbols, symbols, ladder, ratio, lambda: condition or (lambda *sizes: True), exact=exact)


@pytest.mark.parametrize(("size", "wanted"), [(1, 2), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, None)])
def test_the_smallest_recorded_size_that_holds_the_rows_serves_them(size: int, wanted: int | None) -> None:
    assert buckets().of((size,)) == (None if wanted is None else (wanted,))


def test_a_bucket_beyond_the_ratio_is_not_used() -> None:
    found = buckets((8, 64), 1.5)
    assert found.of((6,)) == (8,)
    assert found.of((5,)) is None
    assert found.of((8,)) == (8,)
    assert buckets((8, 64), 8.0).of((9,)) == (64,)


def test_sizes_of_several_dimensions_are_rounded_up_each() -> None:
    assert buckets(symbols=(S, T)).of((3, 9)) == (4, 16)


def test_what_is_not_a_dynamic_size_stays_as_it_is() -> None:
    found = Buckets((S, T), {T}, (4, 8), 2.0, lambda: lambda *sizes: True, exact=False)
    assert found.of((3, 3)) == (3, 4)
    assert found.of(("0x1.8p+1", 5)) == ("0x1.8p+1", 8)
    assert found.values((3, 4)) == {T: 4}


def test_a_bucket_that_breaks_the_graphs_conditions_is_passed_over() -> None:
    assert buckets((4, 5, 6, 8), condition=lambda s: s % 2 == 0).of((3,)) == (4,)
    assert buckets((5, 6, 8), condition=lambda s: s % 2 == 0).of((4,)) == (6,)
    assert buckets((5, 7, 9), condition=lambda s: s % 2 == 0).of((4,)) is None
    assert buckets((5, 7, 9), condition=lambda s: s % 2 == 0, exact=True).of((4,)) == (4,)
    assert buckets((5, 7, 9), exact=True).of((10,)) is None  # beyond the ladder there is no end of sizes
    assert buckets((4, 8), condition=lambda a, b: a < b, symbols=(S, T)).of((3, 4)) == (4, 8)


def test_real_sizes_below_a_bucket_are_found_that_it_serves() -> None:
    found = buckets((2, 4, 8, 16))
    for bucket in (4, 8, 16):
        small = found.smaller((bucket,))
        assert small is not None
        assert small[0] < bucket
        assert found.of(small) == (bucket,)
    assert buckets((1, 2, 3)).smaller((3,)) is None


def test_the_automatic_ladder_wastes_an_eighth_at_most_in_the_mean_and_has_64_sizes_at_most() -> None:
    ladder = auto_sizes()
    assert len(ladder) <= 64
    found = buckets(ladder)
    for limit in (16, 100, 2048, 8192, AUTO_LIMIT):
        sizes = [random.Random(limit).randint(1, limit) for _ in range(4000)]
        used = sum(found.of((size,))[0] for size in sizes)
        assert used / sum(sizes) <= 1.125
        assert sum(found.of((n,))[0] / n for n in sizes) / len(sizes) <= 1.125


def test_conditions_come_from_guards_and_ranges() -> None:
    class Guard:
        def __init__(self, expr: object) -> None:
            self.expr = expr

    class Range:
        lower, upper = sympy.Integer(2), sympy.Integer(100)

    class Env:
        guards = (Guard(sympy.Eq(sympy.Mod(S, 4), 0)), Guard(sympy.Lt(S, sympy.Symbol("u0"))))
        var_to_range = {S: Range}  # noqa: RUF012

    holds = conditions_of(Env, (S,), {S})
    assert [n for n in range(0, 120, 2) if holds(n)] == list(range(4, 101, 4))
    assert conditions_of(None, (S,), {S})(7)


def test_what_is_remembered_does_not_grow_with_traffic() -> None:
    found = buckets(auto_sizes())
    for size in range(1, 20000):
        found.of((size,))
    assert len(found._found) <= 4096


def test_a_real_size_below_a_bucket_meets_the_graphs_conditions() -> None:
    assert buckets((40, 48), condition=lambda s: s % 3 == 0).smaller((48,)) == (45,)
    assert buckets((2, 10), 5.0, condition=lambda s: s % 10 == 0).smaller((10,)) is None
    found = buckets((4, 8), condition=lambda a, b: a <= b, symbols=(S, T)).smaller((8, 8))
    assert found is not None
    assert found[0] <= found[1]


def test_conditions_of_floats_take_their_hex_text() -> None:
    from types import SimpleNamespace

    from torch.utils._sympy.functions import ToFloat

    factor = sympy.Symbol("zf0", real=True)
    env = SimpleNamespace(guards=[SimpleNamespace(expr=factor * ToFloat(S) > 10.5)], var_to_range={})
    holds = conditions_of(env, (S, factor), {S})
    assert holds(8, (1.5).hex())
    assert not holds(8, (1.25).hex())


def test_a_condition_that_cannot_be_written_down_holds_at_no_other_size() -> None:
    from types import SimpleNamespace

    unknown = sympy.Function("unknown")(S)
    env = SimpleNamespace(guards=[SimpleNamespace(expr=sympy.Gt(unknown, 3))], var_to_range={})
    assert not conditions_of(env, (S,), {S})(8)


def test_strides_are_those_that_a_buckets_sizes_ask_for() -> None:
    found = Buckets((S, T), {S}, (4, 8), 2.0, lambda: lambda s, t: True, exact=False, strides={T: lambda _, b: b[0]})
    assert found.of((3, 100)) == found.of((4, 7)) == (4, 4)
    assert found.of((5, 9)) == (8, 8)
    assert found.smaller((8, 8)) == (6, 8)
    assert found.values((8, 8)) == {S: 8, T: 8}
    assert found.fills((8, 11), (8, 8))
    assert not found.fills((7, 8), (8, 8))


def test_strides_keep_rows_apart_where_the_graphs_conditions_ask_for_it() -> None:
    found = Buckets((S, T), {S}, (4, 8), 2.0, lambda: lambda s, t: s != t, exact=True, strides={T: lambda _, b: b[0]})
    assert found.of((3, 100)) == (4, 20)
    never = Buckets((S, T), {S}, (4, 8), 2.0, lambda: lambda s, t: t == 9, exact=True, strides={T: lambda _, b: b[0]})
    assert never.of((3, 9)) == (3, 9)
