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
    "the random generator": (_draws_a_number, ("v1 = torch.rand_like(x)",), ("x + 0",), {}),
    "a result that does not last": (_hands_out_one_buffer, ("v1 = x + 1",), ("v1",), {}),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_comparison_sees(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, lines, returned, layout = WRONG[what]
    case = Case(lines, returned, (Call(4, seed=1, **layout), Call(4, seed=2, **layout)))
    assert run_case(case) == "equal"

    def backend(gm: Any, examples: Any, *, options: Any) -> Any:
        return lambda *args: wrong(gm, list(args))

    monkeypatch.setattr(sgc_backend, "sgc_piecewise", backend)
    with pytest.raises(Difference):
        run_case(case)
