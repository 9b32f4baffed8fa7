"""What went wrong in public for others who capture graphs: settings around a break, and what classes hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_backend import compiled, only_graphs_of_this_test, same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, eager_on_graph
from sgc_backend.errors import ReplayError

__all__ = ["only_graphs_of_this_test"]

X = torch.arange(8.0)


class Louder(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 10 if func is torch.relu else out


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)


@contextlib.contextmanager
def set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def medium_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def now() -> tuple[Any, ...]:
    """What a body can tell of the settings around it."""
    return (
        torch.get_default_dtype(),
        torch.zeros(1).device,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.backends.cudnn.enabled,
        torch.relu(torch.ones((), device="cpu")).item(),
    )


AROUND: dict[str, Callable[[], Any]] = {
    "a default device": lambda: torch.device("meta"),
    "a default dtype": double_precision,
    "deterministic algorithms": deterministic,
    "kernels of attention": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "no cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "a function mode": Louder,
}


@pytest.mark.parametrize("outside", [None, *AROUND])
@pytest.mark.parametrize("inside", AROUND)
def test_a_break_runs_under_the_settings_that_the_callable_puts_up(inside: str, outside: str | None) -> None:
    seen: list[tuple[Any, ...]] = []

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(now())
        return x * 3

    def step() -> torch.Tensor:
        x = body(X * 2)
        with AROUND[inside]():
            x = body(x + 1)
        return body(x)

    backend = BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, step)
    # As in eager, what is around the callable is the caller's of this replay.
    with AROUND[outside]() if outside is not None else contextlib.nullcontext():
        seen.clear()
        expected = step()
        wanted = list(seen)
        around = now()
        seen.clear()
        for _ in range(2):
            same(backend.replay(8), expected)
            assert now() == around
    assert seen == 2 * wanted
    assert inside == outside or wanted[0] != wanted[1]
    backend.cleanup()


PRECISION: dict[str, Callable[[], Any]] = {
    "a lower precision": medium_precision,
    "no TF32 in cuDNN": lambda: torch.backends.cudnn.flags(allow_tf32=False),
    "TF32 in products": lambda: set_to(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "sums in float32": lambda: set_to(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "memory left as it is": lambda: set_to(torch.utils.deterministic, "fill_uninitialized_memory", False),
}


def precision() -> tuple[Any, ...]:
    return (
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("inside", PRECISION)
def test_a_break_runs_in_the_precision_that_the_callable_puts_up(inside: str) -> None:
    seen = []

    @eager_on_graph
    def body(h: torch.Tensor) -> torch.Tensor:
        seen.append(precision())
        return h + 1

    def forward() -> torch.Tensor:
        with PRECISION[inside]():
            return body(X * 2) * 2

    forward()
    outside = precision()
    assert seen[-1] != outside
    backend = BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, forward)
    wanted = seen[-1]
    for _ in range(2):
        backend.replay(8)
        assert seen[-1] == wanted
        assert precision() == outside
    backend.cleanup()


def test_settings_are_put_back_where_a_break_fails() -> None:
    fails = False

    @eager_on_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ArithmeticError
        return x * 3

    def step() -> torch.Tensor:
        with torch.device("meta"), double_precision(), sdpa_kernel(SDPBackend.MATH), Louder():
            return body(X * 2)

    backend = BreakableCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, step)
    before = now()
    fails = True
    with pytest.raises(ArithmeticError):
        backend.replay(8)
    assert now() == before
    fails = False
    same(backend.replay(8), X * 6)
    backend.cleanup()


# -- classes -----------------------------------------------------------------------------------------------------------


class Tables:
    cosines = torch.randn(8)
    held: Any = None


class Rotated(nn.Module):
    sines = torch.randn(8)
    scale = 2.0

    @staticmethod
    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * Tables.cosines

    @property
    def now(self) -> Any:
        return self._now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rotated(x) + self.sines * self.scale + Tables.held.cosines


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Tables, "cosines", torch.randn(8)),
        (Rotated, "sines", torch.randn(8)),
        (Rotated, "scale", 3.0),
        (Tables, "held", Tables()),
    ],
)
def test_what_a_class_holds_is_not_replaced_in_silence(
    owner: type, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tables, "held", Tables())
    model, x = Rotated(), torch.randn(8)
    backend = FullCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: model(x))
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            same(call(x), model(x))
        same(backend.replay(8), model(x))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(ReplayError, match=rf"{owner.__name__}.{name} (moved|changed)"):
                backend.replay(8)
            for _ in range(3):
                same(call(x), model(x))
        same(backend.replay(8), model(x))  # it is back
    backend.cleanup()


class Rotated2(Rotated):
    """A class in front of the one that holds the attributes."""


@pytest.mark.parametrize("at", ["the object", "a class in front"])
@pytest.mark.parametrize(("name", "value"), [("sines", torch.randn(8)), ("scale", 3.0)])
def test_what_is_set_in_front_of_a_classs_attribute_is_not_missed(
    at: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tables, "held", Tables())
    model, x = Rotated2(), torch.randn(8)
    backend = FullCudaGraphBackend()
    with backend.capture_session():
        backend.capture_one(8, lambda: model(x))
    wanted, owner = model(x), model if at == "the object" else Rotated2
    for _ in range(2):
        same(backend.replay(8), wanted)
        setattr(owner, name, value)
        with pytest.raises(ReplayError, match=rf"Rotated2.{name} (moved|changed)"):
            backend.replay(8)
        delattr(owner, name)
    setattr(owner, name, getattr(Rotated, name))  # the same: nothing to refuse, until it is another
    for _ in range(2):
        same(backend.replay(8), wanted)
    setattr(owner, name, value)
    with pytest.raises(ReplayError, match=rf"Rotated2.{name} (moved|changed)"):
        backend.replay(8)
    delattr(owner, name)
    backend.cleanup()
