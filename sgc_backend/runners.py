"""PrefillRunner and DecodeRunner."""

from __future__ import annotations

from collections.abc import Sequence

from .config import auto_sizes, batch_sizes
from .runner import Runner


class PrefillRunner(Runner):
    """A runner for prefill: rows are tokens, recorded piecewise (or breakable), in steps of a quarter octave.

    The arguments are those of `Runner`; ``help(sgc_backend.Runner)`` tells them.
    """

    default_backend = "piecewise"

    def _auto(self, max_size: int) -> Sequence[int]:
        return (*(s for s in auto_sizes(max_size) if s < max_size), max_size)


class DecodeRunner(Runner):
    """A runner for decode: rows are requests, each bucket one full graph.

    Several tokens a request (speculative verification) are inputs of ``ROWS * k``. The arguments are those of `Runner`;
    ``help(sgc_backend.Runner)`` tells them.
    """

    default_backend = "full"

    def _auto(self, max_size: int) -> Sequence[int]:
        return batch_sizes(max_size)
