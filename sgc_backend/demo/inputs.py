"""What a batch looks like to the model: the prefill inputs, and the decode buffers that an engine owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Device vectors tokens, positions, slots (int64) and token_req (int32) of ``size`` rows, at fixed
    addresses.

    Four tensors and not one packed tensor with four views: a view's storage offset would become one more
    symbolic input of a graph compiled with dynamic=True.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        dtypes = (torch.int64, torch.int64, torch.int64, torch.int32)
        self._device = [torch.zeros(size, dtype=dtype, device=device) for dtype in dtypes]
        self.fill([])

    def fill(self, rows: Sequence[Row]) -> None:
        """Write the rows, at most ``size``, and padding into all that follow."""
        padding = [_PADDING] * (self.size - len(rows))
        columns = zip(*rows, *padding, strict=True)
        for column, target in zip(columns, self._device, strict=True):
            target.copy_(torch.tensor(column, dtype=target.dtype))

    def sliced(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, positions, slots and token_req, views of the first n rows, which keep their address for
        good.
        """
        tokens, positions, slots, token_req = (column[:n] for column in self._device)
        return tokens, positions, slots, token_req
