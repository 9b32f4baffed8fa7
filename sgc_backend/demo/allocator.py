"""Hands out the blocks of the paged KV cache."""

from __future__ import annotations


class BlockAllocator:
    """The ids 0..num_blocks-1 of a cache's blocks, each ``block_size`` tokens; no tensors, only
    bookkeeping.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end, so that ids come out ascending first and the block freed last is reused first.
        self._free = list(reversed(range(num_blocks)))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks. Raises RuntimeError, and takes none, when fewer are free."""
        if count > len(self._free):
            raise RuntimeError(
                f"the KV cache is exhausted: {count} blocks of {self.block_size} tokens wanted, "
                f"{len(self._free)} of {self.num_blocks} free; wait for a request to leave, or give the engine "
                "more num_blocks"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Raises RuntimeError, and frees none, when one of them isn't held: it would be
        shared.
        """
        if len(set(blocks)) != len(blocks) or not self._taken.issuperset(blocks):
            raise RuntimeError(
                f"blocks {sorted(blocks)} aren't all held once each; free what allocate() returned, once"
            )
        self._taken.difference_update(blocks)
        self._free.extend(reversed(blocks))
