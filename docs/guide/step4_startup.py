"""Step 4: everything is recorded in one capture session when the engine starts, the largest first, and reported."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sgc_backend
from sgc_backend import ROWS, DecodeRunner, InputSpec, PrefillRunner

if not torch.cuda.is_available():
    os.environ["SGC_DEVICE"] = "emulated"  # records on the host, see step 6
DEVICE = "cpu" if os.environ.get("SGC_DEVICE") == "emulated" else "cuda"
VOCAB, HIDDEN, HEADS, LAYERS, MAX_REQUESTS, MAX_CONTEXT, STOP = 96, 64, 4, 2, 4, 32, 20
TRASH = MAX_REQUESTS  # the slot that padding rows write to; no request gets it
INNER = {"inner": "inductor" if DEVICE == "cuda" else "eager"}  # on the host it needs a C++ compiler
INPUTS = [
    InputSpec("tokens", (ROWS,), torch.int64),
    InputSpec("slots", (ROWS,), torch.int64, pad=TRASH),
    InputSpec("positions", (ROWS,), torch.int64),
]
PROMPTS = [[5, 17, 3], [11, 2, 90, 41, 7, 8, 66], [33], [4, 4, 71, 9, 25], [60, 1], [12, 80, 80, 6]]


@torch.library.custom_op("guide::attend", mutates_args=("out",))
def attend_op(q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    length = int(positions.max()) + 1  # no further than the longest request
    out.copy_(attend_over(length, q, k_cache, v_cache, slots, positions))


sgc_backend.register_attention("guide::attend")


def attend(q, k_cache, v_cache, slots, positions):
    out = torch.empty_like(q)
    attend_op(q, k_cache, v_cache, slots, positions, out)
    return out


def attend_all(q, k_cache, v_cache, slots, positions):
    return attend_over(MAX_CONTEXT, q, k_cache, v_cache, slots, positions)


def attend_over(length, q, k_cache, v_cache, slots, positions):
    k, v = k_cache[slots, :length], v_cache[slots, :length]
    scores = torch.einsum("thd,tchd->thc", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.arange(length, device=q.device) > positions[:, None, None], float("-inf"))
    return torch.einsum("thc,tchd->thd", scores.softmax(-1), v)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(MAX_REQUESTS + 1, MAX_CONTEXT, HEADS, HIDDEN // HEADS))

    def forward(self, x, slots, positions, attend):
        q, k, v = self.qkv(F.layer_norm(x, (HIDDEN,))).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
        self.k_cache[slots, positions] = k
        self.v_cache[slots, positions] = v
        x = x + self.out(attend(q, self.k_cache, self.v_cache, slots, positions).flatten(1))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (HIDDEN,)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(MAX_CONTEXT, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens, slots, positions, attend):  # one row for each token; its hidden state
        x = 0.1 * (self.tokens(tokens) + self.places(positions))
        for layer in self.layers:
            x = layer(x, slots, positions, attend)
        return x


class Engine:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Model().to(DEVICE)
        self.prefill_runner = PrefillRunner(self.prefill_step, INPUTS, sizes=[4, 8, 16, 32], options=INNER)
        self.decode_runner = DecodeRunner(self.decode_step, INPUTS, max_size=MAX_REQUESTS)
        with self.prefill_runner.capture_session(measure=True):
            self.prefill_runner.capture()
            self.decode_runner.capture()

    def prefill_step(self, tokens, slots, positions):
        return self.model(tokens, slots, positions, attend)

    def prefill(self, rows):
        tokens, slots, positions = zip(*rows, strict=True)
        return self.prefill_runner(tokens=tokens, slots=slots, positions=positions)

    def decode_step(self, tokens, slots, positions):
        return self.model.head(self.model(tokens, slots, positions, attend_all)).argmax(-1)

    def decode(self, rows):
        tokens, slots, positions = zip(*rows, strict=True)
        return self.decode_runner(tokens=tokens, slots=slots, positions=positions)

    @torch.no_grad()
    def serve(self, prompts):
        texts, waiting, free, running = [list(p) for p in prompts], [*range(len(prompts))], [*range(MAX_REQUESTS)], {}
        while waiting or running:
            joined = {waiting.pop(0): free.pop() for _ in range(min(len(waiting), len(free)))}
            if joined:  # all their prompts in one call
                rows = [(token, joined[r], place) for r in joined for place, token in enumerate(texts[r])]
                ends = [sum(len(texts[r]) for r in [*joined][: k + 1]) - 1 for k in range(len(joined))]
                append(texts, joined, self.model.head(self.prefill(rows)[ends]).argmax(-1))
                running |= joined
            append(texts, running, self.decode([(texts[r][-1], running[r], len(texts[r]) - 1) for r in running]))
            for r in [r for r in running if len(texts[r]) >= STOP]:
                free.append(running.pop(r))
        return [text[len(prompt) : STOP] for text, prompt in zip(texts, prompts, strict=True)]

    def report(self):
        return f"{sgc_backend.memory_report()}\n{sgc_backend.stats()}\n{self.prefill_runner.backend.explain()}"


def append(texts, requests, tokens):
    for r, token in zip(requests, tokens.tolist(), strict=True):
        texts[r].append(token)


if __name__ == "__main__":
    engine = Engine()
    for number, tokens in enumerate(engine.serve(PROMPTS)):
        print(f"request {number}:", *tokens)
    print(engine.report(), file=sys.stderr)
