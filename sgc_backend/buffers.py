"""The input buffers that a runner owns: one block of memory, laid out anew for every bucket.

Buckets never replay at the same time, so their buffers share one block. In each bucket's layout the inputs lie one
behind the other without gaps, so that inputs that come from the host are packed into one pinned block with the same
layout and take one copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .blocks import Block, HostBlock, Step, remember
from .device import Device
from .input_spec import LAST, InputSpec
from .pinned import PinnedRing

PACKED = 1 << 20  # bytes at the largest bucket beyond which an input is copied by itself

Pick = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
# Where to copy, which of the inputs, and where padding goes, from where.
Moves = tuple[list[torch.Tensor], Pick, list[torch.Tensor], list[torch.Tensor]]
Repeat = tuple[torch.Tensor, torch.Tensor | None]  # what is filled with copies of which row; None: of zeros


@dataclass(frozen=True)
class _Plan:
    """How one number of rows is staged into a bucket from the device."""

    moves: list[Moves]
    repeats: list[Repeat]


class InputBuffers:
    """Buffers for up to ``capacity`` rows, and staging into them.

    Not thread-safe: whoever stages and replays holds the pool meanwhile.
    """

    def __init__(self, device: Device, specs: Sequence[InputSpec], capacity: int) -> None:
        self.device, self.capacity = device, capacity
        # Those that are packed come first, so that they are one span in every layout.
        self._order = sorted(range(len(specs)), key=lambda k: specs[k].bytes(capacity) > PACKED)
        self._specs = [specs[k] for k in self._order]
        self._packed = sum(spec.bytes(capacity) <= PACKED for spec in self._specs)
        self._by_dtype: dict[torch.dtype, list[int]] = {}
        for k, spec in enumerate(self._specs):
            self._by_dtype.setdefault(spec.dtype, []).append(k)
        total = sum(spec.bytes(capacity) for spec in self._specs)
        with torch.inference_mode(False):
            memory = torch.zeros(max(total, 1), dtype=torch.uint8, device=device.torch_device)
            self._pads = [
                torch.full(spec.size(capacity), 0 if spec.pad == LAST else spec.pad, dtype=spec.dtype, device="cpu")
                .to(device.torch_device)
                for spec in self._specs
            ]  # fmt: skip
        self._block = Block(memory, self._specs)
        self._repeating = [k for k, spec in enumerate(self._specs) if spec.pad == LAST]
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._span = (memory.data_ptr(), memory.data_ptr() + total)
        self._ring = PinnedRing(device, max(sum(spec.bytes(capacity) for spec in self._specs[: self._packed]), 1))
        self._host_blocks: dict[int, HostBlock] = {}  # of each block of the ring, once it was taken
        self._padded: tuple[int, int] | None = None  # layout and rows of the block whose padding is known to be right
        self.shared = False  # whether somebody else may write to the buffers
        self.bytes = total

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """The buffers of a bucket, by name: contiguous, at the same addresses every time."""
        return {spec.name: view for spec, view in zip(self._specs, self._block.views(size), strict=True)}

    def pad(self, size: int) -> None:
        """Fill a bucket's buffers with padding."""
        for spec, view in zip(self._specs, self._block.views(size), strict=True):
            view.fill_(0 if spec.pad == LAST else spec.pad)
        self._padded = None

    def stage(self, size: int, n: int, given: Sequence[torch.Tensor], host: tuple[int, ...] = ()) -> None:
        """Copy the inputs into the bucket's buffers, and pad behind them.

        Args:
            given: the inputs, checked, in the order of the specs.
            host: which of them lie on the host. (On the emulated device its own tensors look the same.)
        """
        if self.shared:
            given = [self._apart(value) for value in given]
        padded, self._padded = self._padded, None  # an error in between leaves it unknown
        if host:
            number, memory = self._ring.take()
            through = self._host_blocks.get(number)
            if through is None:
                through = self._host_blocks[number] = HostBlock(memory, self._specs[: self._packed])
            (through.steps.get((size, n, host)) or self._host_step(through, size, n, host))(given)
        else:
            fresh = self.shared or padded is None or padded[0] != size or n < padded[1]
            plan = self._plans.get((size, n)) or self._plan(size, n)
            for heads, pick, tails, pads in plan.moves:
                picked = pick(given)
                if fresh and tails:
                    torch._foreach_copy_([*heads, *tails], [*picked, *pads])
                elif len(heads) == 1:
                    heads[0].copy_(picked[0])
                else:
                    torch._foreach_copy_(heads, picked)
            if plan.repeats:
                _repeat(plan.repeats)
        self._padded = (size, n)

    def _plan(self, size: int, n: int) -> _Plan:
        """What to copy where, by dtype, since one call copies all tensors of one dtype."""
        heads, tails = self._block.slices(size, n)
        moves: list[Moves] = []
        for members in self._by_dtype.values():
            padded = [k for k in members if tails[k] is not None]
            moves.append(
                (
                    [heads[k] for k in members],
                    _picker([self._order[k] for k in members], len(heads)),
                    [tails[k] for k in padded],
                    [self._padding(k, tails[k]) for k in padded],
                )
            )
        return remember(self._plans, (size, n), _Plan(moves, self._repeats(heads, tails, self._repeating)))

    def _host_step(self, through: HostBlock, size: int, n: int, host: tuple[int, ...]) -> Step:
        """What stages the inputs where those of ``host`` lie on the host and come through this pinned block.

        Everything is bound into it, because a decode step's host time is mostly Python that the caches don't hold: most
        calls have nothing to pad and nothing to copy by itself.
        """
        heads, tails = self._block.slices(size, n)
        host_heads, host_tails = through.block.slices(size, n)
        packed = [k for k in range(self._packed) if self._order[k] in host]
        count = sum(spec.bytes(size) for spec in through.block.specs)
        into = [host_heads[k] for k in packed]
        pick = _picker([self._order[k] for k in packed], len(heads))
        fills = [
            (tail, spec.pad)
            for tail, spec in zip(host_tails, through.block.specs, strict=True)
            if tail is not None and spec.pad != LAST
        ]
        host_repeats = self._repeats(host_heads, host_tails, [k for k in self._repeating if k in packed])
        rest = self._host_rest(heads, tails, packed)
        padded = through.padded
        to_device, filled, mark = self._block.memory[:count].copy_, through.block.memory[:count], (size, n)

        def step(given: Sequence[torch.Tensor]) -> None:
            before, padded[0] = padded[0], None  # an error or an interrupt in between leaves it unknown
            if len(into) == 1:
                into[0].copy_(pick(given)[0])
            elif into:
                torch._foreach_copy_(into, pick(given))
            if before is not mark and (before is None or before[0] != size or n < before[1]):
                for tail, pad in fills:
                    tail.fill_(pad)
            padded[0] = mark
            if host_repeats:
                _repeat(host_repeats)
            to_device(filled, non_blocking=True)
            if rest is not None:
                rest(given)

        return remember(through.steps, (size, n, host), step)

    def _host_rest(
        self, heads: Sequence[torch.Tensor], tails: Sequence[torch.Tensor | None], packed: Sequence[int]
    ) -> Step | None:
        """What stages the inputs that are not packed, and pads on the device; None where there is nothing to do."""
        alone = [(heads[k], self._order[k]) for k in range(len(heads)) if k not in packed]
        pads = [
            (tail, self._padding(k, tail)) for k, tail in enumerate(tails) if tail is not None and k >= self._packed
        ]
        repeats = self._repeats(heads, tails, [k for k in self._repeating if k not in packed])
        if not (alone or pads or repeats):
            return None

        def rest(given: Sequence[torch.Tensor]) -> None:
            for head, k in alone:
                head.copy_(given[k])
            for tail, pad in pads:
                tail.copy_(pad)
            _repeat(repeats)

        return rest

    def _repeats(
        self, heads: Sequence[torch.Tensor], tails: Sequence[torch.Tensor | None], which: Sequence[int]
    ) -> list[Repeat]:
        """What repeats the last row of inputs, whose place in ``heads`` is in ``which``, behind it."""
        found: list[Repeat] = []
        for k in which:
            head, tail, dim = heads[k], tails[k], self._specs[k].dim
            if tail is not None:
                rows = head.shape[dim]
                found.append((tail, head.narrow(dim, rows - 1, 1).expand_as(tail) if rows else None))
        return found

    def _padding(self, k: int, tail: torch.Tensor) -> torch.Tensor:
        dim = self._specs[k].dim
        return self._pads[k].narrow(dim, 0, tail.shape[dim])

    def _apart(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, or a copy of it where it lies in our block: the staging of another input may overwrite it."""
        return value.clone() if self.holds(value) else value

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the device lies in our block."""
        return tensor.layout is torch.strided and self._span[0] <= tensor.data_ptr() < self._span[1]


def _repeat(repeats: list[Repeat]) -> None:
    for tail, last in repeats:
        if last is None:
            tail.zero_()
        else:
            tail.copy_(last)


def _picker(places: list[int], of: int) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """What picks these places out of ``of`` values."""
    if places == list(range(of)):
        return lambda given: given
    if len(places) == 1:
        place = places[0]
        return lambda given: (given[place],)
    return operator.itemgetter(*places) if places else lambda given: ()
