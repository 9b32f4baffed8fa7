"""The demo: an engine served through the backend, checked token for token against eager, with what it cost.

What a user's engine looks like with us is in `runners` and `capture`; the rest measures and prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgc_backend import ROWS, DecodeRunner, InputSpec, PrefillRunner, Runner

from .engine import Engine
from .findings import Findings, tokens_per_second, wall
from .model import Decoder, load
from .prompts import PROMPTS
from .requests import Request

PREFILL_SIZES = (16, 32, 64, 128, 256, 512)
DECODE_SIZES = (1, 2, 4)
MAX_RATIO = 1.02  # of both phases in one pool to the larger phase alone


def input_specs(rows: Any, *block_tables: Any) -> list[InputSpec]:
    """What the model takes: ``rows`` tokens, and tables of that shape. Padding rows touch nothing of a request."""
    return [
        InputSpec("tokens", (rows,), torch.int64),
        InputSpec("positions", (rows,), torch.int64),
        InputSpec("slots", (rows,), torch.int64, pad=-1),
        InputSpec("token_req", (rows,), torch.int32, pad=-1),
        InputSpec("block_tables", block_tables, torch.int32),
    ]


def prefill_runner(model: Decoder, tables: tuple[int, int], *, name: str = "prefill", **options: Any) -> PrefillRunner:
    """Prefill piecewise; rows are tokens, and the block tables are all of an engine's, of shape ``tables``."""
    return PrefillRunner(model, input_specs(ROWS, *tables), sizes=PREFILL_SIZES, outputs="static", name=name, **options)


def decode_runner(
    model: Decoder, tables: tuple[int, int], *, tokens: int = 1, name: str = "decode", **options: Any
) -> DecodeRunner:
    """Decode as full graphs, logits included; rows are requests of ``tokens`` tokens each."""
    specs = input_specs(ROWS * tokens, ROWS, tables[1])
    return DecodeRunner(model.next_logits, specs, sizes=DECODE_SIZES, outputs="static", name=name, **options)


def engine_for(model: Decoder) -> Engine:
    """An eager engine whose batches fit the buckets."""
    return Engine(model, max_requests=max(DECODE_SIZES), max_prefill=max(PREFILL_SIZES))


def requests() -> list[Request]:
    """Prompts of many lengths that want different numbers of bytes, so that requests join and leave."""
    return [Request(prompt=p, max_new_tokens=24 + 8 * (i % 4)) for i, p in enumerate(PROMPTS)]


def run_demo(
    *, device: str | None = None, inner: str | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run the demo and return what it found; ``"failed"`` lists the checks that did not hold. Arguments: `Findings`."""
    found = Findings(device, inner, say)
    eager = engine_for(load(found.where))
    expected = eager.run(requests())
    engine = engine_for(load(found.where))
    prefill = prefill_runner(
        engine.model, engine.table_shape, options={"inner": found.inner}, device_module=found.module
    )
    decode = decode_runner(engine.model, engine.table_shape, device_module=found.module)
    engine.prefill, engine.decode = prefill, decode
    found.measure_memory([prefill, decode], "both shared", MAX_RATIO)

    outputs = engine.run(requests())
    tell_served(found, engine, outputs)
    found.check("every token equals eager's", outputs == expected)
    found.check_replayed({prefill: engine.counters.prefill_calls, decode: engine.counters.decode_steps})
    say("\nhow prefill is split:")
    found.result["explain"] = text = str(prefill.backend.explain())
    say("\n".join("  " + line for line in text.splitlines()))
    say("decode recordings: " + ", ".join(f"batch {n}" for n in decode.sizes if decode.backend.can_run(n)))
    if found.on_gpu:
        found.tell_speed(_speed(engine, decode, eager))
    return found.finish([prefill, decode])


def tell_served(found: Findings, engine: Engine, outputs: list[bytes]) -> None:
    """Print how many requests were served in how many steps, and two of them."""
    found.say(
        f"\nserved {len(outputs)} prompts of {min(map(len, PROMPTS))} to {max(map(len, PROMPTS))} bytes, "
        f"{engine.counters.prefill_calls} ragged prefills, {engine.counters.decode_steps} decode steps"
    )
    for prompt, output in list(zip(PROMPTS, outputs, strict=True))[-2:]:
        found.say(f"  {prompt.decode()!r}\n    -> {output.decode(errors='replace')!r}")


@torch.no_grad()
def _speed(engine: Engine, decode: Runner, eager: Engine) -> dict[str, float]:
    """Tokens per second served, and a decode step against the bare replay of its graph (wall µs, medians)."""
    speed = {
        "eager tokens/s": tokens_per_second(eager, requests()),
        "captured tokens/s": tokens_per_second(engine, requests()),
    }
    size = decode.sizes[-1]
    # Padding touches nothing of a request; on the host, as an engine has its inputs.
    inputs = {spec.name: torch.full(spec.size(size), spec.pad, dtype=spec.dtype) for spec in decode.specs}
    steps = {
        "bare replay µs": decode.backend.graph(size).replay,
        "decode.backend.replay µs": lambda: decode.backend.replay(size),
        "decode call, staging from the host, µs": lambda: decode(**inputs),
    }
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(15):  # by turns, so that all see the same clocks
        for name, step in steps.items():
            rounds[name].append(wall(step))
    speed |= {name: sorted(values)[len(values) // 2] for name, values in rounds.items()}
    bare, replay, call = (speed[name] for name in steps)
    return speed | {"decode.backend.replay / bare replay": replay / bare, "decode call / bare replay": call / bare}
