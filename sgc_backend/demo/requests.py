"""A request on its way through the engine, and the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

#: One row of a batch on the host: token, position, slot, row of the block tables.
Row = tuple[int, int, int, int]
#: A row that touches no slot and sees no key.
PADDING: Row = (0, 0, -1, -1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue greedily by ``max_new_tokens`` bytes; both must be at least one byte long."""

    prompt: bytes
    max_new_tokens: int


@dataclass(kw_only=True)
class Counters:
    """What an engine has done since it was made. Tokens are rows that went through the model, without padding."""

    prefill_calls: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    finished: int = 0


@dataclass(eq=False)
class Running:
    """An admitted request: the cache blocks that it holds, in order, and what it has generated."""

    ticket: int
    request: Request
    blocks: list[int]
    generated: bytearray = field(default_factory=bytearray)

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.request.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that it still lacks."""
        return self.request.max_new_tokens - len(self.generated)

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation so far; the last one hasn't been through the model yet."""
        return len(self.request.prompt) + len(self.generated)

    def last(self, count: int) -> bytes:
        """The newest tokens of prompt and continuation."""
        return (self.request.prompt + self.generated)[-count:]

    def slot(self, position: int, block_size: int) -> int:
        """The cache slot of a position of this request."""
        return self.blocks[position // block_size] * block_size + position % block_size
