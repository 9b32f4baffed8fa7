"""The input buffers that a runner owns: one block of memory, laid out anew for every bucket.

Buckets never replay at the same time, so their buffers share one block. In each bucket's layout the inputs lie one
behind the other without gaps, so that inputs that come from the host are packed into one pinned block with the same
layout and take one copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .device import Device
from .input_spec import LAST, InputSpec
from .pinned import GROUP, PinnedRing

PACKED = 1 << 20  # bytes at the largest bucket beyond which an input is copied by itself
SLICES_REMEMBERED = 512  # numbers of rows whose views are kept

Pick = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
# Where to copy, which of the inputs, and where padding goes, from where.
Moves = tuple[list[torch.Tensor], Pick, list[torch.Tensor], list[torch.Tensor]]
Repeat = tuple[torch.Tensor, torch.Tensor | None]  # what is filled with copies of which row; None: of zeros


class _Block:
    """Memory in the layouts of the buckets.

    Args:
        memory: uint8.
        specs: in the order in which they lie.
    """

    def __init__(self, memory: torch.Tensor, specs: Sequence[InputSpec]) -> None:
        self.memory, self.specs = memory, specs
        self._views: dict[int, list[torch.Tensor]] = {}
        self._slices: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor | None]]] = {}

    def views(self, size: int) -> list[torch.Tensor]:
        """The inputs for ``size`` rows; the same objects every time.

        Each has a storage of its own over its bytes: to a compiler it is a tensor, not a view into a larger one whose
        offset would be one more dynamic size.
        """
        found = self._views.get(size)
        if found is None:
            storage, start, found = self.memory.untyped_storage(), 0, []
            for spec in self.specs:
                count = spec.bytes(size)
                part = storage[start : start + count]
                with torch.inference_mode(False):
                    empty = torch.empty(0, dtype=spec.dtype, device=self.memory.device)
                    found.append(empty.set_(part, 0, spec.size(size)))
                start += count
            self._views[size] = found
        return found

    def slices(self, size: int, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """For each input the part that n rows fill, and the part behind it; None where there is nothing behind."""
        found = self._slices.get((size, n))
        if found is None:
            heads, tails = [], []
            for spec, view in zip(self.specs, self.views(size), strict=True):
                dim = spec.dim
                if dim is None or n == size:
                    heads.append(view)
                    tails.append(None)
                    continue
                split = spec.size(n)[dim]
                heads.append(view.narrow(dim, 0, split))
                tails.append(view.narrow(dim, split, view.shape[dim] - split))
            found = heads, tails
            while len(self._slices) >= SLICES_REMEMBERED:
                del self._slices[next(iter(self._slices))]
            self._slices[size, n] = found
        return found


@dataclass(frozen=True)
class _Plan:
    """How one number of rows is staged into a bucket from the device."""

    moves: list[Moves]
    repeats: list[Repeat]


@dataclass(frozen=True)
class _HostPlan:
    """How one number of rows is staged into a bucket where some inputs lie on the host.

    Attributes:
        heads, pick: where in the pinned block inputs go, and which.
        fills, host_repeats: padding in the pinned block.
        block, packed: the copy of the pinned block.
        alone: the inputs that are copied by themselves, and where they go.
        pads, repeats: padding on the device.
    """

    heads: list[torch.Tensor]
    pick: Pick
    fills: list[tuple[torch.Tensor, float]]
    host_repeats: list[Repeat]
    block: torch.Tensor
    packed: torch.Tensor
    alone: list[tuple[torch.Tensor, int]]
    pads: list[tuple[torch.Tensor, torch.Tensor]]
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
                torch.full(spec.size(capacity), 0 if spec.pad == LAST else spec.pad, dtype=spec.dtype)
                .to(device.torch_device)
                for spec in self._specs
            ]  # fmt: skip
        self._block = _Block(memory, self._specs)
        self._repeating = [k for k, spec in enumerate(self._specs) if spec.pad == LAST]
        self._plans: dict[tuple[int, int], _Plan] = {}
        self._span = (memory.data_ptr(), memory.data_ptr() + total)
        self._ring = PinnedRing(device, max(sum(spec.bytes(capacity) for spec in self._specs[: self._packed]), 1))
        self._host_blocks: dict[int, _Block] = {}  # by address
        self._host_plans: list[dict[Any, _HostPlan]] = [{} for _ in range(2 * GROUP)]  # of each block of the ring
        self._host_padded: list[tuple[int, int] | None] = [None] * (2 * GROUP)  # as _padded, of each block
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
        fresh = self.shared or self._padded is None or self._padded[0] != size or n < self._padded[1]
        self._padded = None  # an error in between leaves it unknown
        if host:
            self._stage_host(size, n, given, host)
        else:
            plan = self._plans.get((size, n)) or self._plan(size, n)
            for heads, pick, tails, pads in plan.moves:
                picked = pick(given)
                if fresh and tails:
                    torch._foreach_copy_([*heads, *tails], [*picked, *pads])
                elif len(heads) == 1:
                    heads[0].copy_(picked[0])
                else:
                    torch._foreach_copy_(heads, picked)
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
        return _remember(self._plans, (size, n), _Plan(moves, self._repeats(heads, tails, self._repeating)))

    def _stage_host(self, size: int, n: int, given: Sequence[torch.Tensor], host: tuple[int, ...]) -> None:
        number, memory = self._ring.take()
        plans = self._host_plans[number]
        plan = plans.get((size, n, host)) or self._host_plan(plans, memory, size, n, host)
        if plan.heads:
            if len(plan.heads) == 1:
                plan.heads[0].copy_(plan.pick(given)[0])
            else:
                torch._foreach_copy_(plan.heads, plan.pick(given))
        padded = self._host_padded[number]
        if padded is None or padded[0] != size or n < padded[1]:
            for tail, pad in plan.fills:
                tail.fill_(pad)
        _repeat(plan.host_repeats)
        self._host_padded[number] = (size, n)
        plan.block.copy_(plan.packed, non_blocking=True)
        for head, k in plan.alone:
            head.copy_(given[k])
        for tail, pads in plan.pads:
            tail.copy_(pads)
        _repeat(plan.repeats)

    def _host_plan(
        self, plans: dict[Any, _HostPlan], memory: torch.Tensor, size: int, n: int, host: tuple[int, ...]
    ) -> _HostPlan:
        """What to copy where when the inputs of ``host`` lie on the host and come through this pinned memory."""
        heads, tails = self._block.slices(size, n)
        block = self._host_blocks.setdefault(memory.data_ptr(), _Block(memory, self._specs[: self._packed]))
        host_heads, host_tails = block.slices(size, n)
        through = [k for k in range(self._packed) if self._order[k] in host]
        count = sum(spec.bytes(size) for spec in block.specs)
        repeating = [k for k in self._repeating if k in through]
        plan = _HostPlan(
            heads=[host_heads[k] for k in through],
            pick=_picker([self._order[k] for k in through], len(heads)),
            fills=[
                (tail, spec.pad)
                for tail, spec in zip(host_tails, block.specs, strict=True)
                if tail is not None and spec.pad != LAST
            ],
            host_repeats=self._repeats(host_heads, host_tails, repeating),
            block=self._block.memory[:count],
            packed=memory[:count],
            alone=[(heads[k], self._order[k]) for k in range(len(heads)) if k not in through],
            pads=[
                (tails[k], self._padding(k, tails[k])) for k in range(self._packed, len(heads)) if tails[k] is not None
            ],
            repeats=self._repeats(heads, tails, [k for k in self._repeating if k not in through]),
        )
        return _remember(plans, (size, n, host), plan)

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


def _remember(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    while len(plans) >= SLICES_REMEMBERED:
        del plans[next(iter(plans))]
    plans[key] = plan
    return plan
