"""InputSpec: one input of a runner's callable; and numbers made into such an input on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import OptionError
from .rows import Rows

ALIGNMENT = 256  # bytes; what kernels may assume of a tensor that an allocator made
LAST = "last"  # pad value: the last real row's


@dataclass(frozen=True)
class InputSpec:
    """One input of a runner's callable.

    Args:
        name: the callable's keyword for it.
        shape: lengths of its dimensions; the one that grows with the call is `ROWS`, ``ROWS * k`` or ``ROWS + k``.
            An input without such a dimension is staged whole.
        dtype: its dtype.
        pad: what rows beyond the call's hold: a number, or "last" for a copy of the last real row.

    Raises:
        OptionError: a bad name, shape, dtype or pad value.
    """

    name: str
    shape: Sequence[int | Rows]
    dtype: torch.dtype
    pad: float | str = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name == "variant":
            raise OptionError(f"the name of an input must be an identifier other than 'variant', got {self.name!r}")
        if isinstance(self.shape, (str, bytes, bytearray)) or not isinstance(self.shape, Sequence):
            raise OptionError(f"input {self.name}: shape must be a tuple such as (ROWS, 64), got {self.shape!r}")
        for length in self.shape:
            if not isinstance(length, Rows) and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
                raise OptionError(f"input {self.name}: shape holds {length!r}; expected ints >= 0 and one ROWS")
        object.__setattr__(self, "shape", tuple(self.shape))
        if sum(isinstance(length, Rows) for length in self.shape) > 1:
            raise OptionError(f"input {self.name}: shape {self.shape} has several dimensions of ROWS; one can grow")
        if not isinstance(self.dtype, torch.dtype):
            raise OptionError(f"input {self.name}: dtype must be a torch.dtype, got {self.dtype!r}")
        self._check_pad()

    def _check_pad(self) -> None:
        if isinstance(self.pad, str) and self.pad == LAST:
            return
        wrong = not isinstance(self.pad, (int, float, complex))
        if not wrong:
            try:
                back = torch.full((1,), self.pad, dtype=self.dtype, device="cpu").item()
                whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
                wrong = whole and back != self.pad
            except (RuntimeError, TypeError, OverflowError):
                wrong = True
        if wrong:
            raise OptionError(
                f"input {self.name}: pad must be 'last' or a number that {self.dtype} holds: {self.pad!r}"
            )

    @property
    def dim(self) -> int | None:
        """The dimension that grows; None where none does."""
        return next((k for k, length in enumerate(self.shape) if isinstance(length, Rows)), None)

    def size(self, n: int) -> tuple[int, ...]:
        """Its shape for n rows."""
        return tuple(length.length(n) if isinstance(length, Rows) else length for length in self.shape)

    def bytes(self, n: int) -> int:
        """What n rows take, in bytes, rounded up to the alignment."""
        count = self.dtype.itemsize
        for length in self.size(n):
            count *= length
        return -(-count // ALIGNMENT) * ALIGNMENT

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {str(self.dtype).removeprefix('torch.')}"


def host_tensor(value: Any, spec: InputSpec) -> torch.Tensor:
    """A list of numbers or a NumPy array as a tensor on the host.

    Raises:
        OptionError: it is something else, or fractions where the input's dtype has none.
    """
    if type(value) in (list, tuple) and spec.dtype in _CODES and value:
        try:  # 5 times as fast, and as strict
            return torch.frombuffer(array(_CODES[spec.dtype], value), dtype=spec.dtype)
        except (TypeError, OverflowError):  # nested, or no such numbers
            pass
    listed = isinstance(value, (list, tuple, int, float))
    try:
        return _tensor_of(value, spec.dtype) if listed else torch.as_tensor(value, device="cpu")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        kind = type(value).__name__
        raise OptionError(f"input {spec}: expected a tensor or numbers, got a {kind}: {error}") from None


_CODES = {torch.int64: "q", torch.int32: "i", torch.int16: "h", torch.int8: "b", torch.uint8: "B"}


def _tensor_of(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    """``numbers`` as ``dtype``; raises ValueError where it is of integers or bools and does not hold them."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.as_tensor(numbers, dtype=dtype, device="cpu")
    given = torch.as_tensor(numbers, device="cpu")
    if given.dtype is dtype:
        return given
    if given.dtype.is_floating_point and given.numel():
        raise ValueError("it holds floats")
    made = given.to(dtype) if not given.is_complex() else None
    if made is None or bool((made.to(given.dtype) != given).any()):
        raise ValueError(f"{dtype} does not hold {numbers!r:.200}")
    return made
