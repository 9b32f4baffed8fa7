"""Which device a module stands for, and which module captures on this machine."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .config import named_module
from .cuda_device import CudaDevice
from .device import Device
from .emulated_device import EmulatedDevice
from .errors import OptionError


def device_of(module: Any, index: int | None = None) -> Device:
    """The `Device` for a device module, or its name; ``index=None`` means its current device.

    Raises:
        OptionError: the module has no graph_pool_handle(), or its device type isn't supported.
    """
    module = named_module(module)
    if not isinstance(module, ModuleType) or not hasattr(module, "graph_pool_handle"):
        raise OptionError(
            f"device_module must be torch.cuda or sgc_backend.emulated (it must offer graph_pool_handle()), "
            f"got {module!r}"
        )
    kind = EmulatedDevice if module.__name__.rpartition(".")[2] == "emulated" else CudaDevice
    if kind is CudaDevice and module is not torch.cuda:
        raise OptionError(f"device module {module.__name__} is not supported; use torch.cuda or emulated")
    if not module.is_available():
        raise OptionError(
            f"{module.__name__} has no device on this machine; sgc_backend.emulated (or SGC_DEVICE=emulated) needs none"
        )
    return kind(module, module.current_device() if index is None else index)


def default_module(tensor_type: str, *, emulated: bool) -> Any:
    """The device module that captures tensors of device type ``tensor_type``, or None where nothing can."""
    if emulated and tensor_type == "cpu":
        from . import emulated as module  # only when asked for: it is of no use to a GPU process

        return module
    if tensor_type == "cuda" and hasattr(torch.cuda, "graph_pool_handle"):
        return torch.cuda
    return None


def present_module(*, emulated: bool) -> Any:
    """The device module of this machine: the emulated one where asked for, CUDA's where there is a device, or None."""
    return default_module("cpu" if emulated or not torch.cuda.is_available() else "cuda", emulated=emulated)
