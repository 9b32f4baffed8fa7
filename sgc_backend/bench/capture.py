"""How long it takes to record many sizes of a decoder that falls into many pieces, and what it takes outside the pool.

A size needs two forwards: one that warms up and answers, one that is recorded. So the floor is two eager forwards per
size. Both sides begin with every kernel loaded, and take turns; their medians count.

Memory outside the pool is read around the first run and the first replays, from what the device says is free and what
the allocator holds: the driver keeps the memory of graphs that are gone for those to come, so a later run takes none.
The peer is a plain recording of the same pieces by hand, one graph for each size and piece; all sets are alive when
they are compared. Ours is recorded twice: as it is by default, and with executables shared between sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sgc_backend import (
    FullCudaGraphBackend,
    get_or_create_global_capture_stream,
    memory_report,
    reset,
    sgc_piecewise,
)
from sgc_backend.config import batch_sizes
from sgc_backend.recorders import recorders

from .agree import must_agree
from .attention import Prefill, attend
from .decoder import ON_GPU, ON_HOST, Size, decoder
from .environment import chosen_device
from .plain import PlainRecordings
from .profiled import profiled

LONGEST_ON_GPU, LONGEST_ON_HOST = 2048, 32
TIME_TARGET, MEMORY_TARGET = 1.3, 0.25
ROUNDS = 5
KIB = 1 << 10
SHARING = "ours with share_executables"
_BEGIN, _END = [("device", "capture_begin")], [("device", "capture_end")]
_QUERIES = [("cuda_device", "free_bytes"), ("cuda_device", "_reserved"), ("device", "pool_segments")]
_WAITS = [("device", "synchronize"), ("cuda_device", "synchronize")]
PARTS = {
    "warm-up: the pieces and cuts, and the tries of padding": ([("warm_up", "run")], []),
    "capture_begin": (_BEGIN, []),
    "capture_end": (_END, []),
    "asking the device and the allocator for their memory": (_QUERIES, []),
    "waiting for the device": (_WAITS, []),
    "building the plans besides: the pieces' calls, binding": (
        [("builder", "build_plan")],
        [*_BEGIN, *_END, *_QUERIES],
    ),
    "Dynamo's guards and calls, the session's begin and end": ([("capture", "session")], [("piecewise", "__call__")]),
}


class Sizes:
    """A decoder, and the sizes that are recorded of it."""

    def __init__(self, size: Size, longest: int, module: Any, device: str) -> None:
        self.module, self.times = module, device == "cuda"
        # Dynamo takes a length of 1 apart, so the ladder's smallest size is 2 here.
        self.sizes = sorted({max(n, 2) for n in batch_sizes(longest)} | {3}, reverse=True)
        self.model = decoder(size, device, Prefill(attend))
        self.x = torch.randn(longest + 1, size.hidden, device=device, dtype=next(self.model.parameters()).dtype)
        self.wrapper = FullCudaGraphBackend(module, name="session")
        self.call, self.graph = self._compiled(longest // 2 + 1)
        # the emulated device has no executables
        self.sharing = self._compiled(longest // 2 + 1, share_executables=True) if self.times else None
        self.plain = PlainRecordings(self.model, self.wrapper.device, get_or_create_global_capture_stream(module))

    def _compiled(self, length: int, **more: Any) -> tuple[Callable[..., Any], Any]:
        """The compiled model, and its graph; ``length`` equals no other, or Dynamo would take it for the same."""
        options = {
            "inner": "eager",
            "device_module": self.module,
            "cut_ops": [attend],
            "capture_sizes": self.sizes,
            "capture": "session",
            **more,
        }
        call = torch.compile(self.model, backend=sgc_piecewise, dynamic=True, options=options)
        before = set(recorders())
        call(self.x[:length])
        (graph,) = (r for r in set(recorders()) - before if r.kind == "compiled")
        return call, graph

    def session(self) -> None:
        """Record every size."""
        self._record(self.call, self.sizes)

    def _record(self, call: Callable[..., Any], sizes: list[int]) -> None:
        with self.wrapper.capture_session():
            for n in sizes:
                call(self.x[:n])

    def forwards(self) -> None:
        """Two eager forwards of every size."""
        for n in self.sizes:
            self.model(self.x[:n])
            self.model(self.x[:n])

    def check(self, n: int, way: Callable[[], Any]) -> None:
        """Compare one size's result with eager's, bit for bit. Raises RuntimeError where it differs."""
        must_agree(self.model(self.x[:n]), {f"{n} rows": way})

    def recordings(self) -> int:
        """How many graphs there are."""
        return sum(len(plan.graphs) for plans in self.graph.plans.values() for plan in plans)

    def load(self) -> None:
        """Have every kernel loaded that either side runs: what the driver takes for them is no recording's."""
        self.forwards()
        self._record(self.call, self.sizes[-2:])
        for n in self.sizes[-2:]:
            self.call(self.x[:n])
        self.graph.release()

    def outside(self) -> int:
        """Bytes of the device that are taken and not the allocator's."""
        device = self.wrapper.device
        device.synchronize()
        return -device.free_bytes() - device.allocator_bytes()

    def compare_memory(self) -> dict[str, Any]:
        """Record both ways, run each recording once, and compare it with eager; how many and how large they are."""
        begin = self.outside()
        self.plain.record(self.x, self.sizes, self.check)
        plain = self.outside()
        self.session()
        for n in self.sizes:
            self.check(n, lambda n=n: self.call(self.x[:n]))
        ours = self.outside()
        booked = sum(pool.outside for pool in memory_report().pools)
        found: dict[str, Any] = {"recordings": self.recordings(), "plain recordings": len(self.plain.graphs)}
        if self.sharing is not None:
            call, graph = self.sharing
            self._record(call, self.sizes)
            for n in self.sizes:
                self.check(n, lambda n=n: call(self.x[:n]))
            each = {
                "ours": (ours - plain) / found["recordings"],
                SHARING: (self.outside() - ours) / found["recordings"],
                "plain": (plain - begin) / found["plain recordings"],
                "memory_report": booked / found["recordings"],
            }
            graph.release()
            found["KiB outside a recording"] = {name: count / KIB for name, count in each.items()}
        self.release()
        return found

    def release(self) -> None:
        """Let go of all recordings."""
        self.plain.release()
        self.graph.release()


@torch.no_grad()
def run(say: Callable[[str], None], *, profile: bool = False) -> dict[str, Any]:
    """Measure and print; returns seconds and bytes (on a GPU), and counts.

    Args:
        profile: tell too where the session's time goes.
    """
    module, device = chosen_device()
    size = replace(ON_GPU, layers=32) if device == "cuda" else ON_HOST
    try:
        bench = Sizes(size, LONGEST_ON_GPU if device == "cuda" else LONGEST_ON_HOST, module, device)
        return _measured(bench, size, say, profile)
    finally:
        torch._dynamo.reset()
        reset()


def _measured(bench: Sizes, size: Size, say: Callable[[str], None], profile: bool) -> dict[str, Any]:
    bench.load()
    memory = bench.compare_memory()
    pieces = len(bench.graph.split.pieces)
    sizes = f"{len(bench.sizes)} sizes up to {bench.sizes[0]}"
    say(f"\n{size.layers} layers, hidden {size.hidden}: {sizes} x {pieces} pieces")
    say(f"recordings: {memory['recordings']}, by hand {memory['plain recordings']}")
    result: dict[str, Any] = {"sizes": bench.sizes, "pieces": pieces, **memory}
    if bench.times:
        result |= _figures(*_seconds(bench), bench.plain.seconds, memory)
        for line in result["ratios"]:
            say(f"{line['name']:72} {line['values'][0]:8.2f}  <= {line['target']}: {_verdict(line['reached'])}")
        for what in ("seconds", "KiB outside a recording"):
            say(f"{what}: " + ", ".join(f"{name} {value:.2f}" for name, value in result[what].items()))
    if profile:
        found = profiled(bench.session, PARTS)
        found.say(say)
        result["profile"] = found.as_dict()
    return result


def _figures(forwards: float, session: float, by_hand: float, memory: dict[str, Any]) -> dict[str, Any]:
    """Seconds, and the ratios with their targets."""
    outside = memory["KiB outside a recording"]
    ratios = [
        ("session / two eager forwards per size, seconds", session, forwards, TIME_TARGET),
        *(
            (f"outside the pool, {name} / plain recordings, bytes each", outside[name], outside["plain"], MEMORY_TARGET)
            for name in ("ours", SHARING)
        ),
    ]
    return {
        "seconds": {"two eager forwards per size": forwards, "session": session, "plain recordings by hand": by_hand},
        "ratios": [
            {"name": name, "values": [value], "target": target, "reached": value <= target}
            for name, value, target in ((name, a / b if b else float("nan"), target) for name, a, b, target in ratios)
        ],
    }


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def _seconds(bench: Sizes) -> tuple[float, float]:
    """Of two eager forwards per size, and of a session: medians of rounds that run one after the other."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for took, call in zip(found, (bench.forwards, bench.session), strict=True):
            bench.module.synchronize()
            start = time.perf_counter()
            call()
            bench.module.synchronize()
            took.append(time.perf_counter() - start)
        bench.release()
    forwards, session = map(statistics.median, found)
    return forwards, session
