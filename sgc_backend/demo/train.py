"""Train the demo's weights: ``python -m sgc_backend.demo.train [--minutes M] [--out FILE]``.

The text is the help on the language that ships with every CPython (``pydoc_data.topics``, about 460 kB),
read as bytes: nothing is downloaded. Two idle CPU cores need about five minutes. The result depends on the Python
version's text, the number of threads and, with --minutes, the machine; the seed is fixed.

The loss also reads layer 2 through the final norm and the head, so that the first two layers alone are a
usable draft for speculative decoding; the price is one more head product.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgc_backend.demo.model import WEIGHTS, Decoder, DecoderConfig, save

SEED = 0
SEQUENCE = 384  # bytes
SHORT_SEQUENCE = 128  # in the first part of the run: spelling needs no context, and short attention is cheap
SHORT_PART = 0.6  # fraction of the run, as WARMUP and COOLDOWN are
TOKENS = 2304  # bytes a step, in sequences of either length
STEPS = 1200
DRAFT_LAYERS = 2
DRAFT_WEIGHT = 0.3
WARMUP = 0.02
COOLDOWN = 0.6
MATRIX_RATE = 0.02
OTHER_RATE = 0.004


def corpus() -> tuple[Tensor, Tensor]:
    """The training and the validation text, uint8 each.

    Every 25th group of eight paragraphs goes to validation, less the paragraphs that training sees elsewhere:
    topics repeat whole sections of each other, and a loss on text learnt by heart would say nothing.
    """
    paragraphs = "\n\n\n".join(topics.values()).split("\n\n")
    chunks = ["\n\n".join(paragraphs[i : i + 8]) for i in range(0, len(paragraphs), 8)]
    held_out = chunks[::25]
    train = "\n\n".join(chunk for i, chunk in enumerate(chunks) if i % 25)
    valid = "\n\n".join(p for chunk in held_out for p in chunk.split("\n\n") if p not in train)
    as_tensor = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for text in (train, valid)]
    return as_tensor[0], as_tensor[1]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Newton-Schulz iteration), for 2-d weights between hidden
    layers.

    torch.optim.Muon iterates in bfloat16, for which most CPUs have no fast product; this one stays in
    float32, and takes the matrices of one shape together.
    """

    def __init__(self, params: list[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                grads = torch.stack([p.grad for p in params])
                state = self.state[params[0]]
                average = state.setdefault("average", torch.zeros_like(grads))
                average.lerp_(grads, 1 - group["momentum"])
                update = _orthogonal(grads.lerp(average, group["momentum"]))
                # An orthogonal update has entries of about 1/sqrt(columns): a tall one moves its outputs
                # too little.
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, update, strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).sub_(u, alpha=rate)


def _orthogonal(x: Tensor) -> Tensor:
    """About the nearest orthogonal matrices to [N, rows, columns]: five steps of an odd quintic that drives
    every singular value towards 1. Its coefficients trade exactness near 1 for a steep slope at 0."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def losses(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean nats per byte of [B, S + 1] tokens, from the last layer and from layer DRAFT_LAYERS."""
    states = model.dense_states(tokens[:, :-1])
    target = tokens[:, 1:].flatten()
    return tuple(
        F.cross_entropy(model.logits(model.final_norm(state)).flatten(0, 1), target)
        for state in (states[-1], states[DRAFT_LAYERS - 1])
    )


@torch.no_grad()
def validate(model: Decoder, valid: Tensor) -> tuple[float, float]:
    """The losses over the whole validation text, cut into sequences."""
    rows = (len(valid) - 1) // SEQUENCE
    tokens = valid[: rows * SEQUENCE + 1].long().unfold(0, SEQUENCE + 1, SEQUENCE)
    full, draft = losses(model, tokens)
    return full.item(), draft.item()


def train(*, minutes: float | None = None, steps: int = STEPS, seed: int = SEED) -> Decoder:
    """Train from scratch for that many steps, or for as many as fit in the minutes; prints the losses."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    text, valid = corpus()
    model = Decoder(DecoderConfig())
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    optimizers = [
        Muon(matrices, lr=MATRIX_RATE, decay=0.2),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(text):,} bytes, {len(valid):,} held out", flush=True)
    began = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1:
        rate = min(1.0, progress / WARMUP + 0.01, (1 - progress) / COOLDOWN)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        length = SHORT_SEQUENCE if progress < SHORT_PART else SEQUENCE
        starts = torch.randint(len(text) - length - 1, (TOKENS // length, 1), generator=generator)
        full, draft = losses(model, text[starts + torch.arange(length + 1)].long())
        (full + DRAFT_WEIGHT * draft).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        elapsed = time.monotonic() - began
        progress = step / steps if minutes is None else elapsed / (60 * minutes)
        if not math.isfinite(full.item()):
            raise RuntimeError(f"the loss became {full.item()} at step {step}; lower MATRIX_RATE or OTHER_RATE")
        if step % 200 == 0 or progress >= 1:
            valid_full, valid_draft = validate(model, valid)
            print(
                f"step {step:5d}  {elapsed:5.0f} s  train {full.item():.3f}  "
                f"valid {valid_full:.3f}  valid, first {DRAFT_LAYERS} layers {valid_draft:.3f} nats/byte",
                flush=True,
            )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgc_backend.demo.train", description="Train the demo's weights.")
    parser.add_argument(
        "--minutes", type=float, help="stop after about this long, instead of after a fixed number of steps"
    )
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where the weights go (default: into the package)")
    arguments = parser.parse_args()
    model = train(minutes=arguments.minutes)
    save(model, arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
