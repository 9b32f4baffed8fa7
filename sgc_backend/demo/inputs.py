"""What a batch looks like to the model: the prefill inputs, and the decode buffers that an engine owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of the packed buffer start at multiples of this many int64: 16-byte alignment is what kernels assume
# of an input.
_ROW_ALIGNMENT = 16

#: One row of a batch on the host: token, position, slot, row of the block tables.
Row = tuple[int, int, int, int]

_PADDING: Row = (0, 0, -1, -1)


@dataclass(frozen=True, kw_only=True)
class PrefillInputs:
    """The prompts of newly admitted requests, flattened to T tokens and padded up to a bucket.

    tokens, positions, slots: [T] int64. token_req: [T] int32. block_tables: [R, NB] int32, the engine's own
    buffer, R = max_requests. Padding rows, all at the end: token 0, position 0, slot -1, token_req -1.
    num_tokens: how many rows are real. last_rows: [N] int64, the row of each prompt's last token: the only
    hidden states that anyone reads.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    token_req: Tensor
    block_tables: Tensor
    num_tokens: int
    last_rows: Tensor

    @property
    def model_args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of ``Decoder.forward``, in order."""
        return self.tokens, self.positions, self.slots, self.token_req, self.block_tables


class TokenBuffers:
    """Device buffers of a fixed size and address for up to ``size`` rows, filled by one copy from the host.

    The four [size] vectors tokens, positions, slots (int64) and token_req (int32) live in one packed int64
    tensor, so that a step costs one transfer. ``sliced(n)`` gives views of the first n rows, which keep
    their address for good.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        stride = -(-size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self.size = size
        self._host = torch.zeros(4, stride, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(4, stride, dtype=torch.int64, device=device)
        # int32 in the front half of the last row: a view, not a cast, so that nothing runs on the device to
        # make it.
        self._host_req = self._host[3].view(torch.int32)[:stride]
        self._device_req = self._device[3].view(torch.int32)[:stride]
        self.fill([])

    def fill(self, rows: Sequence[Row]) -> None:
        """Write the rows, at most ``size``, and padding into all that follow."""
        padding = [_PADDING] * (self.size - len(rows))
        tokens, positions, slots, token_req = zip(*rows, *padding, strict=True)
        self._host[0, : self.size] = torch.tensor(tokens)
        self._host[1, : self.size] = torch.tensor(positions)
        self._host[2, : self.size] = torch.tensor(slots)
        self._host_req[: self.size] = torch.tensor(token_req, dtype=torch.int32)
        # Blocking on purpose: the host buffer is written again next step, perhaps before a queued copy
        # would have read it.
        self._device.copy_(self._host)

    def sliced(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, positions, slots and token_req, views of the first n rows."""
        return self._device[0, :n], self._device[1, :n], self._device[2, :n], self._device_req[:n]
