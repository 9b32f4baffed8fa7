"""Speculative decoding: a small draft model guesses tokens, the target checks all guesses of a step at once.

Shapes: n requests; k = draft_tokens; NB blocks in a request's table; V vocab. F: tokens of a request at its end, prompt
and continuation; L: how many there are so far.

Each step starts with L tokens, of which the last has been through neither model. The draft guesses tokens L to L+k-1,
the target runs on token L-1 and the guesses, and what it predicts is the truth: guesses are kept up to the first wrong
one, and the target's own token follows them. Every kept token is what the target alone would have chosen, so the draft
decides about speed only. (Up to rounding: the target sees other batch sizes than alone, and two scores may tie.)

What the caches hold for guesses that were wrong is never read: a position's key is written again, by the step that
processes its true token, before any later position looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgc_backend import ROWS, DecodeRunner, InputSpec

from . import serve
from .engine import Engine, eagerly
from .findings import Findings, tokens_per_second
from .model import Decoder, load
from .requests import PADDING, Counters, Row

DRAFT_LAYERS = 2
DRAFT_TOKENS = 3
MAX_RATIO = 1.05  # of all phases in one pool to the largest alone


@dataclass(kw_only=True)
class SpeculativeCounters(Counters):
    """Of guesses: ``verified`` counts the requests of each verifying step, ``guessed`` and ``accepted`` the tokens that
    could have been and were of use.
    """

    verified: int = 0
    guessed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Of the guesses, how many were right."""
        return self.accepted / max(self.guessed, 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gets from one run of the target; 1 without guesses."""
        return 1 + self.accepted / max(self.verified, 1)


class SpeculativeEngine(Engine):
    """An `Engine` that decodes up to ``draft_tokens`` + 1 tokens a step; what it makes is the same.

    Next to ``prefill`` and ``decode`` there are three more callables, attributes that may be set: ``draft_prefill``,
    the draft's prefill, whose result nobody reads; ``propose``, see `proposer`, whose result must not be static;
    ``verify``, as ``decode`` with k + 1 rows a request, those of one request together, to logits [n * (k + 1), V]. Its
    tokens are where ``propose`` left them, and rows of both may be padding (token 0, position 0, slot -1, token_req -1)
    anywhere. ``decode`` runs where each request lacks one token.

    Args:
        model: the target.
        draft: another model over the same tokens; its caches are this engine's too, and share the block tables.
        draft_tokens: k, at least 1.
        options: of `Engine`.

    Raises:
        ValueError: models or sizes that don't fit together.
    """

    counters: SpeculativeCounters

    def __init__(self, model: Decoder, draft: Decoder, *, draft_tokens: int = DRAFT_TOKENS, **options: Any) -> None:
        super().__init__(model, **options)
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens must be positive, got {draft_tokens}")
        if draft is model:
            raise ValueError("the draft must be another Decoder than the target: each has caches of its own")
        if draft.config.vocab != model.config.vocab or draft.config.max_positions < self.max_context:
            raise ValueError(
                f"the draft must have the target's vocab {model.config.vocab} and at least {self.max_context} "
                f"positions, got {draft.config.vocab} and {draft.config.max_positions}"
            )
        draft.allocate_cache(self.allocator.num_blocks, self.allocator.block_size)
        self.draft, self.draft_tokens = draft, draft_tokens
        self.draft_prefill = eagerly(draft, draft)
        self.propose = eagerly(draft, proposer(draft, draft_tokens))
        self.verify = eagerly(model, model.next_logits)
        self.counters = SpeculativeCounters()

    def _prefill(self, rows: Sequence[Row]) -> Tensor:
        # The draft first: what the target returns may be static, valid until the next replay.
        self.draft_prefill(**self._batch(rows), block_tables=self._tables)
        return super()._prefill(rows)

    def _decode_step(self) -> dict[int, bytes]:
        if all(one.left == 1 for one in self._running):
            return super()._decode_step()
        n, k = len(self._running), self.draft_tokens
        tables = self._tables[:n]
        batch = self._batch(self._guess_rows(first=-2))
        batch["tokens"] = torch.tensor([token for one in self._running for token in one.last(2)])
        proposed_nk = self.propose(**batch, block_tables=tables)
        batch = self._batch(self._guess_rows(first=-1))
        batch["tokens"] = proposed_nk.flatten()
        best_nk = self.verify(**batch, block_tables=tables).argmax(-1).view(n, k + 1)
        # Both at once: the host waits for the device once a step.
        for one, guesses, best in zip(self._running, *torch.stack((proposed_nk, best_nk)).tolist(), strict=True):
            useful = min(k, one.left - 1)
            accepted = 0
            while accepted < useful and guesses[accepted + 1] == best[accepted]:
                accepted += 1
            one.generated += bytes(best[: accepted + 1])
            self.counters.guessed += useful
            self.counters.accepted += accepted
            self.counters.decode_tokens += accepted + 1
        self.counters.verified += n
        self.counters.decode_steps += 1
        return self._leave()

    def _guess_rows(self, first: int) -> list[Row]:
        """k + 1 rows a request, without tokens, at the positions from L + ``first`` on; padding from position F - 1 on:
        the last token has no slot.
        """
        return [
            self._row(index, 0, position) if position < one.length + one.left - 1 else PADDING
            for index, one in enumerate(self._running)
            for position in range(one.length + first, one.length + first + self.draft_tokens + 1)
        ]


def proposer(draft: Decoder, k: int) -> Callable[..., Tensor]:
    """All k steps of the draft as one callable: nothing waits for the host between them.

    It takes ``tokens`` [n * 2] int64, each request's last two; ``positions``, ``slots`` (int64) and ``token_req``
    (int32) of [n * (k + 1)] rows, k + 1 a request from the position of the last token but one; ``block_tables`` [n, NB]
    int32. It returns [n, k + 1] int64: the last token and the k guesses behind it, what the target is to run on.

    The draft begins with two tokens, because where all guesses were right, the last of them has not been through it.
    """

    def propose(
        tokens: Tensor, positions: Tensor, slots: Tensor, token_req: Tensor, block_tables: Tensor
    ) -> Tensor:  # fmt: skip
        n = block_tables.shape[0]
        columns = [rows.view(n, k + 1) for rows in (positions, slots, token_req)]
        hidden = draft(tokens, *(column[:, :2].flatten() for column in columns), block_tables)
        guesses = [tokens.view(n, 2)[:, 1], draft.logits(hidden.view(n, 2, -1)[:, 1]).argmax(-1)]
        for step in range(2, k + 1):
            rows = (column[:, step].contiguous() for column in columns)
            guesses.append(draft.next_logits(guesses[-1], *rows, block_tables).argmax(-1))
        return torch.stack(guesses, 1)

    return propose


def propose_runner(draft: Decoder, k: int, tables: tuple[int, int], **options: Any) -> DecodeRunner:
    """The draft's steps as one full graph per batch size. Its result is read after the target's replay: a clone."""
    specs = serve.input_specs(ROWS * (k + 1), ROWS, tables[1])
    specs[0] = InputSpec("tokens", (ROWS * 2,), torch.int64)
    return DecodeRunner(proposer(draft, k), specs, sizes=serve.DECODE_SIZES, name="draft", **options)


def run_speculative_demo(
    *, device: str | None = None, inner: str | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Serve with guesses, and check that the output is the target's own and what five phases in one pool take.

    Returns what was found; ``"failed"`` lists the checks that did not hold. Arguments: `Findings`.
    """
    found = Findings(device, inner, say)
    expected = serve.engine_for(load(found.where)).run(serve.requests())
    model, draft, k = load(found.where), load(found.where, layers=DRAFT_LAYERS), DRAFT_TOKENS
    alone = serve.engine_for(model)
    engine = SpeculativeEngine(
        model, draft, draft_tokens=k, max_requests=alone.max_requests, max_prefill=alone.max_prefill
    )
    tables, common = engine.table_shape, {"device_module": found.module}
    compiling = {"options": {"inner": found.inner}, **common}
    prefill = serve.prefill_runner(model, tables, **compiling)
    draft_prefill = serve.prefill_runner(draft, tables, name="draft prefill", **compiling)
    verify = serve.decode_runner(model, tables, tokens=k + 1, name="verify", **common)
    propose = propose_runner(draft, k, tables, **common)
    decode = serve.decode_runner(model, tables, **common)
    alone.prefill, alone.decode = prefill, decode
    engine.prefill, engine.decode, engine.draft_prefill = prefill, decode, draft_prefill
    engine.propose, engine.verify = propose, verify
    phases = [prefill, draft_prefill, verify, propose, decode]
    found.measure_memory(phases, "all shared", MAX_RATIO, any_order=True)

    captured = alone.run(serve.requests())
    outputs = engine.run(serve.requests())
    counters, plain = engine.counters, alone.counters
    serve.tell_served(found, engine, outputs)
    found.check("every token equals the target's alone, captured", outputs == captured)
    found.check("every token equals the target's alone, eager", outputs == expected)
    steps = counters.decode_steps
    verified = sum(verify.counters.replayed.values())
    found.check_replayed(
        {
            prefill: counters.prefill_calls + plain.prefill_calls,
            draft_prefill: counters.prefill_calls,
            verify: verified,
            propose: verified,
            decode: plain.decode_steps + steps - verified,
        }
    )
    found.result["acceptance"] = counters.acceptance
    found.result["tokens per target step"] = counters.tokens_per_step
    say(f"\n{DRAFT_LAYERS} of {model.config.layers} layers guess {k} tokens a step:")
    say(f"  guesses accepted         {counters.acceptance:8.1%}")
    say(f"  tokens per target step   {counters.tokens_per_step:8.2f} a request")
    say(f"  target steps             {steps:8} instead of {plain.decode_steps}")
    found.check("guesses were accepted and refused", 0 < counters.accepted < counters.guessed)
    if found.on_gpu:
        speed = {
            "target alone tokens/s": tokens_per_second(alone, serve.requests()),
            "speculative tokens/s": tokens_per_second(engine, serve.requests()),
        }
        slow, fast = speed.values()
        found.tell_speed(speed | {"speculative / alone": fast / slow})
    return found.finish(phases)
