"""A peer for breakable capture, where it is installed: PyPI's breakable-cuda-graphs, recorded as its users record.

It replays graph segments and breaks in turn, without checks: addresses are its users' to keep.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .attention import Into, attend

NAME = "breakable-cuda-graphs"


class BreakablePeer:
    """The package, and what is recorded with it.

    Attributes:
        attend: `attend`, marked as a break.
    """

    def __init__(self, package: Any) -> None:
        self._package, self._pool, self._stream = package, torch.cuda.graph_pool_handle(), torch.cuda.Stream()

        def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            attend(q, k, v, out)

        self.attend: Into = package.no_graph(broken)

    def record(self, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """What replays ``forward()``; its result is a static tensor. Record the largest size first."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = self._package.BreakableCUDAGraph(pool=self._pool)
        with self._package.breakable_graph(graph, stream=self._stream):
            out = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def breakable_peer(device: str) -> BreakablePeer | None:
    """The peer; None where the package is not installed, or has no device to record on."""
    if device != "cuda":
        return None
    try:
        return BreakablePeer(importlib.import_module("breakable_cuda_graphs"))
    except ImportError:
        return None
