"""Torch's settings that a callable changes around a break: its body runs under them at replay too.

What was on around the callable itself is no part of it: as in eager, that is what the replay's caller has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import DeviceContext

Entered = Callable[[], contextlib.AbstractContextManager[None]]

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


def _attention() -> tuple[Any, ...]:
    on = (getattr(torch._C, f"_get_{name}_sdp_enabled", bool)() for name in _ATTENTION)
    return (*on, tuple(torch._C._get_sdp_priority_order()))


def _set_attention(value: tuple[Any, ...]) -> None:
    for name, on in zip(_ATTENTION, value, strict=False):
        getattr(torch._C, f"_set_sdp_use_{name}", bool)(on)
    torch._C._set_sdp_priority_order(list(value[-1]))


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _cudnn() -> tuple[bool, ...]:
    return torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()


def _set_cudnn(value: tuple[bool, ...]) -> None:
    torch._C._set_cudnn_enabled(value[0])
    torch._C._set_cudnn_benchmark(value[1])
    torch._C._set_cudnn_deterministic(value[2])


# What products and convolutions of float32 are computed in, by backend and kind of op.
_FLOAT32 = (("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")))
# What they may be summed up in.
_SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")


def _told(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (RuntimeError, AttributeError):  # torch tells of no older setting where a newer one contradicts it
        return None


def _legacy() -> tuple[Any, Any]:
    return _told(torch.get_float32_matmul_precision), _told(torch._C._get_cudnn_allow_tf32)


def _set_legacy(value: tuple[Any, Any]) -> None:
    if value[1] is not None and value[1] != _told(torch._C._get_cudnn_allow_tf32):
        torch._C._set_cudnn_allow_tf32(value[1])
    if value[0] is not None and value[0] != _told(torch.get_float32_matmul_precision):
        torch.set_float32_matmul_precision(value[0])


def _float32(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    get = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)
    put = getattr(torch._C, "_set_fp32_precision_setter", lambda *_: None)
    return lambda: _told(lambda: get(backend, op)), lambda value: put(backend, op, value)


def _sums(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    matmul = torch.backends.cuda.matmul
    return lambda: _told(lambda: getattr(matmul, name)), lambda value: setattr(matmul, name, value)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    # In this order: the older ones change the newer ones as well, which are put back behind them.
    *(_float32(*of) for of in _FLOAT32),
    (_legacy, _set_legacy),
    *map(_sums, _SUMS),
    (torch._C._get_deterministic_fill_uninitialized_memory, torch._C._set_deterministic_fill_uninitialized_memory),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_attention, _set_attention),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (_cudnn, _set_cudnn),
)


def _function_modes() -> list[Any]:
    """A default device is one of them."""
    stack = getattr(torch.overrides, "_get_current_function_mode_stack", None)
    return [] if stack is None else list(stack())


class Settings:
    """The settings and function modes that are on as it is made."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]
        self._modes = _function_modes()

    def changed_since(self, before: Settings) -> Entered | None:
        """What has those of ours on that are not as ``before``; None where all are."""
        values = [
            (get, put, value)
            for (get, put), value, then in zip(_SETTINGS, self._values, before._values, strict=True)
            if value != then
        ]
        modes = [mode for mode in self._modes if not any(mode is then for then in before._modes)]
        return (lambda: _entered(values, modes)) if values or modes else None


@contextlib.contextmanager
def _entered(values: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]], modes: list[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for get, put, _ in values:  # of all, before one changes another
            stack.callback(put, get())
        for _, put, value in values:
            put(value)
        for mode in modes:  # one of a device remembers what it found: it can't be entered twice
            stack.enter_context(DeviceContext(mode.device) if isinstance(mode, DeviceContext) else mode)
        yield
