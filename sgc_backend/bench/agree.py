"""Whether a way to run a model gives what eager gives: else its figures would mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of inductor's results, as a share of their length
USUAL = 16  # layers


def must_agree(
    expected: torch.Tensor, ways: Mapping[str, Callable[[], Any]], inexact: Sequence[str] = (), *, layers: int = USUAL
) -> None:
    """Call every way and compare its result with ``expected``: bit for bit.

    Args:
        ways: by name.
        inexact: what the names of those hold in which other kernels run; they are compared within `TOLERANCE`.
        layers: that the results went through; more than usual add up more rounding errors.

    Raises:
        RuntimeError: one differs.
    """
    deeper = max(1.0, (layers / USUAL) ** 0.5)
    for name, way in ways.items():
        got = way()
        error = float((got.double() - expected.double()).norm() / expected.double().norm())
        allowed = TOLERANCE[got.dtype] * deeper if any(part in name for part in inexact) else 0.0
        if not (torch.equal(got, expected) if allowed == 0 else error <= allowed):
            raise RuntimeError(
                f"{name}: differs from eager by {error:.2g} of its length, allowed is {allowed:g}; its figures would "
                f"mean nothing"
            )
