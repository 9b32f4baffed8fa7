"""The demo: an engine served through the backend, checked token for token against eager, with what it cost.

What a user's engine looks like with us is in `captured_engine`; the rest measures and prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sgc_backend import (
    FullCudaGraphBackend,
    OptionError,
    SgcError,
    emulated,
    explain,
    get_or_create_global_graph_memory_pool,
    reset,
    sgc_piecewise,
    stats,
)

from .engine import Engine
from .model import load
from .prompts import PROMPTS
from .requests import Request

PREFILL_SIZES = (16, 32, 64, 128, 256, 512)
DECODE_SIZES = (1, 2, 4)
MAX_RATIO = 1.02  # of both phases in one pool to the larger phase alone


def captured_engine(device_module: Any, device: str, inner: str) -> tuple[Engine, FullCudaGraphBackend, Any]:
    """An engine whose prefill runs piecewise and whose decode replays full graphs, not yet captured."""
    model = load(device)
    compiled = torch.compile(
        model,
        backend=sgc_piecewise,  # "sgc_piecewise" names the same thing once the package is installed
        dynamic=True,
        options={
            "capture_sizes": PREFILL_SIZES,
            "capture": "session",
            "inner": inner,
            "device_module": device_module,
        },
    )
    decode = FullCudaGraphBackend(device_module, name="decode")
    engine = Engine(model, max_requests=max(DECODE_SIZES), prefill_sizes=PREFILL_SIZES, decode_sizes=DECODE_SIZES)
    engine.prefill = lambda batch: compiled(*batch.model_args)
    engine.decode = decode.replay
    return engine, decode, compiled


@torch.no_grad()
def capture(engine: Engine, decode: FullCudaGraphBackend, *, prefill: bool = True, decoding: bool = True) -> None:
    """Record the wanted phases, largest first, in one session."""
    with decode.capture_session():
        if prefill:
            for size in sorted(PREFILL_SIZES, reverse=True):
                engine.prefill(engine.prefill_inputs(size))
        if decoding:
            for size in sorted(DECODE_SIZES, reverse=True):
                decode.capture_one(size, engine.decode_forward(size))


def requests() -> list[Request]:
    """Prompts of many lengths that want different numbers of bytes, so that requests join and leave."""
    return [Request(prompt=p, max_new_tokens=24 + 8 * (i % 4)) for i, p in enumerate(PROMPTS)]


def run_demo(
    *, device: str | None = None, inner: str | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run the demo and return what it found; ``"failed"`` lists the checks that did not hold.

    Args:
        device: "cuda" or "emulated"; None picks CUDA where there is one.
        inner: what compiles a piece; None: inductor on CUDA, eager on the emulated device (no C++ compiler needed).
        say: gets the report, line by line.
    """
    chosen = device or os.environ.get("SGC_DEVICE") or ("cuda" if torch.cuda.is_available() else "emulated")
    if chosen not in ("cuda", "emulated"):
        raise OptionError(f"the demo runs on 'cuda' or 'emulated', not on {chosen!r}; SGC_DEVICE may name one")
    if chosen == "cuda":
        module, where = torch.cuda, "cuda"
        say(f"device: cuda ({torch.cuda.get_device_name()}), torch {torch.__version__}")
    else:
        module, where = emulated, "cpu"
        say(f"device: emulated (no GPU is used: everything but speed is as on one), torch {torch.__version__}")
    inner = inner or ("inductor" if chosen == "cuda" else "eager")
    result: dict[str, Any] = {"device": chosen, "torch": torch.__version__, "inner": inner, "failed": []}

    eager = Engine(load(where), max_requests=max(DECODE_SIZES), prefill_sizes=PREFILL_SIZES, decode_sizes=DECODE_SIZES)
    expected = eager.run(requests())
    engine, decode, compiled = captured_engine(module, where, inner)
    result["memory"] = _memory(module, engine, decode)
    _report_memory(result, say)

    before = engine.counters.decode_tokens
    outputs = engine.run(requests())
    say(
        f"\nserved {len(outputs)} prompts of {min(map(len, PROMPTS))} to {max(map(len, PROMPTS))} bytes, "
        f"{engine.counters.prefill_calls} ragged prefills, {engine.counters.decode_steps} decode steps"
    )
    for prompt, output in list(zip(PROMPTS, outputs, strict=True))[-2:]:
        say(f"  {prompt.decode()!r}\n    -> {output.decode(errors='replace')!r}")
    _check(result, say, "every token equals eager's", outputs == expected)
    _check(result, say, "decode tokens were made", engine.counters.decode_tokens > before)

    result["stats"] = stats()
    uncaptured = {c: n for s in result["stats"].values() for c, n in s["uncaptured"].items() if c != "warm-up"}
    _check(result, say, "every call was replayed", not uncaptured, str(uncaptured or ""))
    say("\nhow prefill is split:")
    text = str(explain(compiled, *engine.prefill_inputs(max(PREFILL_SIZES)).model_args))
    result["explain"] = text
    say("\n".join("  " + line for line in text.splitlines()))
    say("decode recordings: " + ", ".join(f"batch {n}" for n in sorted(DECODE_SIZES) if decode.can_run(n)))
    if chosen == "cuda":
        result["speed"] = _speed(engine, decode, eager)
        _report_speed(result["speed"], say)
    decode.cleanup()
    reset()
    say("\n" + ("FAILED: " + "; ".join(result["failed"]) if result["failed"] else "all checks passed"))
    return result


def _check(result: dict[str, Any], say: Callable[[str], None], what: str, held: bool, detail: str = "") -> None:
    say(f"  [{'ok' if held else 'FAILED'}] {what}" + (f": {detail}" if detail and not held else ""))
    if not held:
        result["failed"].append(what)


def _memory(module: Any, engine: Engine, decode: FullCudaGraphBackend) -> dict[str, int]:
    """Bytes that the pool reserves for each phase alone and for both; the last capture stays for serving."""
    reserved = {}
    for name, phases in {
        "prefill alone": {"decoding": False},
        "decode alone": {"prefill": False},
        "both shared": {},
    }.items():
        reset()
        capture(engine, decode, **phases)
        reserved[name] = decode.device.reserved_bytes(get_or_create_global_graph_memory_pool(module))
    reserved["both with a pool each"] = reserved["prefill alone"] + reserved["decode alone"]
    return reserved


def _report_memory(result: dict[str, Any], say: Callable[[str], None]) -> None:
    memory = result["memory"]
    say("\nmemory that the pool reserves:")
    for name, count in memory.items():
        say(f"  {name:24} {count / 2**20:8.2f} MiB")
    larger = max(memory["prefill alone"], memory["decode alone"])
    held = memory["both shared"] <= MAX_RATIO * larger
    _check(result, say, f"both shared is at most {MAX_RATIO} x the larger phase", held)


@torch.no_grad()
def _speed(engine: Engine, decode: FullCudaGraphBackend, eager: Engine) -> dict[str, float]:
    """Tokens per second served, and a decode step against the bare replay of its graph (wall µs, medians)."""
    speed: dict[str, float] = {}
    for name, one in (("eager", eager), ("captured", engine)):
        one.run(requests())
        start, tokens = time.perf_counter(), one.counters.decode_tokens
        one.run(requests())
        torch.cuda.synchronize()
        speed[f"{name} tokens/s"] = (one.counters.decode_tokens - tokens) / (time.perf_counter() - start)
    size = max(DECODE_SIZES)
    graph = decode.graph(size)
    rounds = {"bare replay µs": [], "decode.replay µs": []}
    for _ in range(15):  # by turns, so that both see the same clocks
        rounds["bare replay µs"].append(_wall(graph.replay))
        rounds["decode.replay µs"].append(_wall(lambda: decode.replay(size)))
    speed |= {name: sorted(values)[len(values) // 2] for name, values in rounds.items()}
    speed["decode.replay / bare replay"] = speed["decode.replay µs"] / speed["bare replay µs"]
    return speed


def _wall(step: Callable[[], Any], steps: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e6


def _report_speed(speed: dict[str, float], say: Callable[[str], None]) -> None:
    say("\nspeed:")
    for name, value in speed.items():
        say(f"  {name:28} {value:12.2f}")


@contextlib.contextmanager
def json_to(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A writer of the result to ``path``, which is replaced when the result is written and not before.

    A folder that can't be written to is refused here, before the demo runs.
    """
    if path is None:
        yield lambda result: None
        return
    try:
        descriptor, draft = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), suffix=".json")
        os.close(descriptor)
    except OSError as error:
        raise SgcError(f"--json {path}: {error}") from error

    def write(result: dict[str, Any]) -> None:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
        os.replace(draft, path)

    try:
        yield write
    finally:
        if os.path.exists(draft):
            os.unlink(draft)
