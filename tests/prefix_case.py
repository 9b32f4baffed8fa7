"""Cases for prefix safety: what an op computes, on which inputs, and whether it is safe or which op is to blame.

A dimension of length N holds the rows. Next to what is safe stands what is not, so that a rule that is too wide or too
narrow shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        blamed: the op's name without namespace, or several; None: all is safe.
        shows: a padded run really differs.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    blamed: str | None = None
    shows: bool = True


CASES: list[Case] = []


def safe(name: str, fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
    CASES.append(Case(name, fn, inputs))


def blamed(name: str, op: str, fn: Callable[..., Any], *inputs: torch.Tensor, shows: bool = True) -> None:
    CASES.append(Case(name, fn, inputs, op, shows))


GENERATOR = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) > 0.5
