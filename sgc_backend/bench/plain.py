"""The decoder's pieces recorded by hand, one graph for each size and piece: a peer without this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sgc_backend.device import Device

from .attention import attend


@dataclass
class Recorded:
    """One size.

    Attributes:
        graphs: one a piece, in order.
        cuts: what each attention takes, and writes.
        out: [n, E], rewritten by every `run`.
    """

    graphs: list[Any] = field(default_factory=list)
    cuts: list[tuple[Tensor, ...]] = field(default_factory=list)
    out: Tensor | None = None

    def run(self) -> Tensor:
        """Replay the pieces, with the attention in between."""
        for graph, cut in zip(self.graphs[:-1], self.cuts, strict=True):
            graph.replay()
            attend(*cut)
        self.graphs[-1].replay()
        assert self.out is not None
        return self.out


class PlainRecordings:
    """Graphs of a decoder's pieces in a pool of their own, without warm-up: every kernel must be loaded.

    Args:
        blocks: the decoder's layers, which attend through `attend`.
        device, stream: where to, and what to capture on.

    Attributes:
        graphs: all of them.
        seconds: that recording took.
    """

    def __init__(self, blocks: nn.Sequential, device: Device, stream: Any) -> None:
        self.blocks, self.device, self.stream = list(blocks), device, stream
        self.graphs: list[Any] = []
        self.seconds = 0.0
        self._handle = device.new_pool_handle()

    def record(self, given: Tensor, sizes: Sequence[int], check: Callable[[int, Callable[[], Tensor]], None]) -> None:
        """Record every size, largest first, each on the first rows of ``given``.

        Args:
            check: called with a size and what runs it, as long as it can be run: the next size takes its memory.
        """
        for n in sorted(sizes, reverse=True):
            self.device.synchronize()
            self.stream.wait_stream(self.device.current_stream())
            begin = time.perf_counter()
            with self.device.use_stream(self.stream):
                one = self._record_one(given[:n])
            self.seconds += time.perf_counter() - begin
            self.device.synchronize()
            self.graphs += one.graphs
            check(n, one.run)
            del one  # its memory is for the next size

    def _record_one(self, x: Tensor) -> Recorded:
        one = Recorded()
        for place in range(len(self.blocks) + 1):
            graph = self.device.new_graph()
            self.device.capture_begin(graph, self._handle)
            try:
                if place:
                    x = self.blocks[place - 1].behind(x, one.cuts[-1][-1])
                if place < len(self.blocks):
                    q, k, v = self.blocks[place].in_front(x)
                    one.cuts.append((q, k, v, torch.empty_like(q)))
            finally:
                self.device.capture_end(graph)
            one.graphs.append(graph)
        one.out = x
        return one

    def release(self) -> None:
        """Destroy the graphs. Idempotent."""
        graphs, self.graphs = self.graphs, []
        for graph in graphs:
            graph.reset()
