"""Random programs, called in random orders, do compiled what they do eagerly. See programs.py to run many more."""

from __future__ import annotations

from typing import Any

import programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_compare import Difference
from program_run import run_case
from program_world import Call, Case

import sgc_backend

settings.register_profile(
    "programs",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=80,
    suppress_health_check=list(HealthCheck),
)


def drawn(data: st.DataObject, dynamo: bool) -> programs.Case:
    return programs.make_case(lambda options: data.draw(st.sampled_from(options)), dynamo)


@settings(settings.get_profile("programs"))
@given(st.data())
def test_programs_do_what_eager_does(data: st.DataObject) -> None:
    case = drawn(data, dynamo=False)
    try:
        run_case(case)
    except Exception as error:
        raise AssertionError(case.text()) from error


@pytest.mark.parametrize("number", range(8))
def test_programs_that_dynamo_compiles_do_what_eager_does(number: int) -> None:
    case = programs.case_of(f"dynamo:{number}", dynamo=True)
    try:
        run_case(case)
    except Exception as error:
        raise AssertionError(case.text()) from error


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(100))
def test_programs_do_what_eager_does_on_cuda(number: int) -> None:
    case = programs.case_of(f"cuda:{number}", dynamo=number % 10 == 0)
    try:
        run_case(case, "cuda", tolerance=1e-3)
    except Exception as error:
        raise AssertionError(case.text()) from error


def test_a_seed_makes_the_same_program_again() -> None:
    first, second = (programs.case_of("1:5", dynamo=False) for _ in range(2))
    assert first == second
    assert first.lines


def test_a_difference_is_shrunk_to_the_line_that_makes_it() -> None:
    case = programs.case_of("1:5", dynamo=False)
    wanted = case.lines[-1]
    small = programs.shrink(case, lambda c: wanted in c.lines)
    assert small.lines == (wanted,)
    assert len(small.calls) == len(small.returned) == 1


# -- the comparison itself: backends that do one thing wrong are found -------------------------------------------------


def _returns_more(gm: Any, args: list[Any]) -> list[Any]:
    return [o + 1 if isinstance(o, torch.Tensor) else o for o in gm(*args)]


def _loses_writes(gm: Any, args: list[Any]) -> list[Any]:
    return gm(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))


def _copies_views(gm: Any, args: list[Any]) -> list[Any]:
    return [o.clone() if isinstance(o, torch.Tensor) else o for o in gm(*args)]


def _draws_a_number(gm: Any, args: list[Any]) -> list[Any]:
    torch.rand(())
    return gm(*args)


def _hands_out_one_buffer(gm: Any, args: list[Any], buffers: list[torch.Tensor] = []) -> list[Any]:  # noqa: B006
    (out,) = gm(*args)
    buffers[:] = buffers or [torch.empty_like(out)]
    return [buffers[0].copy_(out)]


def _makes_inference_tensors(gm: Any, args: list[Any]) -> list[Any]:
    with torch.inference_mode():
        return [o.clone() for o in gm(*args)]


def _writes_too_much(gm: Any, args: list[Any]) -> list[Any]:
    out = gm(*args)
    args[-1].untyped_storage().fill_(0)
    return out


WRONG = {
    "a value": (_returns_more, ("v1 = x + 1",), ("v1",), {}),
    "a write to an input": (_loses_writes, ("x.add_(1)",), ("x + 0",), {}),
    "a write to a buffer": (_loses_writes, ("m.cache[idx] = x",), ("x + 0",), {}),
    "a write beside a view": (_writes_too_much, ("v1 = x + 0",), ("v1",), {"x": "wide"}),
    "an output that is a view of an input": (_copies_views, ("v1 = x[1:]",), ("v1",), {}),
    "outputs that are views of one another": (_copies_views, ("v1 = x + 1",), ("v1", "v1[1:]"), {}),
    "an inference tensor": (_makes_inference_tensors, ("v1 = x + 1",), ("v1",), {}),
    "the random generator": (_draws_a_number, ("v1 = torch.rand_like(x)",), ("x + 0",), {}),
    "a result that does not last": (_hands_out_one_buffer, ("v1 = x + 1",), ("v1",), {}),
}


def _replaces_the_backend(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    def backend(gm: Any, examples: Any, *, options: Any) -> Any:
        return lambda *args: wrong(gm, list(args))

    monkeypatch.setattr(sgc_backend, "sgc_piecewise", backend)


OVERLAPPING = (Call(4, y="over", seed=1), Call(4, y="over", seed=2))


@pytest.mark.parametrize("modes", [("grad", "grad"), ("no_grad", "grad")])
def test_what_torchs_compiler_alone_does_otherwise_is_inherited(modes: tuple[str, ...]) -> None:
    # It writes elsewhere; we do so where gradients are asked for, as the graph is that compiler's then.
    lines = ("v1 = x @ m.w", "torch.ops.sgc_prop.bump_(x[1:])")
    calls = tuple(Call(4, x="offset", mode=mode, seed=seed) for seed, mode in enumerate(modes))
    case = Case(lines, ("v1",), calls, {"inner": "aot_eager"}, dynamo=True, grad=True)
    assert run_case(case) == "inherited"


def test_what_we_do_right_and_torchs_compiler_alone_does_not_is_equal() -> None:
    lines = ("y.zero_()", "v1 = m.cache + 1")  # AOTAutograd takes overlapping inputs for views of each other
    case = Case(lines, ("v1", "x.permute(1, 0)"), OVERLAPPING, {"inner": "aot_eager"}, dynamo=True)
    assert run_case(case) == "equal"


@pytest.mark.parametrize("wrong", [_returns_more, _loses_writes, _copies_views, _draws_a_number])
def test_a_difference_of_ours_is_seen_although_torchs_compiler_alone_has_one_too(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("y.zero_()", "v1 = m.cache + 1")
    case = Case(lines, ("v1", "x.permute(1, 0)"), OVERLAPPING, {"inner": "aot_eager"}, dynamo=True)
    _replaces_the_backend(monkeypatch, wrong)
    with pytest.raises(Difference):
        run_case(case)


def test_a_raise_counts_where_torchs_compiler_alone_raises_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(gm: Any, args: list[Any]) -> Any:
        raise AssertionError("something else")

    case = Case(("y.zero_()",), ("x.permute(1, 0)",), OVERLAPPING, {"inner": "aot_eager"}, dynamo=True)
    _replaces_the_backend(monkeypatch, raises)
    with pytest.raises(Difference):
        run_case(case)


@pytest.mark.parametrize("what", WRONG)
def test_the_comparison_sees(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, lines, returned, layout = WRONG[what]
    case = Case(lines, returned, (Call(4, seed=1, **layout), Call(4, seed=2, **layout)))
    assert run_case(case) == "equal"
    _replaces_the_backend(monkeypatch, wrong)
    with pytest.raises(Difference):
        run_case(case)
