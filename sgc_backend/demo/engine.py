"""The demo's serving loop: continuous batching over a paged cache, with two hooks for whoever makes it fast.

Shapes: T tokens of a prefill batch, padded to a bucket; b rows of a decode batch, padded to a bucket; R =
max_requests; NB blocks in a request's table; E hidden; V vocab.

A step admits waiting requests while a row, cache blocks and room in the largest prefill bucket are left,
prefills them in one ragged batch, then decodes one token for every running request. A running request is
one row of the decode batch and of the block tables; when one leaves, the last row moves into its place, so
that rows 0..n-1 are always the running ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgc_backend.demo.allocator import BlockAllocator
from sgc_backend.demo.inputs import PrefillInputs, Row, TokenBuffers
from sgc_backend.demo.model import Decoder
from sgc_backend.demo.requests import Counters, Request, Running


@dataclass(frozen=True, eq=False)
class DecodeForward:
    """One decode bucket as a callable without arguments: logits [b, V] from inputs whose addresses never
    change.
    """

    model: Decoder
    inputs: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        return self.model.logits(self.model(*self.inputs))


class Engine:
    """Greedy generation for many requests at once.

    model: its caches are allocated (or zeroed) here, and belong to the newest engine: use one engine per
    model at a time. max_requests: rows of the largest decode batch. prefill_sizes, decode_sizes: the
    buckets, in tokens and in requests; the largest decode size must be at least max_requests. block_size:
    tokens per cache block. max_context: tokens that prompt and continuation of one request may have
    together, at most the model's max_positions. num_blocks: cache blocks; default: enough for max_requests
    requests of max_context.

    The hooks may also be set after construction, as attributes of the same name, and default to eager:
    ``prefill(batch: PrefillInputs) -> hidden [T, E]``, for example ``lambda batch:
    compiled(*batch.model_args)``; ``decode(b: int) -> logits [b, V]``, which should do what
    ``decode_forward(b)()`` does, for example replay a recording of it. A returned tensor is read before the
    hook is called again, so it may be static.

    Raises ValueError for sizes that don't fit together.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_requests: int = 8,
        prefill: Callable[[PrefillInputs], Tensor] | None = None,
        decode: Callable[[int], Tensor] | None = None,
        prefill_sizes: Sequence[int] = (16, 32, 64, 128, 256, 512),
        decode_sizes: Sequence[int] = (1, 2, 4, 8),
        block_size: int = 16,
        max_context: int = 512,
        num_blocks: int | None = None,
    ) -> None:
        self.prefill_sizes, self.decode_sizes = sorted(set(prefill_sizes)), sorted(set(decode_sizes))
        if min(self.prefill_sizes, default=0) < 1 or min(self.decode_sizes, default=0) < 1:
            raise ValueError(f"bucket sizes must be positive, got prefill {prefill_sizes} and decode {decode_sizes}")
        if not 1 <= max_requests <= self.decode_sizes[-1]:
            raise ValueError(
                f"max_requests must be between 1 and the largest decode size, got {max_requests} and "
                f"{self.decode_sizes[-1]}; add a larger decode size"
            )
        if not 1 <= max_context <= model.config.max_positions:
            raise ValueError(f"max_context must be between 1 and {model.config.max_positions}, got {max_context}")
        self.model = model
        self.max_requests = max_requests
        self.max_context = max_context
        table_length = -(-max_context // block_size)
        self.allocator = BlockAllocator(max_requests * table_length if num_blocks is None else num_blocks, block_size)
        model.allocate_cache(self.allocator.num_blocks, block_size)

        device = model.embedding.weight.device
        self._tables = torch.zeros(max_requests, table_length, dtype=torch.int32, device=device)
        self._prefill_buffers = TokenBuffers(self.prefill_sizes[-1], device)
        self._decode_buffers = TokenBuffers(self.decode_sizes[-1], device)
        self._decode_forwards = {b: self._make_decode_forward(b) for b in self.decode_sizes}
        self.prefill = prefill or (lambda batch: self.model(*batch.model_args))
        self.decode = decode or (lambda b: self._decode_forwards[b]())

        self.counters = Counters()
        self._tickets = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[Running] = []
        self._finished: dict[int, bytes] = {}

    # ---- what the hooks are made from

    def decode_forward(self, b: int) -> DecodeForward:
        """The decode step of bucket b, a callable without arguments: logits [b, V] of the first b rows of
        the engine's own input buffers, whose addresses never change. It may be run and recorded at any time
        between steps: the rows are padding at first, and running a step again writes the same values again.
        The same object for the same b. Raises ValueError when b isn't a decode size."""
        if b not in self._decode_forwards:
            raise ValueError(f"{b} is not a decode size; it must be one of {self.decode_sizes}")
        return self._decode_forwards[b]

    def prefill_inputs(self, size: int) -> PrefillInputs:
        """A batch of padding rows only, of a prefill size: for warming up and for recording. Writes to no
        real slot.
        """
        if size not in self.prefill_sizes:
            raise ValueError(f"{size} is not a prefill size; it must be one of {self.prefill_sizes}")
        return self._prefill_batch([], size, [0])

    def _make_decode_forward(self, b: int) -> DecodeForward:
        return DecodeForward(self.model, (*self._decode_buffers.sliced(b), self._tables[:b]))

    # ---- requests

    def submit(self, request: Request) -> int:
        """Queue a request; its ticket, by which ``step`` names it. Raises ValueError when it could never be
        served.
        """
        prompt, new = len(request.prompt), request.max_new_tokens
        if prompt < 1 or new < 1:
            raise ValueError(f"a request needs a prompt and a token to make, got {prompt} bytes and {new} new tokens")
        if prompt > self.prefill_sizes[-1]:
            raise ValueError(
                f"the prompt has {prompt} tokens, the largest prefill size is {self.prefill_sizes[-1]}; "
                "shorten it or add a larger prefill size"
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
    # outside of it, and whatever a hook records here may be replayed anywhere.
    @torch.no_grad()
    def step(self) -> dict[int, bytes]:
        """One turn of the loop: admit and prefill, then decode. What finished in it, by ticket."""
        # Kept until both phases have worked: a hook that raises in decode must not lose what prefill finished.
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
            for position, token in enumerate(running.request.prompt):
                rows.append((token, position, running.slot(position, self.allocator.block_size), index))
            last_rows.append(len(rows) - 1)
        self._write_tables()
        batch = self._prefill_batch(rows, _bucket(self.prefill_sizes, len(rows)), last_rows)
        try:
            hidden_TE = self.prefill(batch)
        except BaseException:
            # A hook may refuse. Back to the head of the queue, as if these had never been admitted.
            del self._running[first:]
            for running in reversed(admitted):
                self.allocator.free(running.blocks)
                self._waiting.appendleft((running.ticket, running.request))
            self._write_tables()
            raise
        self._append(admitted, self.model.logits(hidden_TE[batch.last_rows]))
        self.counters.prefill_calls += 1
        self.counters.prefill_tokens += len(rows)
        self.counters.prefill_padding += len(batch.tokens) - len(rows)
        return self._leave()

    def _decode_step(self) -> dict[int, bytes]:
        n = len(self._running)
        if not n:
            return {}
        rows: list[Row] = []
        for index, running in enumerate(self._running):
            position = running.next_position
            rows.append((running.generated[-1], position, running.slot(position, self.allocator.block_size), index))
        b = _bucket(self.decode_sizes, n)
        self._decode_buffers.fill(rows)
        self._append(self._running, self.decode(b)[:n])
        self.counters.decode_steps += 1
        self.counters.decode_tokens += n
        self.counters.decode_padding += b - n
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
            if tokens > self.prefill_sizes[-1] or needed > self.allocator.available:
                break
            self._waiting.popleft()
            admitted.append(Running(ticket, request, self.allocator.allocate(needed)))
        return admitted

    def _append(self, running: Sequence[Running], logits_NV: Tensor) -> None:
        for one, token in zip(running, logits_NV.argmax(-1).tolist(), strict=True):
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
            # The rows no longer match the tables. Somebody may run decode_forward before the next step, to
            # record it, and it must not write to a slot of a request that lives on.
            self._decode_buffers.fill([])
        return finished

    # ---- rows, slots, tables

    def _prefill_batch(self, rows: Sequence[Row], size: int, last_rows: Sequence[int]) -> PrefillInputs:
        self._prefill_buffers.fill(rows)
        tokens, positions, slots, token_req = self._prefill_buffers.sliced(size)
        return PrefillInputs(
            tokens=tokens,
            positions=positions,
            slots=slots,
            token_req=token_req,
            block_tables=self._tables,
            num_tokens=len(rows),
            last_rows=torch.tensor(last_rows, device=tokens.device),
        )

    def _write_tables(self) -> None:
        host = torch.zeros(self._tables.shape, dtype=torch.int32)
        for index, running in enumerate(self._running):
            host[index, : len(running.blocks)] = torch.tensor(running.blocks, dtype=torch.int32)
        self._tables.copy_(host)

    def _blocks_for(self, request: Request) -> int:
        # The last token that is made is never fed back, so it needs no slot.
        return self.allocator.blocks_for(len(request.prompt) + request.max_new_tokens - 1)


def _bucket(sizes: Sequence[int], n: int) -> int:
    """The smallest size that holds n; sizes ascend and the last one does."""
    return next(size for size in sizes if size >= n)
