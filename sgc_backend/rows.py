"""Which dimensions of a tensor grow with the rows of a call, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import OptionError


def _check_int(what: str, k: object, least: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < least:
        raise OptionError(f"ROWS can be {what} an int >= {least}, got {k!r}")


@dataclass(frozen=True, repr=False)
class Rows:
    """The length of a dimension for n rows: ``times * n + plus``.

    Written with `ROWS`: ``ROWS`` is n, ``ROWS * 4`` is 4 n (four tokens a request, say), ``ROWS + 1`` is n + 1
    (offsets that begin with 0).

    Raises:
        OptionError: ``times`` is no int >= 1, or ``plus`` no int >= 0.
    """

    times: int = 1
    plus: int = 0

    def __post_init__(self) -> None:
        _check_int("multiplied by", self.times, 1)
        _check_int("added to", self.plus, 0)

    def __mul__(self, k: int) -> Rows:
        _check_int("multiplied by", k, 1)
        return Rows(self.times * k, self.plus * k)

    __rmul__ = __mul__

    def __add__(self, k: int) -> Rows:
        _check_int("added to", k, 0)
        return Rows(self.times, self.plus + k)

    __radd__ = __add__

    def length(self, n: int) -> int:
        """The dimension's length for n rows."""
        return self.times * n + self.plus

    def rows(self, length: int) -> int | None:
        """How many rows a dimension of this length holds; None where none makes it that long."""
        n, rest = divmod(length - self.plus, self.times)
        return n if rest == 0 and n >= 0 else None

    def __repr__(self) -> str:
        text = "ROWS" if self.times == 1 else f"ROWS * {self.times}"
        return text if not self.plus else f"{text} + {self.plus}"


ROWS = Rows()

Grown = tuple[tuple[int, Rows], ...]  # the dimensions of one tensor that grow, with their lengths


def growth(name: str, one: Sequence[int], at_one: int, two: Sequence[int], at_two: int) -> Grown:
    """The dimensions in which a tensor's shapes for two numbers of rows differ.

    Raises:
        OptionError: ``name`` has another number of dimensions, or a length that is no multiple of the rows (plus a
            constant).
    """
    if len(one) != len(two):
        raise OptionError(
            f"{name} has {len(one)} dimensions for {at_one} rows and {len(two)} for {at_two}; it must have the same"
        )
    found = []
    for dim, (a, b) in enumerate(zip(one, two, strict=True)):
        if a == b:
            continue
        times, rest = divmod(b - a, at_two - at_one)
        plus = a - times * at_one
        if rest or times < 1 or plus < 0:
            raise OptionError(
                f"dimension {dim} of {name} has {a} elements for {at_one} rows and {b} for {at_two}; it must be a "
                f"multiple of the rows, or that plus a constant, so that it can be cut to the rows of a call"
            )
        found.append((dim, Rows(times, plus)))
    return tuple(found)


def cut_to(tensor: torch.Tensor, grown: Grown, n: int) -> torch.Tensor:
    """The view of ``tensor`` that n rows fill."""
    for dim, rows in grown:
        tensor = tensor.narrow(dim, 0, rows.times * n + rows.plus)
    return tensor
