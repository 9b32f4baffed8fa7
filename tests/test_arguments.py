"""Arguments: what is like a call that came before takes a short way, and what differs is refused on it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgc_backend import ROWS, InputSpec, OptionError
from sgc_backend import arguments as arguments_module
from sgc_backend.arguments import Arguments, alike

SPECS = (InputSpec("tokens", (ROWS,), torch.int64), InputSpec("hidden", (ROWS, 4), torch.float32))
DEVICE = torch.device("meta")  # so that the host's tensors differ from the device's


@pytest.fixture(params=["in one call", "one by one"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch offers a comparison of all tensors in one call."""
    if request.param == "one by one":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")


@pytest.fixture
def arguments() -> Arguments:
    return Arguments("decode", SPECS, DEVICE, 8)


def call(n: int, tokens: Any = "cpu", hidden: Any = DEVICE) -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.zeros(n, 4, device=hidden),
        "tokens": torch.zeros(n, dtype=torch.int64, device=tokens),
    }


def test_rows_order_and_places_are_told_again_and_again(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {(0,): ("cpu", DEVICE), (): (DEVICE, DEVICE), (0, 1): ("cpu", "cpu"), (1,): (DEVICE, "cpu")}
    for _ in range(3):
        for n in (3, 5, 3, 0):
            for host, where in places.items():
                inputs = call(n, *where)
                for _ in range(2):
                    rows, given, found = arguments.checked(inputs)
                    assert (rows, found) == (n, host)
                    assert given[0] is inputs["tokens"]
                    assert given[1] is inputs["hidden"]
    monkeypatch.setattr(arguments, "_examined", None)  # the same again takes the short way
    assert arguments.checked(call(0, DEVICE, "cpu"))[0] == 0
    assert arguments.checked(call(5, DEVICE, "cpu"))[0] == 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int32)}, "tokens .* got .*int32"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"hidden .* for the 4 rows of tokens"),
        ({"tokens": torch.zeros(3, 1, dtype=torch.int64)}, r"tokens .* got \(3, 1\)"),
        ({"tokens": torch.zeros((), dtype=torch.int64)}, "tokens"),
        ({"tokens": torch.zeros(9, dtype=torch.int64), "hidden": torch.zeros(9, 4)}, "max_size is 8"),
        ({"tokens": None}, "tokens .* is missing"),
        ({"tokens": [0.5] * 3}, "it holds floats"),
        ({"hidden": torch.zeros(3, 4).to_sparse()}, r"hidden .* is torch.sparse_coo; give a strided tensor"),
        ({"more": torch.zeros(3)}, "unknown input more"),
        ({"more": torch.zeros(3), "tokens": None}, "tokens .* is missing"),
    ],
)
def test_what_is_wrong_is_refused_after_what_was_right(arguments: Arguments, change: Any, match: str) -> None:
    good = call(3)
    for _ in range(2):
        arguments.checked(good)
        with pytest.raises(OptionError, match=match):
            arguments.checked({k: v for k, v in {**good, **change}.items() if v is not None})


def test_lists_are_made_into_tensors_at_each_call(arguments: Arguments) -> None:
    for tokens in ([1, 2, 3], (4, 5, 6), [7, 8, 9]):
        rows, given, host = arguments.checked({**call(3), "tokens": tokens})
        assert (rows, host) == (3, (0,))
        assert given[0].tolist() == list(tokens)


def test_numbers_of_rows_that_are_remembered_are_bounded(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments_module, "CALLS_REMEMBERED", 2)
    for n in (1, 2, 3, 1, 4):
        assert arguments.checked(call(n))[0] == n
        assert len(arguments._known) <= 2


def test_tensors_are_alike_by_class_device_dtype_and_shape() -> None:
    one = [torch.zeros(3), torch.zeros(2, 2)]
    like = alike(one)
    assert like(torch.ones(3), torch.ones(2, 2).t())
    for other in (
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, device="meta"),
        torch.zeros(3, 1),
        torch.zeros(4),
        torch.nn.Parameter(torch.zeros(3)),
    ):
        assert not like(other, one[1])
