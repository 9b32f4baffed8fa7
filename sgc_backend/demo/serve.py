"""The demo: an engine served through the backend, checked token for token against eager, with what it cost.

What a user's engine looks like with us is in `runners` and `capture`; the rest measures and prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sgc_backend import (
    ROWS,
    DecodeRunner,
    InputSpec,
    OptionError,
    PrefillRunner,
    Runner,
    SgcError,
    emulated,
    explain,
    get_or_create_global_graph_memory_pool,
    reset,
    stats,
)

from .engine import Engine
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


def runners(model: Decoder, tables: tuple[int, int], device_module: Any, inner: str) -> tuple[Runner, Runner]:
    """Prefill piecewise and decode as full graphs, not yet recorded; ``tables``: shape of an engine's block tables."""
    common = {"outputs": "static", "device_module": device_module}
    prefill = PrefillRunner(
        model, input_specs(ROWS, *tables), sizes=PREFILL_SIZES, options={"inner": inner}, name="prefill", **common
    )
    decode = DecodeRunner(
        model.next_logits, input_specs(ROWS, ROWS, tables[1]), sizes=DECODE_SIZES, name="decode", **common
    )
    return prefill, decode


def capture(phases: Sequence[Runner]) -> None:
    """Record every bucket of every phase in one session: those of one runner largest first, so begin with the largest
    runner.
    """
    with phases[0].capture_session():
        for runner in phases:
            runner.capture()


def engine_for(model: Decoder) -> Engine:
    """An eager engine whose batches fit the buckets."""
    return Engine(model, max_requests=max(DECODE_SIZES), max_prefill=max(PREFILL_SIZES))


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

    eager = engine_for(load(where))
    expected = eager.run(requests())
    engine = engine_for(load(where))
    prefill, decode = runners(engine.model, engine.table_shape, module, inner)
    engine.prefill, engine.decode = prefill, decode
    result["memory"] = _memory(module, {"prefill": prefill, "decode": decode})
    _report_memory(result, say)

    outputs = engine.run(requests())
    say(
        f"\nserved {len(outputs)} prompts of {min(map(len, PROMPTS))} to {max(map(len, PROMPTS))} bytes, "
        f"{engine.counters.prefill_calls} ragged prefills, {engine.counters.decode_steps} decode steps"
    )
    for prompt, output in list(zip(PROMPTS, outputs, strict=True))[-2:]:
        say(f"  {prompt.decode()!r}\n    -> {output.decode(errors='replace')!r}")
    _check(result, say, "every token equals eager's", outputs == expected)
    calls = {prefill: engine.counters.prefill_calls, decode: engine.counters.decode_steps}
    _check_replayed(result, say, calls)
    say("\nhow prefill is split:")
    text = str(explain(prefill.backend.compiled, **_padding(prefill)))
    result["explain"] = text
    say("\n".join("  " + line for line in text.splitlines()))
    say("decode recordings: " + ", ".join(f"batch {n}" for n in decode.sizes if decode.backend.can_run(n)))
    if chosen == "cuda":
        result["speed"] = _speed(engine, decode, eager)
        _report_speed(result["speed"], say)
    for runner in (prefill, decode):
        runner.cleanup()
    reset()
    say("\n" + ("FAILED: " + "; ".join(result["failed"]) if result["failed"] else "all checks passed"))
    return result


def _check(result: dict[str, Any], say: Callable[[str], None], what: str, held: bool, detail: str = "") -> None:
    say(f"  [{'ok' if held else 'FAILED'}] {what}" + (f": {detail}" if detail and not held else ""))
    if not held:
        result["failed"].append(what)


def _check_replayed(result: dict[str, Any], say: Callable[[str], None], calls: dict[Runner, int]) -> None:
    """Check that each runner was called that often, every time with a replay."""
    result["stats"] = stats()
    uncaptured = {c: n for s in result["stats"].values() for c, n in s["uncaptured"].items() if c != "warm-up"}
    replayed = {runner: sum(runner.counters.replayed.values()) for runner in calls}
    held = not uncaptured and replayed == calls and all(calls.values())
    counts = ", ".join(f"{runner.backend.name} {replayed[runner]} of {n}" for runner, n in calls.items())
    _check(result, say, "every call was replayed", held, f"{counts}; uncaptured: {uncaptured}")


def _padding(runner: Runner) -> dict[str, torch.Tensor]:
    """The buffers of a runner's largest bucket, filled with padding: running on them touches nothing of a request."""
    views = runner.views(runner.sizes[-1])
    for spec in runner.specs:
        views[spec.name].fill_(spec.pad)
    return views


def _memory(module: Any, phases: dict[str, Runner]) -> dict[str, int]:
    """Bytes that the pool reserves for each phase alone and for both; the last capture stays for serving."""
    reserved = {}
    alone = {f"{name} alone": [runner] for name, runner in phases.items()}
    for name, together in {**alone, "both shared": list(phases.values())}.items():
        reset()
        capture(together)
        device = together[0].backend.device
        reserved[name] = device.reserved_bytes(get_or_create_global_graph_memory_pool(module))
    reserved["both with a pool each"] = sum(reserved[name] for name in alone)
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
def _speed(engine: Engine, decode: Runner, eager: Engine) -> dict[str, float]:
    """Tokens per second served, and a decode step against the bare replay of its graph (wall µs, medians)."""
    speed: dict[str, float] = {}
    for name, one in (("eager", eager), ("captured", engine)):
        one.run(requests())
        start, tokens = time.perf_counter(), one.counters.decode_tokens
        one.run(requests())
        torch.cuda.synchronize()
        speed[f"{name} tokens/s"] = (one.counters.decode_tokens - tokens) / (time.perf_counter() - start)
    size = decode.sizes[-1]
    inputs = {name: view.cpu() for name, view in _padding(decode).items()}  # as an engine has them
    steps = {
        "bare replay µs": decode.backend.graph(size).replay,
        "decode.backend.replay µs": lambda: decode.backend.replay(size),
        "decode call, staging from the host, µs": lambda: decode(**inputs),
    }
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(15):  # by turns, so that all see the same clocks
        for name, step in steps.items():
            rounds[name].append(_wall(step))
    speed |= {name: sorted(values)[len(values) // 2] for name, values in rounds.items()}
    bare, replay, call = (speed[name] for name in steps)
    return speed | {"decode.backend.replay / bare replay": replay / bare, "decode call / bare replay": call / bare}


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
        say(f"  {name:40} {value:12.2f}")


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
