"""Warm-up: the first call of a key, answered compiled on the capture stream and watched for the recording to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .buckets import Key
from .device import Device
from .groups import Ref
from .padding import Padding
from .pool import GraphPool
from .probe import Probe
from .walk import CutResult, Walk

TRIED_AT = 2  # buckets at which pieces are tried before the rest is taken for granted


@dataclass(frozen=True)
class Observed:
    """What a key's warm-up showed.

    Attributes:
        cuts: what each cut returned, by name.
        real: the call's sizes.
        itself: outputs that were arguments themselves, by name, and which argument.
    """

    cuts: dict[str, CutResult]
    real: Key
    itself: dict[str, int]


class WarmUps:
    """The warm-ups of a compiled graph.

    Args:
        walk: the uncaptured way through it.
        device: the one that it runs on.
        remembered: keys whose warm-up is remembered, at most.

    Attributes:
        observed: by key; without those that the pieces disagreed in.
        detached: outputs that carry no gradient, whatever they are views of; of the last warm-up.
        inference: outputs that were inference tensors; of the last warm-up.
    """

    def __init__(self, walk: Walk, device: Device, remembered: int) -> None:
        self._walk, self._device, self._remembered = walk, device, remembered
        self.observed: dict[Key, Observed] = {}
        self.detached: frozenset[str] = frozenset()
        self.inference: frozenset[str] = frozenset()
        self._agreed = 0  # buckets at which the pieces were tried

    def run(
        self, pool: GraphPool, key: Key, real: Key, args: Sequence[Any], padding: Padding | None
    ) -> tuple[list[Any], str | None]:
        """Answer the call compiled, on the capture stream: libraries and autotuners settle there for this size, and in
        a bucket's for the bucket's as well, where the pieces are tried.

        Returns:
            The outputs, and why the graph must not be padded, where it turned out that it must not.
        """
        current = self._device.current_stream()
        observed: dict[str, CutResult] = {}
        probe = self._probe(key, real, args, padding)
        with pool.warming_up():
            out = self._walk.run(args, observed, None if probe is None else probe.run)
        for value in out:
            if isinstance(value, torch.Tensor) and self._device.owns(value):
                self._device.keep_for(value, current)
        named = [(r.name, v) for r, v in zip(self._walk.split.outputs, out, strict=True) if isinstance(r, Ref)]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        self.detached = frozenset(name for name, value in tensors if not value.requires_grad)
        self.inference = frozenset(name for name, value in tensors if value.is_inference())
        if probe is not None and probe.disagreed:
            return out, probe.disagreed[0]
        self._agreed += probe is not None and probe.compare
        at = {id(value): k for k, value in enumerate(args) if isinstance(value, torch.Tensor)}
        itself = {name: at[id(value)] for name, value in tensors if id(value) in at}
        self.observed[key] = Observed(observed, real, itself)
        while len(self.observed) > self._remembered:
            del self.observed[next(iter(self.observed))]  # the oldest: keys that come once must not pile up
        return out, None

    def _probe(self, key: Key, real: Key, args: Sequence[Any], padding: Padding | None) -> Probe | None:
        if padding is None or padding.trusted:
            return None
        full = padding.buckets.fills(real, key)
        small = padding.buckets.smaller(key) if full else real
        if small is None:
            return None  # the bucket serves no size but its own
        symbols = self._walk.symbols
        args = symbols.as_called(args)
        return Probe(
            padding.extents.at(small),
            padding.extents.at(key),
            lambda ref: symbols.evaluate(ref.expr, args, ref.kind, padding.buckets.values(small)),
            lambda ref: symbols.evaluate(ref.expr, args, ref.kind, padding.buckets.values(key)),
            self._device.generator(),
            self._walk.split,
            compare=self._agreed < TRIED_AT,
            given_wide=full,
        )
