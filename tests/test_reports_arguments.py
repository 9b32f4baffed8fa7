"""Arguments of a wrong type are refused by name, wherever they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_backend import only_graphs_of_this_test

import sgc_backend
from sgc_backend import (
    ROWS,
    BreakableCudaGraphBackend,
    CaptureError,
    DecodeRunner,
    FullCudaGraphBackend,
    InputSpec,
    OptionError,
    Rows,
    TcPiecewiseCudaGraphBackend,
    emulated,
    stats,
)
from sgc_backend.config import Options

__all__ = ["only_graphs_of_this_test"]

SPEC = InputSpec("x", (ROWS, 4), torch.float32)
SEVERAL = torch.tensor([1, 2])  # has no truth value, and compares element by element


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def array() -> Any:
    return pytest.importorskip("numpy").array([1, 2])


def runner(**given: Any) -> DecodeRunner:
    settings = {"inputs": [SPEC], "sizes": [2, 4], "device_module": emulated, **given}
    return DecodeRunner(double, settings.pop("inputs"), **settings)


def session(**given: Any) -> None:
    with FullCudaGraphBackend(emulated).capture_session(**given):
        pass


def piecewise(**given: Any) -> TcPiecewiseCudaGraphBackend:
    return TcPiecewiseCudaGraphBackend(double, capture_sizes=[2], device_module=emulated, **given)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda v: FullCudaGraphBackend(emulated, check_addresses=v), "check_addresses must be True or False"),
        (lambda v: BreakableCudaGraphBackend(emulated, strict=v), "strict must be True or False"),
        (lambda v: piecewise(strict=v), "strict must be True or False"),
        (lambda v: runner(check_addresses=v), "check_addresses must be True or False"),
        (lambda v: session(any_order=v), "any_order must be True or False"),
        (lambda v: session(measure=v), "measure must be True or False"),
        (lambda v: runner(backend=v), "backend must be one of"),
        (lambda v: runner(outputs=v), "outputs must be one of"),
        (lambda v: runner(name=v), "name must be"),
        (lambda v: piecewise(name=v), "name must be"),
        (lambda v: FullCudaGraphBackend(emulated, name=v), "name must be"),
        (lambda v: Options.of({"pad": v}), "pad must be one of"),
        (lambda v: Options.of({"outputs": v}), "outputs must be one of"),
        (lambda v: InputSpec("x", (ROWS,), torch.float32, pad=v), "pad must be"),
        (lambda v: sgc_backend.register_prefix_rule("aten::add", v), "a prefix rule is"),
    ],
)
@pytest.mark.parametrize("value", ["text", "tuple", "tensor", "array"])
def test_arguments_of_a_wrong_type_are_refused(wrong: Callable[[Any], Any], says: str, value: str) -> None:
    given = array() if value == "array" else {"text": "", "tuple": (), "tensor": SEVERAL}[value]
    before = set(stats())
    with pytest.raises(OptionError, match=says):
        wrong(given)
    assert set(stats()) <= before  # what is refused is part of nothing


@pytest.mark.parametrize("wrong", [torch.tensor(2), SEVERAL], ids=["number", "list"])
def test_a_tensor_is_no_list_of_inputs_or_variants(wrong: torch.Tensor) -> None:
    with pytest.raises(OptionError, match="inputs must be a list of InputSpec"):
        runner(inputs=wrong)
    with pytest.raises(OptionError, match="variants must be a list"):
        runner(variants=wrong)


def test_options_of_a_runner_with_keys_that_are_no_names_are_refused() -> None:
    with pytest.raises(OptionError, match="do not suit backend"):
        runner(options={1: 2, "strict": True})


@pytest.mark.parametrize("shape", ["", "x", b"x", 3, ROWS])
def test_a_text_is_no_shape(shape: Any) -> None:
    with pytest.raises(OptionError, match="shape must be a tuple"):
        InputSpec("x", shape, torch.float32)


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", SEVERAL])
def test_rows_are_made_of_ints_alone(wrong: Any) -> None:
    with pytest.raises(OptionError, match="ROWS can be multiplied by an int >= 1"):
        Rows(wrong)
    with pytest.raises(OptionError, match="ROWS can be added to an int >= 0"):
        Rows(1, wrong)


def test_inputs_and_variants_may_come_from_iterators_and_are_there_for_copies() -> None:
    made = copy.deepcopy(runner(inputs=iter([SPEC]), variants=iter(["a", "b"])))
    assert made.specs == (SPEC,)
    assert made.variants == ("a", "b")


@pytest.mark.parametrize("wrong", [None, True, 2.0, "2", (), SEVERAL, torch.tensor(2)])
def test_replays_by_bucket_refuse_what_is_no_int(wrong: Any) -> None:
    made = runner()
    made.capture()
    with pytest.raises(OptionError, match="is no bucket"):
        made.views(wrong)
    with pytest.raises(OptionError, match="size must be an int >= 0"):
        made.replay(wrong)
    if wrong is not None:
        with pytest.raises(OptionError, match="rows must be an int from 0 to the bucket's 4"):
            made.replay(4, rows=wrong)
    assert torch.equal(made(x=torch.ones(3, 4)), torch.full((3, 4), 2.0))


@pytest.mark.parametrize("wrong", [[], SEVERAL, torch.tensor(7), "array", "c"])
def test_what_is_no_variant_is_refused_whatever_it_is(wrong: Any) -> None:
    made = DecodeRunner(lambda x, variant: x * variant, [SPEC], sizes=[2], variants=[7, 9], device_module=emulated)
    made.capture()
    for call in (made, made.eager):
        with pytest.raises(OptionError, match="unknown variant"):
            call(x=torch.ones(2, 4), variant=array() if isinstance(wrong, str) and wrong == "array" else wrong)
    assert torch.equal(made(x=torch.ones(2, 4), variant=9), torch.full((2, 4), 9.0))


@pytest.mark.parametrize("wrong", [3, "each", SEVERAL])
def test_progress_that_cannot_be_called_drops_nothing(wrong: Any) -> None:
    made = runner()
    made.capture()
    with pytest.raises(OptionError, match="progress must be a callable"):
        made.capture(progress=wrong)
    assert torch.equal(made(x=torch.ones(3, 4)), torch.full((3, 4), 2.0))


@pytest.mark.parametrize("wrong", [3, "stream", SEVERAL, (0, 1)])
def test_the_emulated_device_keeps_its_stream_where_something_else_is_given(wrong: Any) -> None:
    before = emulated.current_stream()
    with pytest.raises(OptionError, match=r"must be a sgc_backend\.emulated\.Stream"):
        emulated.set_stream(wrong)
    with pytest.raises(OptionError, match=r"must be a sgc_backend\.emulated\.Stream"), emulated.stream(wrong):
        pass
    assert emulated.current_stream() is before


@pytest.mark.parametrize("wrong", [None, 3, "handle", (), SEVERAL, (0, "1")])
def test_the_emulated_device_refuses_what_is_no_pool_no_name_and_no_function(wrong: Any) -> None:
    with pytest.raises(OptionError, match="a pool must be a handle"), emulated.allocate_to_pool(wrong):
        pass
    for call in (emulated.release_pool, emulated.end_allocate_to_pool):
        with pytest.raises(OptionError, match="a pool must be a handle"):
            call(0, wrong)
    with pytest.raises(OptionError, match="an op to treat as opaque must be named"):
        emulated.treat_as_opaque(wrong)
    with pytest.raises(OptionError, match="opaque: fn must be a callable"):
        emulated.opaque(wrong)


@pytest.mark.parametrize("wrong", [None, 3, SEVERAL, lambda n: None, lambda n: torch.ones(n, 4), lambda n: "x"])
def test_a_compile_pass_refuses_examples_that_are_no_arguments(wrong: Any) -> None:
    made = piecewise(options={"inner": "eager"})
    with pytest.raises(OptionError, match="example"), made.capture_session():
        made._run_compile_pass(wrong)
    x = torch.ones(4, 4)
    with made.capture_session():
        made._run_compile_pass(lambda n: (x[:n],))
    assert torch.equal(made.replay(2), torch.full((2, 4), 2.0))


def test_a_capture_says_that_dynamo_has_given_the_callable_up() -> None:
    made, x = piecewise(options={"inner": "eager"}), torch.ones(2, 4)
    made.compiled("x")  # Dynamo finds nothing to compile, and looks no more
    with (
        pytest.raises(CaptureError, match="replayed 0 Dynamo graphs; where it does call"),
        made.capture_session(),
    ):
        made.capture_one(2, lambda: made.compiled(x))
    torch._dynamo.reset()
    with made.capture_session():
        made.capture_one(2, lambda: made.compiled(x))
    assert torch.equal(made.replay(2), torch.full((2, 4), 2.0))
