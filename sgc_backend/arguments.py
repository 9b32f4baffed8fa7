"""What a runner is given: its inputs by name, checked against their specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .buffers import HostData, InputSpec
from .errors import OptionError

CALLS_REMEMBERED = 512  # numbers of rows whose shapes are kept


class Arguments:
    """Checks the inputs of calls.

    Args:
        name: whose errors these are.
        specs: what it takes.
        device: where inputs lie that are not on the host.
        max_size: the most rows of a call; None: no limit.

    Raises:
        OptionError: no list of specs, names that occur twice, or no dimension of `ROWS`.
    """

    def __init__(self, name: str, specs: Sequence[InputSpec], device: torch.device, max_size: int | None) -> None:
        self.name, self.specs, self.device, self.max_size = name, tuple(specs), device, max_size
        for spec in self.specs:
            if not isinstance(spec, InputSpec):
                raise OptionError(f"{name}: inputs must be a list of InputSpec, it holds {spec!r}")
        self._names = [spec.name for spec in self.specs]
        if len(set(self._names)) != len(self._names):
            raise OptionError(f"{name}: inputs have the same name: {', '.join(self._names)}")
        if all(spec.dim is None for spec in self.specs):
            raise OptionError(f"{name}: no input has a dimension of ROWS; mark the one that grows with a call")
        self._counted = next(k for k, spec in enumerate(self.specs) if spec.dim is not None)
        counted = self.specs[self._counted]
        self._dim, self._rows = counted.dim, counted.shape[counted.dim]
        self._dtypes = [spec.dtype for spec in self.specs]
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}

    def checked(self, inputs: dict[str, Any]) -> tuple[int, list[Any]]:
        """The rows of a call and its inputs in the order of the specs, those on the host as `HostData`.

        Raises:
            OptionError: an input is missing, unknown, on another device, or of another shape or dtype; too many rows.
        """
        try:  # what is right takes the short way: tensors on the device, in shapes that came before
            given = [inputs[name] for name in self._names]
            n = self._rows.rows(given[self._counted].shape[self._dim])
            for value, shape, dtype in zip(given, self._shapes[n], self._dtypes, strict=True):
                if value.shape != shape or value.dtype is not dtype or value.device != self.device:
                    return self._examined(inputs)
        except (KeyError, IndexError, AttributeError, TypeError):  # it is none of these; or of a shape yet unseen
            return self._examined(inputs)
        return (n, given) if len(inputs) == len(given) else self._examined(inputs)

    def _examined(self, inputs: dict[str, Any]) -> tuple[int, list[Any]]:
        given: list[Any] = []
        tensors: list[torch.Tensor] = []
        for spec in self.specs:
            if spec.name not in inputs:
                raise OptionError(f"{self.name}: input {spec} is missing; got {', '.join(inputs) or 'none'}")
            value = inputs[spec.name]
            if not isinstance(value, torch.Tensor):
                value = HostData.of(value, spec)
            elif value.device != self.device:
                if value.device.type != "cpu":
                    raise OptionError(
                        f"{self.name}: input {spec} is on {value.device}; expected {self.device} or the host"
                    )
                value = HostData(value)
            given.append(value)
            tensors.append(value.tensor if isinstance(value, HostData) else value)
        if len(inputs) != len(self.specs):
            extra = ", ".join(sorted(set(inputs) - set(self._names)))
            raise OptionError(f"{self.name}: unknown input {extra}; it takes {', '.join(map(str, self.specs))}")
        n = self._rows_of(tensors[self._counted], self.specs[self._counted])
        shapes = self._shapes.get(n)
        if shapes is None:
            shapes = tuple(spec.size(n) for spec in self.specs)
            if len(self._shapes) < CALLS_REMEMBERED:
                self._shapes[n] = shapes
        for tensor, spec, shape in zip(tensors, self.specs, shapes, strict=True):
            if tensor.shape != shape or tensor.dtype is not spec.dtype:
                self._refuse(tensor, spec, f"shape {shape}, for the {n} rows of {self._names[self._counted]},")
        return n, given

    def _rows_of(self, tensor: torch.Tensor, spec: InputSpec) -> int:
        n = self._rows.rows(tensor.shape[self._dim]) if tensor.ndim == len(spec.shape) else None
        if n is None:
            self._refuse(tensor, spec, "that shape")
        if self.max_size is not None and n > self.max_size:
            raise OptionError(
                f"{self.name}: input {spec.name} has {n} rows, max_size is {self.max_size}; split the call"
            )
        return n

    def _refuse(self, tensor: torch.Tensor, spec: InputSpec, wanted: str) -> NoReturn:
        dtype = str(tensor.dtype).removeprefix("torch.")
        got = f"{tuple(tensor.shape)} {dtype}"
        raise OptionError(f"{self.name}: input {spec}: expected {wanted} and that dtype, got {got}")
