"""The routes by which a callable gets recorded, behind one face: for tests that must hold for each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import CUTS
from test_backend import compiled
from test_injection import module

from sgc_backend import (
    BreakableCudaGraphBackend,
    CudaGraphBackend,
    FullCudaGraphBackend,
    ShapeKey,
    TcPiecewiseCudaGraphBackend,
    break_graph,
)

ROUTES = ("compiled", "tc_piecewise", "full", "breakable")


def routes(*names: str) -> Any:
    """Parametrize a test by ``route``: all of them, or those named."""
    return pytest.mark.parametrize("route", names or ROUTES)


class Recorded:
    """``fn`` recorded by one route over the first rows of ``buffers``, which stay where they are.

    Call with a key: a size, or ShapeKey(size, variant) for a wrapper. The result of a wrapper, and of
    outputs="static", is valid until the next replay. `fn` runs for real a few times before the first replay.

    Attributes:
        backend: the wrapper; None for the compiled route.
        run: the compiled callable; None for the others.
    """

    def __init__(
        self,
        route: str,
        device: str,
        fn: Callable[..., Any],
        *buffers: torch.Tensor,
        sizes: Sequence[int],
        cuts: Sequence[str] = (),
        measure: bool = False,
        **options: Any,
    ) -> None:
        self.route, self.fn, self.buffers, self.measure = route, fn, buffers, measure
        self.backend: CudaGraphBackend | None = None
        self.run: Any = None
        options = {"cut_ops": (*CUTS, *cuts), **options}
        if route == "compiled":
            self.run = compiled(fn, dynamic=len(sizes) > 1, **options)
            for n in sorted(sizes, reverse=True) * 2:
                self(n)
            return
        if route == "tc_piecewise":
            options = {"inner": "eager", **options}
            where = module(device)
            self.backend = TcPiecewiseCudaGraphBackend(fn, capture_sizes=sizes, options=options, device_module=where)
        else:
            kind = FullCudaGraphBackend if route == "full" else BreakableCudaGraphBackend
            self.backend = kind(module(device))
        self.record(*sorted(sizes, reverse=True))

    def record(self, *keys: ShapeKey | int, fn: Callable[..., Any] | None = None) -> None:
        """Record under further keys, or once more under the same."""
        backend = self.backend
        assert backend is not None
        with torch.no_grad(), backend.capture_session(measure=self.measure):
            for key in keys:
                args = self.slices(key)
                if isinstance(backend, TcPiecewiseCudaGraphBackend):
                    backend.capture_one(key, lambda args=args: backend.compiled(*args))
                else:
                    backend.capture_one(key, lambda args=args: self._forward(fn or self.fn, args))

    def _forward(self, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> Any:
        if self.route == "breakable":
            break_graph()  # or a callable without breaks of its own would be warned about
        return fn(*args)

    def slices(self, key: ShapeKey | int) -> tuple[torch.Tensor, ...]:
        return tuple(b[: ShapeKey.of(key).size] for b in self.buffers)

    def __call__(self, key: ShapeKey | int) -> Any:
        with torch.no_grad():
            return self.run(*self.slices(key)) if self.backend is None else self.backend.replay(key)

    def expected(self, key: ShapeKey | int) -> Any:
        """What ``fn`` gives uncompiled."""
        with torch.no_grad():
            return self.fn(*self.slices(key))


class Churn:
    """What others allocate and free in between: an address that was free a moment ago holds their bytes.

    Call for another round; `unharmed` tells whether all that is held still has what was written into it.
    """

    def __init__(self, device: str, *sizes: int) -> None:
        self.device, self.sizes = device, sizes or (64, 128, 256, 512, 1024)
        self.rng = random.Random(0)
        self.held: list[torch.Tensor] = []

    def __call__(self) -> None:
        for _ in range(8):
            self.held.append(torch.full((self.rng.choice(self.sizes),), 7e7, device=self.device))
        self.rng.shuffle(self.held)
        del self.held[32:]

    def unharmed(self) -> bool:
        return all(bool((t == 7e7).all()) for t in self.held)
