"""Step 5: strict, variants, verify steps of several tokens, other threads and streams, weights in place, clean-up."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sgc_backend
from sgc_backend import ROWS, DecodeRunner, InputSpec, PrefillRunner, emulated

if not torch.cuda.is_available():
    os.environ["SGC_DEVICE"] = "emulated"  # records on the host, see step 6
DEVICE, MODULE = ("cpu", emulated) if os.environ.get("SGC_DEVICE") == "emulated" else ("cuda", torch.cuda)
VOCAB, HIDDEN, HEADS, LAYERS, MAX_REQUESTS, MAX_CONTEXT, STOP = 96, 64, 4, 2, 4, 32, 20
DRAFT, ADAPTERS = 3, (None, "pirate")  # tokens a request in a verify step; None: the model without an adapter
TRASH = MAX_REQUESTS  # the slot that padding rows write to; no request gets it
INNER = {"inner": "inductor" if DEVICE == "cuda" else "eager"}  # on the host it needs a C++ compiler
INPUTS = [
    InputSpec("tokens", (ROWS,), torch.int64),
    InputSpec("slots", (ROWS,), torch.int64, pad=TRASH),
    InputSpec("positions", (ROWS,), torch.int64),
]
VERIFY_INPUTS = [InputSpec(i.name, (ROWS * DRAFT,), i.dtype, pad=i.pad) for i in INPUTS]
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
        self.adapters = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN) for name in ADAPTERS if name is not None})

    def forward(self, tokens, slots, positions, attend, adapter):  # one row for each token; its hidden state
        x = 0.1 * (self.tokens(tokens) + self.places(positions))
        if adapter is not None:
            x = x + self.adapters[adapter](x)
        for layer in self.layers:
            x = layer(x, slots, positions, attend)
        return x


class Engine:
    def __init__(self):
        torch.manual_seed(0)
        self.model = Model().to(DEVICE)
        both = {"variants": ADAPTERS, "strict": True}
        decode = both | {"max_size": MAX_REQUESTS}
        self.prefill_runner = PrefillRunner(self.prefill_step, INPUTS, sizes=[4, 8, 16, 32], options=INNER, **both)
        self.verify_runner = DecodeRunner(self.decode_step, VERIFY_INPUTS, name="VerifyRunner", **decode)
        self.decode_runner = DecodeRunner(self.decode_step, INPUTS, **decode)
        self.runners = self.verify_runner, self.prefill_runner, self.decode_runner  # memory_report says: largest first
        with self.verify_runner.capture_session():
            for runner in self.runners:
                runner.capture()

    def prefill_step(self, tokens, slots, positions, variant):
        return self.model(tokens, slots, positions, attend, variant)

    def decode_step(self, tokens, slots, positions, variant):
        return self.model.head(self.model(tokens, slots, positions, attend_all, variant)).argmax(-1)

    def run(self, runner, rows, adapter):
        tokens, slots, positions = zip(*rows, strict=True)
        return runner(tokens=tokens, slots=slots, positions=positions, variant=adapter)

    def ping(self):
        with MODULE.stream(MODULE.Stream()):
            return self.run(self.decode_runner, [(0, TRASH, 0)], None).item()

    @torch.no_grad()
    def load(self, weights):
        with self.decode_runner.replay_session():  # nobody replays with half of them
            MODULE.synchronize()
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
            MODULE.synchronize()

    def close(self):
        for runner in self.runners:
            runner.cleanup()

    @torch.no_grad()
    def serve(self, prompts, adapter=None):
        texts, waiting, free, running = [list(p) for p in prompts], [*range(len(prompts))], [*range(MAX_REQUESTS)], {}
        while waiting or running:
            joined = {waiting.pop(0): free.pop() for _ in range(min(len(waiting), len(free)))}
            if joined:  # all their prompts in one call
                rows = [(token, joined[r], place) for r in joined for place, token in enumerate(texts[r])]
                ends = [sum(len(texts[r]) for r in [*joined][: k + 1]) - 1 for k in range(len(joined))]
                hidden = self.run(self.prefill_runner, rows, adapter)
                append(texts, joined, self.model.head(hidden[ends]).argmax(-1))
                running |= joined
            drafts = {r: [texts[r][-1], *draft(texts[r])] for r in running}
            length = max(map(len, drafts.values()))  # 1 or DRAFT
            runner = self.decode_runner if length == 1 else self.verify_runner
            rows = [
                (token, running[r], len(texts[r]) - 1 + k)
                for r in running
                for k, token in enumerate((drafts[r] + [0] * DRAFT)[:length])
            ]
            answers = self.run(runner, rows, adapter).view(-1, length)
            for r, answer in zip(running, answers.tolist(), strict=True):
                right = [k for k in range(1, len(drafts[r])) if drafts[r][1 : k + 1] == answer[:k]]
                texts[r] += answer[: len(right) + 1]
            for r in [r for r in running if len(texts[r]) >= STOP]:
                free.append(running.pop(r))
        return [text[len(prompt) : STOP] for text, prompt in zip(texts, prompts, strict=True)]


def draft(text):
    """What followed the last time that the text had its last token; [] where it never had it, or too little did."""
    seen = [k for k in range(len(text) - DRAFT + 1) if text[k] == text[-1]]
    return text[seen[-1] + 1 : seen[-1] + DRAFT] if seen else []


def append(texts, requests, tokens):
    for r, token in zip(requests, tokens.tolist(), strict=True):
        texts[r].append(token)


if __name__ == "__main__":
    engine = Engine()
    weights = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    engine.load({name: torch.zeros_like(weight) for name, weight in weights.items()})
    assert engine.serve([[1]]) == [[0] * (STOP - 1)]
    engine.load(weights)
    with ThreadPoolExecutor(2) as threads:
        served, pings = threads.submit(engine.serve, PROMPTS), [threads.submit(engine.ping) for _ in range(20)]
    assert len({ping.result() for ping in pings}) == 1
    for number, tokens in enumerate(served.result()):
        print(f"request {number}:", *tokens)
    assert engine.serve(PROMPTS, adapter="pirate") != served.result()
    engine.close()
