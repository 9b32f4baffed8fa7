"""What a runner is given: its inputs by name, checked against their specs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .errors import OptionError
from .input_spec import InputSpec, host_tensor

CALLS_REMEMBERED = 512  # numbers of rows whose shapes are kept


Checked = tuple[int, Sequence[torch.Tensor], tuple[int, ...]]


@dataclass(frozen=True)
class _Known:
    """A call that was right: its rows, which inputs lay on the host, and whether another's inputs are like its own."""

    rows: int
    host: tuple[int, ...]
    like: Callable[..., bool]


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
        if isinstance(specs, (InputSpec, torch.Tensor)) or not isinstance(specs, Iterable):
            raise OptionError(f"{name}: inputs must be a list of InputSpec, got {specs!r}")
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
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._known: dict[int | None, _Known] = {}  # of each number of rows the last call of tensors
        self._last = _Known(0, (), lambda *given: False)
        names = self._names
        self._pick: Callable[[dict[str, Any]], Sequence[Any]] = (
            operator.itemgetter(*names) if len(names) > 1 else lambda inputs: (inputs[names[0]],)
        )

    def checked(self, inputs: dict[str, Any]) -> Checked:
        """The rows of a call, its inputs as tensors in the order of the specs, and which of these lie on the host.

        Raises:
            OptionError: an input is missing, unknown, on another device, or of another shape or dtype; too many rows.
        """
        if len(inputs) == len(self._names):
            try:  # what is right takes the short way: tensors like those of a call that came before
                given = self._pick(inputs)
                known = self._last
                if not known.like(*given):
                    known = self._known[self._rows.rows(given[self._counted].shape[self._dim])]
                    if not known.like(*given):
                        return self._examined(inputs)
                    self._last = known
                return known.rows, given, known.host
            except (KeyError, IndexError, AttributeError, TypeError):  # it is none of these; or of a shape yet unseen
                pass
        return self._examined(inputs)

    def _examined(self, inputs: dict[str, Any]) -> Checked:
        tensors: list[torch.Tensor] = []
        host: list[int] = []
        for k, spec in enumerate(self.specs):
            if spec.name not in inputs:
                raise OptionError(f"{self.name}: input {spec} is missing; got {', '.join(inputs) or 'none'}")
            value = inputs[spec.name]
            if not isinstance(value, torch.Tensor):
                value = host_tensor(value, spec)
                host.append(k)
            elif value.layout is not torch.strided:
                raise OptionError(f"{self.name}: input {spec} is {value.layout}; give a strided tensor: to_dense()")
            elif value.device != self.device:
                if value.device.type != "cpu":
                    raise OptionError(
                        f"{self.name}: input {spec} is on {value.device}; expected {self.device} or the host"
                    )
                host.append(k)
            tensors.append(value)
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
        if all(
            map(operator.is_, tensors, [inputs[name] for name in self._names])
        ):  # else they are made anew at each call
            self._last = _Known(n, tuple(host), alike(tensors))
            while len(self._known) >= CALLS_REMEMBERED:
                self._known.pop(next(iter(self._known)), None)
            self._known[n] = self._last
        return n, tensors, tuple(host)

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


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """``like(*others)``: whether as many others have the classes, devices, dtypes and shapes of ``tensors``.

    It may also be false where they differ in something else, such as a mode that they were made in. Raises TypeError
    for another number of tensors.
    """
    shapes = [list(tensor.shape) for tensor in tensors]
    try:
        from torch._C._dynamo.guards import TensorGuards  # one C call, 0.07 µs for each tensor

        guards = TensorGuards(
            *tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=[[None] * len(shape) for shape in shapes]
        )
        if guards.check(*tensors):
            return guards.check
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):  # Dynamo's own business, and may change
        pass
    expected = [(type(tensor), tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
    return lambda *others: [(type(other), other.device, other.dtype, other.shape) for other in others] == expected
