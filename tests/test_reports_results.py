"""What went wrong in public for others who capture graphs: what callables return, and what threads and default devices
have to do with it."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import CUTS, Model, lin, ops
from test_backend import compiled, same
from torch.utils import _pytree as pytree

from sgc_backend import (
    ROWS,
    BreakableCudaGraphBackend,
    DecodeRunner,
    FullCudaGraphBackend,
    InputSpec,
    eager_on_graph,
)
from sgc_backend.errors import CaptureError

X = torch.arange(8.0)
ROW = InputSpec("x", (ROWS, 4), torch.float32)
kinds = pytest.mark.parametrize("kind", ["full", "breakable", "piecewise"])


@eager_on_graph
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def runner(fn: Callable[..., Any], kind: str, *inputs: InputSpec) -> DecodeRunner:
    options = {"inner": "eager"} if kind == "piecewise" else None
    return DecodeRunner(fn, inputs or [ROW], sizes=[2, 4], backend=kind, options=options)


class Output(collections.OrderedDict):
    """As a Hugging Face ModelOutput: a registered dict that nothing but its class may change."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__()
        for key, value in dict(items).items():
            super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update() is refused")

    def __copy__(self) -> Any:
        raise TypeError("copying is refused")

    copy = __copy__


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Output(zip(keys, values, strict=True)),
    serialized_type_name="sgc_test.Output",
)


# -- containers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "breakable"])
@pytest.mark.filterwarnings("ignore:.*broke nowhere")
def test_a_registered_class_is_taken_apart_by_its_own_functions_alone(kind: str) -> None:
    call = runner(lambda x: Output({"logits": x * 2, "all": (x + 1,)}), kind)
    call.capture()
    for n in (3, 2, 4, 1):
        x = torch.randn(n, 4)
        got = call(x=x)
        assert type(got) is Output
        same((got["logits"], got["all"]), (x * 2, (x + 1,)))
    call.cleanup()


def test_a_break_may_take_and_return_a_registered_class() -> None:
    @eager_on_graph
    def body(given: Output) -> Output:
        return Output({"out": given["in"] * 3})

    backend = BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: body(Output({"in": X * 2}))["out"] + 1)
    same(backend.replay(8), X * 6 + 1)
    backend.cleanup()


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@kinds
@pytest.mark.parametrize("wrap", [Holder, lambda x: {x}, lambda x: {"x": x}.values()], ids=["object", "set", "view"])
@pytest.mark.filterwarnings("ignore:.*broke nowhere")
def test_an_object_that_carries_recorded_tensors_out_of_a_runner_is_refused(wrap: Any, kind: str) -> None:
    call = runner(lambda x: (x + 1, wrap(x * 2)), kind)
    with pytest.raises(CaptureError, match=r"result 1 is a .* that holds recorded tensors"):
        call.capture()


@kinds
@pytest.mark.filterwarnings("ignore:.*broke nowhere")
def test_an_object_that_carries_the_callables_own_tensors_out_of_a_runner_is_itself(kind: str) -> None:
    own = Holder(torch.ones(4))
    call = runner(lambda x: (x * 2, own), kind)
    call.capture()
    assert call(x=torch.ones(3, 4))[1] is own
    call.cleanup()


async def _awaited() -> torch.Tensor:
    return X * 2


def _yielded() -> Any:
    yield X * 2


@pytest.mark.parametrize("kind", [FullCudaGraphBackend, BreakableCudaGraphBackend])
@pytest.mark.parametrize(
    "fn", [_awaited, _yielded, lambda: (X, map(torch.neg, [X])), lambda: {"a": zip([X], [X], strict=True)}]
)
def test_a_result_that_is_code_still_to_run_is_refused(fn: Any, kind: Any) -> None:
    backend = kind()
    with (
        backend.capture_session(),
        pytest.raises(CaptureError, match=r"returns a .*, whose code runs as it is iterated"),
    ):
        backend.capture_one(8, fn)
    assert not backend.can_run(8)


@eager_on_graph
async def _asynchronous(x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_break_that_is_a_coroutine_is_refused() -> None:
    backend = BreakableCudaGraphBackend()
    made: list[Any] = []

    def step() -> torch.Tensor:
        made.append(_asynchronous(X * 2))
        return X + 1

    with backend.capture_session(), pytest.raises(CaptureError, match="returns a coroutine"):
        backend.capture_one(8, step)


def test_a_compiled_result_that_is_code_still_to_run_is_refused_by_replays_by_key() -> None:
    call = runner(lambda x: (t * 2 for t in [x]), "piecewise")
    with pytest.raises(CaptureError, match="whose code runs as it is iterated"):
        call.capture()


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_break_on_another_thread_with_what_is_captured_is_refused() -> None:
    with ThreadPoolExecutor(1) as threads:
        backend = BreakableCudaGraphBackend()
        with backend.capture_session():
            with pytest.raises(CaptureError, match="tripled is called on another thread"):
                backend.capture_one(8, lambda: tripled(threads.submit(tripled, X * 2).result()) + 1)
            backend.capture_one(8, lambda: tripled(X * 2) + 1)
    same(backend.replay(8), X * 6 + 1)
    backend.cleanup()


def test_breaks_of_other_threads_run_while_one_captures() -> None:
    backend = BreakableCudaGraphBackend()
    got: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        other = threading.Thread(target=lambda: got.append(tripled(torch.ones(4))))
        other.start()
        other.join()
        return tripled(X * 2)

    with backend.capture_session():
        backend.capture_one(8, step)
    assert len(got) == 3
    same(got[-1], torch.full((4,), 3.0))
    backend.cleanup()


# -- a default device --------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.filterwarnings("ignore:.*broke nowhere")
def test_inputs_of_the_host_are_made_on_the_host_whatever_the_default_device(kind: str) -> None:
    x, k = torch.randn(3, 4), [3, 1, 2]
    expected = x * 2 + torch.tensor(k)[:, None]
    with torch.device("meta"):  # as a default device of "cuda": another one than the host's
        numbers = InputSpec("k", (ROWS,), torch.int64, pad=-1)
        call = runner(lambda x, k: x * 2 + k[:, None], kind, InputSpec("x", (ROWS, 4), torch.float32, pad=1), numbers)
        call.capture()
        for given in (k, torch.tensor(k, device="cpu").numpy(), torch.tensor(k, device="cpu")):
            same(call(x=x, k=given), expected)
        same(call(x=x.tolist(), k=k), expected)
        same(call.eager(x=x, k=k), expected)
    call.cleanup()


def test_compiled_models_and_wrappers_capture_whatever_the_default_device() -> None:
    model, x = Model(lambda m, x: ops.double(m.a(x)).relu() + 1, a=lin()), torch.randn(70, 16)
    call = compiled(model, cut_ops=CUTS, capture_sizes="auto")
    backend = BreakableCudaGraphBackend()
    with torch.device("meta"), torch.no_grad():
        for n in (70, 70, 66, 69):
            torch.testing.assert_close(call(x[:n]), model(x[:n]))
        with backend.capture_session():
            backend.capture_one(8, lambda: tripled(X * 2) + 1)
        same(backend.replay(8), X * 6 + 1)
    backend.cleanup()
