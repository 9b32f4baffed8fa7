"""The real rows of values in larger buffers."""

from __future__ import annotations

import pytest
import sympy
import torch

from sgc_backend.extents import Compact, Extents, Geometry, in_factors, lies_as, poison, prefix, tails

S = sympy.Symbol("s0", integer=True, positive=True)


def geometry(size: tuple[int, ...], stride: tuple[int, ...] | None = None, factors: object = None) -> Geometry:
    return Geometry(size, stride or torch.empty(size, device="meta").stride(), 0, factors)


CASES = {
    "rows first": (geometry((3, 4)), geometry((5, 4))),
    "rows last": (geometry((4, 3)), geometry((4, 5))),
    "rows inside": (geometry((2, 3, 4)), geometry((2, 5, 4))),
    "two dimensions": (geometry((3, 2)), geometry((5, 4))),
    "transposed": (geometry((4, 3), (1, 4)), geometry((4, 5), (1, 4))),
    "merged": (geometry((6, 4), factors=(2, 3, 4)), geometry((10, 4), factors=(2, 5, 4))),
    "same": (geometry((3, 4)), geometry((3, 4))),
    "no rows": (geometry((0, 4)), geometry((2, 4))),
}


def wide(case: str) -> tuple[torch.Tensor, torch.Tensor, Geometry, Geometry]:
    """A buffer whose real rows hold those of a tensor, the rest NaN; the tensor; and both geometries."""
    real, bucket = CASES[case]
    exact = torch.randn(real.size).as_strided(real.size, real.stride) if 0 in real.size else torch.randn(1000)
    if exact.dim() == 1:
        exact = exact.as_strided(real.size, real.stride)
    buffer = torch.full((1000,), float("nan")).as_strided(bucket.size, bucket.stride)
    prefix(buffer, real, bucket).copy_(in_factors(exact, real))
    return buffer, exact, real, bucket


@pytest.mark.parametrize("case", CASES)
def test_a_copy_of_the_real_rows_lies_as_the_value_does_by_itself(case: str) -> None:
    buffer, exact, real, bucket = wide(case)
    got = Compact(buffer, real, bucket, written=False).fetch()
    assert got.stride() == tuple(real.stride)
    torch.testing.assert_close(got, exact, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_what_was_written_to_a_copy_goes_back_to_the_real_rows_alone(case: str) -> None:
    buffer, _, real, bucket = wide(case)
    before = buffer.clone()
    compact = Compact(buffer, real, bucket, written=True)
    value = compact.fetch()
    value.fill_(7)
    compact.store(value)
    assert (buffer == 7).sum() == value.numel()
    assert torch.equal(buffer[buffer != 7].isnan(), torch.ones(buffer.numel() - value.numel(), dtype=torch.bool))
    Compact(before, real, bucket, written=False).store(value)
    assert not (before == 7).any()


@pytest.mark.parametrize("case", CASES)
def test_rows_behind_are_all_filled_and_no_real_one_is_touched(case: str) -> None:
    buffer, exact, real, bucket = wide(case)
    poison(buffer, real, bucket, 9.0)
    outside = buffer.numel() - exact.numel()
    assert (buffer == 9).sum() == outside
    torch.testing.assert_close(Compact(buffer, real, bucket, written=False).fetch(), exact, rtol=0, atol=0)
    buffer, exact, real, bucket = wide(case)
    for behind, last in tails(buffer, real, bucket):
        behind.copy_(last)
    if exact.numel():
        assert not buffer.isnan().any()
        assert set(buffer.flatten().tolist()) == set(exact.flatten().tolist())


def test_real_rows_lie_by_themselves_where_strides_do_not_depend_on_the_size() -> None:
    assert [case for case, (real, bucket) in CASES.items() if lies_as(real, bucket)] == [
        "rows first",
        "transposed",
        "same",
        "no rows",
    ]
    assert lies_as(geometry((1, 3, 4)), geometry((1, 5, 4)))  # a stride that no element is reached by doesn't count


def test_geometry_follows_the_symbols_of_a_traced_graph() -> None:
    found: list[torch.fx.GraphModule] = []

    def collect(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        found.append(gm)
        return gm.forward

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.transpose(0, 1).contiguous()
        return h[:, 1:], torch.cat([h, h], 1)

    x = torch.randn(6, 5)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(fn, backend=collect)(x)
    (gm,) = found
    names = [n.name for n in gm.graph.nodes if n.op == "call_function" or n.op == "call_method"]
    symbol = next(
        n.meta["example_value"].node.expr
        for n in gm.graph.nodes
        if isinstance(n.meta.get("example_value"), torch.SymInt)
    )
    extents = Extents(gm, names, {}, [symbol])
    for n in (6, 9, 2):
        at = extents.at((n,))
        wanted = fn(torch.randn(n, 5))
        by_name = dict(zip([names[-2], names[-1]], wanted, strict=True))
        for name, tensor in by_name.items():
            if name in at:
                assert (at[name].size, at[name].stride, at[name].offset) == (
                    tuple(tensor.size()),
                    tensor.stride(),
                    tensor.storage_offset(),
                )
    assert len(extents.at((6,))) >= 3


def test_a_dimension_of_one_row_has_the_stride_that_it_has_by_itself() -> None:
    real, bucket = geometry((1, 3, 4)), geometry((1, 5, 4))
    assert prefix(torch.zeros(bucket.size), real, bucket).stride() == real.stride
