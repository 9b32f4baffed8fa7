"""What may run padded: every rule against its neighbours, and against runs with garbage in the other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from prefix_cases import CASES, Case
from prefix_oracle import POISONS, SIZES, N, Program, differences, program
from prefix_programs import inputs, program_of
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv

from sgc_backend import CutOpError, OptionError, prefix_ops
from sgc_backend.prefix import prefix_facts
from sgc_backend.prefix_layouts import Padded, UnsafeError
from sgc_backend.prefix_ops import register_prefix_rule


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def all_differences(made: Program, *, trust: bool = False) -> list[str]:
    wrong = []
    for exact, padded in SIZES:
        for poison in POISONS:
            try:
                wrong += differences(made, exact, padded, poison, trust=trust)
            except (RuntimeError, IndexError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rule_says_what_padded_runs_show(case: Case) -> None:
    made = program(case.fn, case.inputs)
    blame = made.found.blame
    assert {b.op.partition("::")[2] for b in blame.values()} == set((case.blamed or "").split()), blame
    assert not all_differences(made)
    if case.blamed and case.shows:
        assert all_differences(made, trust=True), "the padded run shows no difference: is it safe after all?"


# -- ops that only a GPU has -------------------------------------------------------------------------------------------


def judged(fn: Callable[..., Any], *shapes: tuple[tuple[int, ...], torch.dtype]) -> dict[str, str]:
    """Blame by node of a graph over fake tensors of a GPU, whose dimensions of length N are dynamic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DUCK])
    rows = mode.from_tensor(torch.empty(N), symbolic_context=context).shape[0]
    with mode:
        values = [
            torch.empty([rows if n == N else n for n in shape], dtype=dtype, device="cuda") for shape, dtype in shapes
        ]
    gm = fx.symbolic_trace(fn)
    made: dict[fx.Node, Any] = {}
    given = iter(values)
    with mode, enable_python_dispatcher(), torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "output":
                break
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "call_method":
                made[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                made[node] = node.target(*args, **kwargs)
            node.meta["example_value"] = made[node]
    found = prefix_facts(gm, frozenset({rows.node.expr}), lambda node: False)
    return {name: str(blame) for name, blame in found.blame.items()}


HALF, FLOAT8 = torch.float16, torch.float8_e4m3fn
ATTENTION = {
    "flash": lambda q, k: torch.ops.aten._scaled_dot_product_flash_attention(q, k, k)[0],
    "efficient": lambda q, k: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, k, None, False)[0],
    "cudnn": lambda q, k: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, k, None, False)[0],
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_on_a_gpu_may_be_padded_in_batches_and_queries(kind: str) -> None:
    attend = ATTENTION[kind]
    assert not judged(attend, ((N, 2, 16, 64), HALF), ((N, 2, 16, 64), HALF))
    assert not judged(attend, ((2, 2, N, 64), HALF), ((2, 2, 16, 64), HALF))
    (why,) = judged(attend, ((2, 2, N, 64), HALF), ((2, 2, N, 64), HALF)).values()
    assert "attends over the rows (dimension 2 of size" in why


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ops_made_of_other_ops_are_judged_by_those_in_every_mode(mode: Any) -> None:
    with mode():
        assert not judged(lambda x, w: F.linear(x, w).reshape(-1, 2, 4), ((N, 8), HALF), ((8, 8), HALF))
        (why,) = judged(lambda x: x.softmax(0).to(torch.float32), ((N, 8), HALF)).values()
        assert why.startswith("aten::_softmax")


def test_causal_attention_is_not_padded_along_keys_or_queries() -> None:
    def attend(q: Any, k: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)[0]

    assert not judged(attend, ((N, 2, 16, 64), HALF), ((N, 2, 16, 64), HALF))
    assert judged(attend, ((2, 2, N, 64), HALF), ((2, 2, N, 64), HALF))
    assert judged(attend, ((2, 2, N, 64), HALF), ((2, 2, 16, 64), HALF))


def test_products_of_eight_bits_take_one_scale_for_all_or_one_for_each_row() -> None:
    def product(x: Any, w: Any, a: Any, b: Any) -> Any:
        return torch.ops.aten._scaled_mm(x, w.t(), a, b, out_dtype=torch.bfloat16)

    single, weight = ((), torch.float32), ((64, 32), FLOAT8)
    each = ((1, 64), torch.float32)
    assert not judged(product, ((N, 32), FLOAT8), weight, single, single)
    assert not judged(product, ((N, 32), FLOAT8), weight, ((N, 1), torch.float32), each)

    def merged(x: Any, w: Any, a: Any, b: Any) -> Any:
        return product(x.view(-1, 32), w, a.view(-1, 1), b)

    assert not judged(merged, ((2, N, 32), FLOAT8), weight, ((2, N), torch.float32), each)
    (why,) = judged(merged, ((2, N, 32), FLOAT8), weight, ((N, 2), torch.float32), each).values()
    assert "which has no row for each of them" in why


def test_norms_and_packed_products_of_a_gpu_are_safe_within_rows() -> None:
    aten = torch.ops.aten
    weight, six = ((64,), torch.bfloat16), ((6,), torch.float32)
    assert not judged(lambda x, w: aten._fused_rms_norm(x, [64], w, 1e-5)[0], ((2, N, 64), torch.bfloat16), weight)
    assert judged(lambda x: aten._fused_rms_norm(x, [64], None, 1e-5)[0].sum(), ((N, 64), torch.bfloat16))

    assert not judged(lambda x, m: aten.cudnn_batch_norm(x, m, m, m, m, False, 0.1, 1e-5)[0], ((N, 6, 4), HALF), six)
    packed = ((8, 4, 32, 4), torch.int32), ((2, 64, 2), torch.bfloat16)
    assert not judged(lambda x, w, s: aten._weight_int4pack_mm(x, w, 32, s), ((N, 64), torch.bfloat16), *packed)
    eight = ((N, 64), torch.bfloat16), ((32, N), torch.int8), ((32,), torch.bfloat16)
    (why,) = judged(lambda x, w, s: aten._weight_int8pack_mm(x.t(), w, s), *eight).values()
    assert "sums over the rows (dimension 1 of size" in why


# -- where values come from, and where rules don't reach ---------------------------------------------------------------


def test_what_is_cut_is_not_judged_and_its_values_are_plain() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, 6).sum(0) + x.view(-1, 6).flip(0)).view(2, -1, 6)

    made = program(fn, [torch.ones(2, N, 6)])
    assert {b.op for b in made.found.blame.values()} == {"aten::sum", "aten::flip", "aten::view"}
    cut = program(fn, [torch.ones(2, N, 6)], lambda node: node.target in ("sum", "flip"))
    assert {b.op for b in cut.found.blame.values()} == {"aten::view"}
    (merged,) = (cut.found.layouts[n] for n in ("view_1",))
    (size,) = cut.rows
    assert merged == ((2, size), (6,))
    assert cut.found.layouts["flip"] == ((2 * size,), (6,))
    assert cut.found.layouts["sum_1"] == ((6,),)


def test_layouts_are_told_for_every_tensor_of_a_tuple_and_every_input() -> None:
    made = program(lambda x, w: (x @ w).chunk(2, -1), [torch.ones(N, 6), torch.ones(6, 4)])
    (size,) = made.rows
    layouts = made.found.layouts
    assert layouts["chunk__0"] == layouts["chunk__1"] == ((size,), (2,))
    assert layouts["l_x_"] == ((size,), (6,)) and layouts["l_w_"] == ((6,), (4,))


def test_sizes_that_are_not_padded_count_as_constants() -> None:
    made = program(lambda x: x.sum(0) * x.shape[0], [torch.ones(N, 6)])
    assert made.found.blame
    found = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        found.append(prefix_facts(gm, frozenset(), lambda node: False))
        return gm.forward

    torch.compile(lambda x: x.sum(0) * x.shape[0], backend=backend, dynamic=True)(torch.ones(N, 6))
    assert not found[0].blame


def test_a_node_that_runs_other_operators_is_judged_by_what_they_run() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.relu() * 2

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

    assert not program(fn, [torch.ones(N, 6)]).found.blame

    def sums(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: x.sum(0), x, use_reentrant=False)

    ((_, blame),) = program(sums, [torch.ones(N, 6)]).found.blame.items()
    assert blame.op == "aten::sum"


def test_a_higher_order_operator_without_a_rule_is_to_blame() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    blame = program(fn, [torch.ones(N, 6)]).found.blame
    assert [b.op for b in blame.values()] == ["cond"]
    assert "is not known to compute each row by itself" in str(blame["cond"])


def test_a_node_that_cannot_be_examined_is_to_blame() -> None:
    @torch.library.custom_op("sgc_prefix_test::broken", mutates_args=())
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    calls = []

    @broken.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise ValueError("not again")
        return torch.empty_like(x)

    (blame,) = program(lambda x: broken(x), [torch.ones(N, 6)]).found.blame.values()
    assert str(blame) == "sgc_prefix_test::broken could not be examined (ValueError)"


def test_a_size_that_no_op_saw_went_into_data() -> None:
    gm = fx.symbolic_trace(hides_a_size)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(
        torch.empty(N, 6), symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK, DimDynamic.STATIC])
    )
    for node, value in zip(gm.graph.nodes, (x, x.shape[0], x), strict=False):
        node.meta["example_value"] = value
    found = prefix_facts(gm, frozenset({x.shape[0].node.expr}), lambda node: False)
    (blame,) = found.blame.values()
    assert blame.op == "scaled_by" and blame.why.startswith("uses the size") and blame.why.endswith("as a value")


@fx.wrap
def scaled_by(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * float(int(n))


def hides_a_size(x: torch.Tensor, n: int) -> torch.Tensor:
    return scaled_by(x, n)


# -- rules of one's own ------------------------------------------------------------------------------------------------


@torch.library.custom_op("sgc_prefix_test::each", mutates_args=())
def each(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@each.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sgc_prefix_test::store", mutates_args=("cache",))
def store(x: torch.Tensor, cache: torch.Tensor, times: int) -> None:
    cache[: len(x)] = x * times


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    own: dict[str, Any] = {}
    monkeypatch.setattr(prefix_ops, "_registered", own)
    return own


def blames(fn: Any, *inputs: torch.Tensor) -> list[str]:
    return [str(b) for b in program(fn, inputs).found.blame.values()]


def test_a_custom_op_needs_a_rule() -> None:
    assert blames(lambda x: each(x), torch.ones(N, 6)) == [
        "sgc_prefix_test::each is not known to compute each row by itself"
    ]
    register_prefix_rule(each, "rows")
    assert blames(lambda x: each(x), torch.ones(N, 6)) == []
    (why,) = blames(lambda x: each(x.view(-1, 6)), torch.ones(2, N, 6))
    assert "takes a tensor by its dimension 0, which was merged of 2 x s" in why


@pytest.mark.parametrize(
    "op", ["sgc_prefix_test::each", "sgc_prefix_test::each.default", torch.ops.sgc_prefix_test.each]
)
def test_a_rule_is_registered_by_any_name_of_its_op(op: Any) -> None:
    register_prefix_rule(op, "rows")
    assert blames(lambda x: each(x), torch.ones(N, 6)) == []


def test_an_op_that_writes_to_what_has_no_rows_does_not_compute_each_row_by_itself() -> None:
    register_prefix_rule(store, "rows")
    (why,) = blames(lambda x, c: store(x, c, 2), torch.ones(N, 6), torch.ones(32, 6))
    assert "gives or writes a tensor of (32, 6), which has no rows" in why
    assert blames(lambda x, c: store(x, c, 2), torch.ones(N, 6), torch.ones(N, 6)) == []
    (why,) = blames(lambda x, c: store(x, c, x.shape[0]), torch.ones(N, 6), torch.ones(N, 6))
    assert "as a value" in why
    (why,) = blames(lambda x, c: store(x, c[: x.shape[0]], 2), torch.ones(N, 6), torch.ones(32, 6))
    assert "belongs to other rows" in why


def test_a_rule_that_is_called_sees_fake_tensors_and_says_why_not() -> None:
    seen = []

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        seen.append((args, kwargs))
        return None if args[2] == 2 else "multiplies too often"

    register_prefix_rule(store, rule)
    assert blames(lambda x, c: store(x, c, 2), torch.ones(N, 6), torch.ones(32, 6)) == []
    assert isinstance(seen[0][0][0].shape[0], torch.SymInt)
    assert blames(lambda x, c: store(x, c, 3), torch.ones(N, 6), torch.ones(32, 6)) == [
        "sgc_prefix_test::store multiplies too often"
    ]
    assert blames(lambda x, c: store(x, c, x.shape[0]), torch.ones(N, 6), torch.ones(32, 6)) == [
        "sgc_prefix_test::store multiplies too often"
    ]


def test_rules_are_refused_for_what_is_no_op_and_in_another_form() -> None:
    with pytest.raises(CutOpError, match="resolves to no operator"):
        register_prefix_rule("sgc_prefix_test::nothing", "rows")
    with pytest.raises(CutOpError, match="is a Python function"):
        register_prefix_rule(lambda x: x, "rows")
    for rule in ("row", None, 3):
        with pytest.raises(OptionError, match="a prefix rule is 'rows' or a callable"):
            register_prefix_rule(each, rule)


# -- what isn't safe although no run here would show it ----------------------------------------------------------------


def test_bits_and_products_of_integers_are_no_indices() -> None:
    table, square = torch.ones(20, 6), torch.ones(8, 8, dtype=torch.int8)
    (why,) = blames(lambda x, w: F.embedding(x.view(torch.int32), w), torch.ones(N), table)
    assert "takes computed indices" in why
    ids = torch.ones(N, 8, dtype=torch.int8)
    (why,) = blames(lambda i, s, w: F.embedding(torch._int_mm(i, s)[:, 0], w), ids, square, table)
    assert "takes computed indices" in why
    register_prefix_rule(each, "rows")
    (why,) = blames(lambda i, w: F.embedding(each(i), w), torch.ones(N, dtype=torch.int64), table)
    assert "takes computed indices" in why


def test_an_expanded_row_is_written_by_the_rows_of_garbage_too() -> None:
    def fn(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return c.expand(x.shape[0], -1)[:, :2].index_add_(1, torch.tensor([0]), x[:, :1])

    (why,) = blames(fn, torch.ones(N, 6), torch.ones(1, 6))
    assert "beyond whose rows lies memory that belongs to other rows" in why


def test_attention_is_not_padded_where_batches_differ_or_numbers_are_drawn() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    (why,) = judged(lambda q: flash(q, q, q, 0.5)[0], ((N, 2, 16, 64), HALF)).values()
    assert "draws random numbers" in why

    def merged(q: Any, k: Any) -> Any:
        return flash(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1))[0]

    assert not judged(merged, ((2, N, 2, 16, 64), HALF), ((2, N, 2, 16, 64), HALF))
    (why,) = judged(merged, ((2, N, 2, 16, 64), HALF), ((N, 2, 2, 16, 64), HALF)).values()
    assert "which differ in dimension 0" in why


def test_random_numbers_are_said_to_be_why() -> None:
    (why,) = blames(lambda x: torch.rand_like(x), torch.ones(N, 6))
    assert why == "aten::rand_like draws as many random numbers as there are elements"


def test_a_tensor_that_came_from_nowhere_is_not_trusted() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(N), symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK]))
    known = prefix_ops.Known(Padded({x.shape[0].node.expr}))
    with pytest.raises(UnsafeError, match="whose rows could not be followed"):
        known.look(x)
    assert known.look(torch.ones(3)).layout == ((3,),)


# -- layouts -----------------------------------------------------------------------------------------------------------

S, T = sympy.symbols("s t", positive=True, integer=True)
UNPADDED = sympy.Symbol("u", positive=True, integer=True)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((S, 4), (4 * S,)),
        ((2, S, 3, 2), (2, 6 * S)),
        ((2, 3), (6,)),
        ((1, S, 1), (S,)),
        ((S, T), (S, T)),
        ((UNPADDED, 2, S), (2 * UNPADDED, S)),
        ((1, 1), (1,)),
        ((), (1,)),
    ],
)
def test_factors_take_in_what_is_static_behind_them(factors: Any, expected: Any) -> None:
    assert Padded([S, T]).canonical(factors) == expected


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (((S,), (6,)), (6 * S,), ((6 * S,),)),
        (((2,), (S,), (6,)), (2 * S, 6), ((2, S), (6,))),
        (((2, S), (6,)), (2, S, 2, 3), ((2,), (S,), (2,), (3,))),
        (((4, S),), (2, 2 * S), ((2,), (2, S))),
        (((4, S),), (2, 2, S, 1), ((2,), (2,), (S,), (1,))),
        (((4 * S,),), (S, 4), ((S,), (4,))),
        (((4 * S + 4,),), (S + 1, 4), ((S + 1,), (4,))),
        (((S,),), (FloorDiv(S, 8), 8), ((FloorDiv(S, 8),), (8,))),
        (((S,), (T,)), (S * T,), ((S, T),)),
        (((S, T),), (S, T), ((S,), (T,))),
        (((2, S),), (2 * FloorDiv(S, 8), 8), ((2, FloorDiv(S, 8)), (8,))),
        (((UNPADDED,), (S,)), (S * UNPADDED,), ((UNPADDED, S),)),
        (((S,), (0,)), (0, S), ((0,), (S,))),
        (((2,), (3,)), (3, 2), ((3,), (2,))),
    ],
)
def test_views_keep_the_factors_of_what_they_merge(layout: Any, shape: Any, expected: Any) -> None:
    layout = tuple(tuple(map(sympy.sympify, dim)) for dim in layout)
    assert Padded([S, T]).regroup(layout, shape) == expected


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (((2, S),), (S, 2)),
        (((S,), (6,)), (2, 3 * S)),
        (((2,), (4 * S,)), (S, 8)),
        (((S, T),), (T, S)),
        (((2, S),), (FloorDiv(S, 4), 8)),
        (((S * T,),), (S, T)),
        (((3, S),), (2, FloorDiv(3 * S, 2))),
    ],
)
def test_views_that_end_inside_of_a_factor_are_refused(layout: Any, shape: Any) -> None:
    layout = tuple(tuple(map(sympy.sympify, dim)) for dim in layout)
    with pytest.raises(UnsafeError, match="whose rows are not those of either dimension"):
        Padded([S, T]).regroup(layout, shape)


def test_a_size_has_a_prefix_only_where_it_never_shrinks() -> None:
    padded = Padded([S, T])
    for size in (S, 2 * S, S + T - 3, S * T, FloorDiv(S + 1, 2), S**2, sympy.Integer(3), UNPADDED - 5, S * UNPADDED):
        assert padded.grows(sympy.sympify(size)), size
    for size in (3 - S, S - T, FloorDiv(12, S), FloorDiv(S, T), sympy.Mod(S, 4), -S, S**2 - S):
        assert not padded.grows(sympy.sympify(size)), size


# -- what is composed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_what_is_safe_in_a_random_program_stays_right_in_padded_runs(seed: int) -> None:
    made = program(program_of(seed, steps=9), inputs())
    assert not all_differences(made), made.found


def test_random_programs_hold_what_is_safe_and_what_is_not() -> None:
    made = [program(program_of(seed, steps=9), inputs()) for seed in range(4)]
    nodes = sum(n.op.startswith("call") for m in made for n in m.gm.graph.nodes)
    assert 0 < sum(len(m.found.blame) for m in made) < nodes / 2
    assert sum(m.takes(rows) for m in made for pair in SIZES for rows in pair) > 8
