"""What a demo finds out: its device, its checks, the memory and speed that it measures; printed, and kept as data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sgc_backend import (
    OptionError,
    Runner,
    emulated,
    get_or_create_global_graph_memory_pool,
    reset,
    stats,
)

from .engine import Engine
from .requests import Request


class Findings:
    """Picks the device, and collects.

    Args:
        device: "cuda" or "emulated"; None picks CUDA where there is one.
        inner: what compiles a piece; None: inductor on CUDA, eager on the emulated device (no C++ compiler needed).
        say: gets the report, line by line.

    Attributes:
        module: the device module.
        where: the torch device of the tensors.
        result: plain data; ``"failed"`` lists the checks that did not hold.

    Raises:
        OptionError: another device, or CUDA where there is none.
    """

    def __init__(self, device: str | None, inner: str | None, say: Callable[[str], None]) -> None:
        self.say = say
        self._before = stats()  # whatever else this process has compiled and run is not the demo's
        chosen = device or os.environ.get("SGC_DEVICE") or ("cuda" if torch.cuda.is_available() else "emulated")
        if chosen not in ("cuda", "emulated"):
            raise OptionError(f"the demo runs on 'cuda' or 'emulated', not on {chosen!r}; SGC_DEVICE may name one")
        if chosen == "cuda" and not torch.cuda.is_available():
            raise OptionError("the demo is to run on 'cuda', and there is no CUDA device; 'emulated' needs none")
        self.on_gpu = chosen == "cuda"
        if self.on_gpu:
            self.module, self.where = torch.cuda, "cuda"
            say(f"device: cuda ({torch.cuda.get_device_name()}), torch {torch.__version__}")
        else:
            self.module, self.where = emulated, "cpu"
            say(f"device: emulated (no GPU is used: everything but speed is as on one), torch {torch.__version__}")
        self.inner = inner or ("inductor" if self.on_gpu else "eager")
        self.result: dict[str, Any] = {
            "device": chosen, "torch": torch.__version__, "inner": self.inner, "failed": [],
        }  # fmt: skip

    def check(self, what: str, held: bool, detail: str = "") -> None:
        """Say whether something held; ``detail`` where it did not."""
        self.say(f"  [{'ok' if held else 'FAILED'}] {what}" + (f": {detail}" if detail and not held else ""))
        if not held:
            self.result["failed"].append(what)

    def check_replayed(self, calls: Mapping[Runner, int]) -> None:
        """Check that each runner was called that often, at least once, and answered every call with a replay."""
        self.result["stats"] = found = stats()
        uncaptured: dict[str, int] = {}
        for name, counted in found.items():
            before = self._before.get(name, {}).get("uncaptured", {})
            for cause, n in counted["uncaptured"].items():
                if cause != "warm-up" and n > before.get(cause, 0):
                    uncaptured[cause] = uncaptured.get(cause, 0) + n - before.get(cause, 0)
        replayed = {runner: sum(runner.counters.replayed.values()) for runner in calls}
        held = not uncaptured and replayed == calls and all(calls.values())
        counts = ", ".join(f"{runner.backend.name} {replayed[runner]} of {n}" for runner, n in calls.items())
        self.check("every call was replayed", held, f"{counts}; uncaptured: {uncaptured}")

    def measure_memory(self, phases: Sequence[Runner], together: str, ratio: float, *, any_order: bool = False) -> None:
        """Record each phase alone and then all of them, which stay for serving, and check what the pool reserves.

        Args:
            phases: the largest first.
            together: what all of them are called.
            ratio: of all of them to the largest alone, at most.
            any_order: see `capture`.
        """
        alone = {f"{runner.backend.name} alone": [runner] for runner in phases}
        memory: dict[str, int] = {}
        for name, group in {**alone, together: phases}.items():
            reset()
            capture(group, any_order=any_order)
            pool = get_or_create_global_graph_memory_pool(self.module)
            memory[name] = group[0].backend.device.reserved_bytes(pool)
        largest = max(memory[name] for name in alone)
        each = f"{together.split()[0]} with a pool each"
        memory[each] = sum(memory[name] for name in alone)
        self.result["memory"] = memory
        self.say("\nmemory that the pool reserves:")
        for name, count in memory.items():
            self.say(f"  {name:24} {count / 2**20:8.2f} MiB")
        self.check(f"{together} is at most {ratio} x the largest phase alone", memory[together] <= ratio * largest)

    def tell_speed(self, speed: dict[str, float]) -> None:
        """Print measurements, and keep them."""
        self.result["speed"] = speed
        self.say("\nspeed:")
        for name, value in speed.items():
            self.say(f"  {name:40} {value:12.2f}")

    def finish(self, runners: Sequence[Runner]) -> dict[str, Any]:
        """Give everything back, say how it ended, and return the result."""
        for runner in runners:
            runner.cleanup()
        reset()
        failed = self.result["failed"]
        self.say("\n" + ("FAILED: " + "; ".join(failed) if failed else "all checks passed"))
        return self.result


def capture(phases: Sequence[Runner], *, any_order: bool = False) -> None:
    """Record every bucket of every phase in one session, the largest phase first: smaller ones reuse its memory.

    With ``any_order`` the order does not matter, nor whether a smaller phase has larger tensors than the largest one
    left room for.
    """
    with phases[0].capture_session(any_order=any_order):
        for runner in phases:
            runner.capture()


def tokens_per_second(engine: Engine, requests: Sequence[Request]) -> float:
    """Decoded tokens per second of wall time on CUDA, prefill included, on the second of two runs."""
    engine.run(requests)
    start, tokens = time.perf_counter(), engine.counters.decode_tokens
    engine.run(requests)
    torch.cuda.synchronize()
    return (engine.counters.decode_tokens - tokens) / (time.perf_counter() - start)


def wall(step: Callable[[], Any], steps: int = 200) -> float:
    """Microseconds that a step takes on CUDA, the mean of many."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e6
