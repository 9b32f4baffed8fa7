"""The demo's serving loop: continuous batching over a paged cache, with two callables for whoever makes it fast.

Shapes: n tokens of a prefill batch, or requests of a decode batch; R = max_requests; NB blocks in a request's table; E
hidden; V vocab.

A step admits waiting requests while a row, cache blocks and room in a prefill are left, prefills them in one ragged
batch, then decodes for every running request. The i-th running request owns row i of the block tables; when one leaves,
the last one moves into its place, so that rows 0 to the number that run are always the running ones.

The loop makes a batch's rows on the host and knows nothing of buckets, padding, buffers or the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sgc_backend.demo.allocator import BlockAllocator
from sgc_backend.demo.model import Decoder
from sgc_backend.demo.requests import Counters, Request, Row, Running


class Engine:
    """Greedy generation for many requests at once.

    ``prefill(tokens=, positions=, slots=, token_req=, block_tables=)`` gives the hidden states [n, E] of a ragged
    batch, ``decode`` with the same keywords the logits [n, V] of one token a request. Both get host tensors: tokens,
    positions and slots [n] int64, token_req [n] int32, and block_tables int32, [R, NB] for prefill and [n, NB] for
    decode; no padding. What they return is read before either is called again, so it may be static. They are
    attributes too, and may be set later.

    Args:
        model: its caches are allocated (or zeroed) here, and belong to the newest engine: one engine per model at a
            time.
        max_requests: how many may run at once.
        prefill, decode: see above; None: the model, eagerly.
        max_prefill: tokens of the largest prefill batch.
        block_size: tokens per cache block.
        max_context: tokens that prompt and continuation of one request may have together, at most the model's
            max_positions.
        num_blocks: cache blocks; None: enough for max_requests requests of max_context.

    Raises:
        ValueError: sizes that don't fit together.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_requests: int = 8,
        prefill: Callable[..., Tensor] | None = None,
        decode: Callable[..., Tensor] | None = None,
        max_prefill: int = 512,
        block_size: int = 16,
        max_context: int = 512,
        num_blocks: int | None = None,
    ) -> None:
        if max_requests < 1 or max_prefill < 1:
            raise ValueError(f"max_requests and max_prefill must be positive, got {max_requests} and {max_prefill}")
        if not 1 <= max_context <= model.config.max_positions:
            raise ValueError(f"max_context must be between 1 and {model.config.max_positions}, got {max_context}")
        self.model = model
        self.max_requests = max_requests
        self.max_prefill = max_prefill
        self.max_context = max_context
        table_length = -(-max_context // block_size)
        self.allocator = BlockAllocator(max_requests * table_length if num_blocks is None else num_blocks, block_size)
        model.allocate_cache(self.allocator.num_blocks, block_size)
        self.prefill = prefill or eagerly(model, model)
        self.decode = decode or eagerly(model, model.next_logits)

        self.counters = Counters()
        self._tables = torch.zeros(max_requests, table_length, dtype=torch.int32)
        self._tickets = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[Running] = []
        self._finished: dict[int, bytes] = {}

    @property
    def table_shape(self) -> tuple[int, int]:
        """(R, NB) of the block tables."""
        return tuple(self._tables.shape)

    # ---- requests

    def submit(self, request: Request) -> int:
        """Queue a request; its ticket, by which ``step`` names it. Raises ValueError when it could never be
        served.
        """
        prompt, new = len(request.prompt), request.max_new_tokens
        if prompt < 1 or new < 1:
            raise ValueError(f"a request needs a prompt and a token to make, got {prompt} bytes and {new} new tokens")
        if prompt > self.max_prefill:
            raise ValueError(
                f"the prompt has {prompt} tokens, max_prefill is {self.max_prefill}; shorten it or raise max_prefill"
            )
        if prompt + new > self.max_context:
            raise ValueError(
                f"prompt and continuation have {prompt} + {new} tokens, max_context is {self.max_context}; "
                "ask for less or raise max_context"
            )
        if self._blocks_for(request) > self.allocator.num_blocks:
            raise ValueError(
                f"the request needs {self._blocks_for(request)} cache blocks, there are "
                f"{self.allocator.num_blocks} in all; ask for less or give the engine more num_blocks"
            )
        self._tickets += 1
        self._waiting.append((self._tickets, request))
        return self._tickets

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting, running or yet to be handed out."""
        return not (self._waiting or self._running or self._finished)

    def run(self, requests: Iterable[Request]) -> list[bytes]:
        """Serve these requests (and whatever is already queued) to the end; their continuations, in order."""
        tickets = [self.submit(request) for request in requests]
        results: dict[int, bytes] = {}
        while not self.idle:
            results.update(self.step())
        return [results[ticket] for ticket in tickets]

    # no_grad and not inference_mode: tensors and generator state born under the latter can't be used
    # outside of it, and whatever prefill or decode record here may be replayed anywhere.
    @torch.no_grad()
    def step(self) -> dict[int, bytes]:
        """One turn of the loop: admit and prefill, then decode. What finished in it, by ticket."""
        # Kept until both phases have worked: an error in decode must not lose what prefill finished.
        self._finished |= self._prefill_step()
        self._finished |= self._decode_step()
        finished, self._finished = self._finished, {}
        self.counters.finished += len(finished)
        return finished

    # ---- the two phases

    def _prefill_step(self) -> dict[int, bytes]:
        admitted = self._admit()
        if not admitted:
            return {}
        first = len(self._running)
        self._running += admitted
        rows: list[Row] = []
        last_rows = []
        for index, running in enumerate(admitted, start=first):
            rows += [self._row(index, token, position) for position, token in enumerate(running.request.prompt)]
            last_rows.append(len(rows) - 1)
        self._write_tables()
        try:
            hidden_nE = self._prefill(rows)
        except BaseException:
            # It may refuse. Back to the head of the queue, as if these had never been admitted.
            del self._running[first:]
            for running in reversed(admitted):
                self.allocator.free(running.blocks)
                self._waiting.appendleft((running.ticket, running.request))
            self._write_tables()
            raise
        self._append(admitted, self.model.logits(hidden_nE[last_rows]))
        self.counters.prefill_calls += 1
        self.counters.prefill_tokens += len(rows)
        return self._leave()

    def _prefill(self, rows: Sequence[Row]) -> Tensor:
        return self.prefill(**self._batch(rows), block_tables=self._tables)

    def _decode_step(self) -> dict[int, bytes]:
        n = len(self._running)
        if not n:
            return {}
        rows = [self._row(i, one.generated[-1], one.length - 1) for i, one in enumerate(self._running)]
        self._append(self._running, self.decode(**self._batch(rows), block_tables=self._tables[:n]))
        self.counters.decode_steps += 1
        self.counters.decode_tokens += n
        return self._leave()

    def _admit(self) -> list[Running]:
        """Take requests off the queue, in order, while they fit. All blocks that a request can ever need
        are taken at once: nothing that runs has to be thrown out later."""
        admitted: list[Running] = []
        tokens = 0
        while self._waiting and len(self._running) + len(admitted) < self.max_requests:
            ticket, request = self._waiting[0]
            tokens += len(request.prompt)
            needed = self._blocks_for(request)
            if tokens > self.max_prefill or needed > self.allocator.available:
                break
            self._waiting.popleft()
            admitted.append(Running(ticket, request, self.allocator.allocate(needed)))
        return admitted

    def _append(self, running: Sequence[Running], logits_nV: Tensor) -> None:
        for one, token in zip(running, logits_nV.argmax(-1).tolist(), strict=True):
            one.generated.append(token)

    def _leave(self) -> dict[int, bytes]:
        finished = {}
        for index in reversed(range(len(self._running))):
            running = self._running[index]
            if running.done:
                self.allocator.free(running.blocks)
                finished[running.ticket] = bytes(running.generated)
                self._running[index] = self._running[-1]
                self._running.pop()
        if finished:
            self._write_tables()
        return finished

    # ---- rows, slots, tables

    def _row(self, index: int, token: int, position: int) -> Row:
        return token, position, self._running[index].slot(position, self.allocator.block_size), index

    def _batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        tokens, positions, slots, token_req = zip(*rows, strict=True)
        return {
            "tokens": torch.tensor(tokens),
            "positions": torch.tensor(positions),
            "slots": torch.tensor(slots),
            "token_req": torch.tensor(token_req, dtype=torch.int32),
        }

    def _write_tables(self) -> None:
        self._tables.zero_()
        for index, running in enumerate(self._running):
            self._tables[index, : len(running.blocks)] = torch.tensor(running.blocks, dtype=torch.int32)

    def _blocks_for(self, request: Request) -> int:
        # The last token that is made is never fed back, so it needs no slot.
        return self.allocator.blocks_for(len(request.prompt) + request.max_new_tokens - 1)


def eagerly(model: Decoder, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with its keyword tensors moved to the model's device first."""

    def call(**inputs: Tensor) -> Any:
        return fn(**{name: value.to(model.embedding.weight.device) for name, value in inputs.items()})

    return call
