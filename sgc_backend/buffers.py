"""The input buffers that a runner owns: one block of memory, laid out anew for every bucket.

Buckets never replay at the same time, so their buffers share one block. In each bucket's layout the inputs lie one
behind the other without gaps, so that inputs that come from the host are packed into one pinned block with the same
layout and take one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .device import Device
from .errors import OptionError
from .rows import Rows

ALIGNMENT = 256  # bytes; what kernels may assume of a tensor that an allocator made
PACKED = 1 << 20  # bytes at the largest bucket beyond which an input is copied by itself
PINNED_BLOCKS = 4  # steps whose copies may still be on their way while the host fills the next
SLICES_REMEMBERED = 512  # numbers of rows whose views are kept
LAST = "last"  # pad value: the last real row's

# Where to copy, of which inputs, and where padding goes, from where.
Moves = tuple[list[torch.Tensor], list[int], list[torch.Tensor], list[torch.Tensor]]


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
        if isinstance(self.shape, (int, Rows)) or not isinstance(self.shape, Sequence):
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
        if self.pad == LAST:
            return
        wrong = not isinstance(self.pad, (int, float, complex))
        if not wrong:
            try:
                back = torch.full((1,), self.pad, dtype=self.dtype).item()
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


@dataclass(frozen=True)
class HostData:
    """A tensor that lies on the host. (On the emulated device its own tensors look the same.)"""

    tensor: torch.Tensor

    @staticmethod
    def of(value: Any, spec: InputSpec) -> HostData:
        """Of a tensor, a list of numbers, or a NumPy array.

        Raises:
            OptionError: it is something else, or fractions where the input's dtype has none.
        """
        listed = isinstance(value, (list, tuple, int, float))
        try:
            return HostData(_tensor_of(value, spec.dtype) if listed else torch.as_tensor(value))
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            kind = type(value).__name__
            raise OptionError(f"input {spec}: expected a tensor or numbers, got a {kind}: {error}") from None


def _tensor_of(numbers: Any, dtype: torch.dtype) -> torch.Tensor:
    """``numbers`` as ``dtype``; raises ValueError where it is of integers or bools and does not hold them."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.as_tensor(numbers, dtype=dtype)
    given = torch.as_tensor(numbers)
    if given.dtype is dtype:
        return given
    if given.dtype.is_floating_point and given.numel():
        raise ValueError("it holds floats")
    made = given.to(dtype) if not given.is_complex() else None
    if made is None or bool((made.to(given.dtype) != given).any()):
        raise ValueError(f"{dtype} does not hold {numbers!r:.200}")
    return made


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
        self._moves: dict[tuple[int, int], list[Moves]] = {}
        self._span = (memory.data_ptr(), memory.data_ptr() + total)
        self._pinned: list[tuple[_Block, Any]] = []
        self._next = 0
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

    def stage(self, size: int, n: int, given: Sequence[torch.Tensor | HostData]) -> None:
        """Copy the inputs (checked, in the order of the specs) into the bucket's buffers, and pad behind them."""
        if self.shared:
            given = [self._apart(value) for value in given]
        host = [k for k, where in enumerate(self._order) if type(given[where]) is HostData]
        if host:
            self._stage_with_host(size, n, [given[k] for k in self._order], host)
            return
        fresh = self.shared or self._padded is None or self._padded[0] != size or n < self._padded[1]
        self._padded = None  # an error in between leaves it unknown
        for heads, at, tails, pads in self._moves_of(size, n):
            if fresh and tails:
                torch._foreach_copy_([*heads, *tails], [*(given[k] for k in at), *pads])
            elif len(heads) == 1:
                heads[0].copy_(given[at[0]])
            else:
                torch._foreach_copy_(heads, [given[k] for k in at])
        for k in self._repeating:
            head, tail = (part[k] for part in self._block.slices(size, n))
            if tail is not None:
                _repeat_last(head, tail, self._specs[k])
        self._padded = (size, n)

    def _moves_of(self, size: int, n: int) -> list[Moves]:
        """For each dtype what to copy where, since one call copies all tensors of one dtype."""
        found = self._moves.get((size, n))
        if found is None:
            heads, tails = self._block.slices(size, n)
            found = []
            for members in self._by_dtype.values():
                padded = [k for k in members if tails[k] is not None]
                found.append(
                    (
                        [heads[k] for k in members],
                        [self._order[k] for k in members],
                        [tails[k] for k in padded],
                        [self._padding(k, tails[k]) for k in padded],
                    )
                )
            while len(self._moves) >= SLICES_REMEMBERED:
                del self._moves[next(iter(self._moves))]
            self._moves[size, n] = found
        return found

    def _stage_with_host(self, size: int, n: int, given: list[Any], host: list[int]) -> None:
        """`stage` where some inputs, those of ``host``, lie on the host; all are in the order of the block."""
        heads, tails = self._block.slices(size, n)
        self._padded = None
        self._stage_host(size, n, given, host, heads)
        for k, spec in enumerate(self._specs):
            if k not in host:
                heads[k].copy_(given[k])
            tail = tails[k]
            if tail is not None and k >= self._packed:  # else the packed copy had it
                tail.copy_(self._padding(k, tail))
            if spec.pad == LAST and tail is not None and not (k in host and k < self._packed):
                _repeat_last(heads[k], tail, spec)
        self._padded = (size, n)

    def _padding(self, k: int, tail: torch.Tensor) -> torch.Tensor:
        dim = self._specs[k].dim
        return self._pads[k].narrow(dim, 0, tail.shape[dim])

    def _apart(self, value: Any) -> Any:
        """``value``, or a copy of it where it lies in our block: the staging of another input may overwrite it."""
        return value.clone() if isinstance(value, torch.Tensor) and self.holds(value) else value

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the device lies in our block."""
        return tensor.layout is torch.strided and self._span[0] <= tensor.data_ptr() < self._span[1]

    def _stage_host(self, size: int, n: int, given: list[Any], host: list[int], into: list[torch.Tensor]) -> None:
        block, event = self._host_block()
        heads, tails = block.slices(size, n)
        for k in host:
            (heads[k] if k < self._packed else into[k]).copy_(given[k].tensor)
        for k, (tail, spec) in enumerate(zip(tails, block.specs, strict=True)):
            if tail is None:
                continue
            if spec.pad != LAST:
                tail.fill_(spec.pad)
            elif k in host:
                _repeat_last(heads[k], tail, spec)
        count = sum(spec.bytes(size) for spec in block.specs)
        self._block.memory[:count].copy_(block.memory[:count], non_blocking=True)
        event.record(self.device.current_stream())

    def _host_block(self) -> tuple[_Block, Any]:
        """A pinned block whose last copy has been done."""
        if len(self._pinned) < PINNED_BLOCKS:
            specs = self._specs[: self._packed]
            memory = self.device.pinned(max(sum(spec.bytes(self.capacity) for spec in specs), 1))
            self._pinned.append((_Block(memory, specs), self.device.new_event()))
            return self._pinned[-1]
        self._next = (self._next + 1) % PINNED_BLOCKS
        block, event = self._pinned[self._next]
        event.synchronize()
        return block, event


def _repeat_last(head: torch.Tensor, tail: torch.Tensor, spec: InputSpec) -> None:
    dim = spec.dim
    if head.shape[dim]:
        tail.copy_(head.narrow(dim, head.shape[dim] - 1, 1).expand_as(tail))
    else:
        tail.zero_()
