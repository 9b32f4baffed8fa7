"""What a full graph's wrapper and a decode runner cost above the bare work of a decode step.

A decoder takes six small integers a request. The bare work is one graph replay and what brings the inputs to it: one
copy of a pinned block that holds all six, or one call that copies six tensors of the device. On a GPU times are
measured; on the emulated device, where they would mean nothing, what each row does is counted. Every row's result is
compared with eager's, before and after it was measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sgc_backend import ROWS, DecodeRunner, InputSpec, reset

from .attention import CONTEXT, Decode, attend
from .counting import count
from .decoder import ON_GPU, ON_HOST, Size, decoder, dtype_on
from .environment import chosen_device
from .forwards import COPY_IN_TURN
from .tables import say_counts, say_ratios, say_timings
from .timing import Ratio, Timing, measure, ratio

ROWS_RUN, VOCABULARY, TARGET = 16, 64, 1.30
NAMES = ("tokens", "positions", "slots", "lengths", "seeds", "adapters")
SPECS = [InputSpec(name, (ROWS,), torch.int64) for name in NAMES]
SIX, SIX_IN_TURN = "one call that copies six", "one call that copies six, then bare replay"
RUNNERS = {
    "outputs=static, unchecked": {"outputs": "static", "check_addresses": False},
    "outputs=static": {"outputs": "static"},
    "outputs=clone": {},
}
Call = Callable[[], Any]


class Served(nn.Module):
    """The decoder behind a table; [n] int64 each in, [n, E] out, n up to ``rows``."""

    def __init__(self, size: Size, device: str, rows: int = ROWS_RUN) -> None:
        super().__init__()
        with torch.device(device):
            cache = (rows, size.heads, CONTEXT, size.hidden // size.heads)
            self.decoder = decoder(size, device, Decode(attend, cache)).to(dtype_on(device))
            self.table = nn.Embedding(VOCABULARY, size.hidden, dtype=dtype_on(device))

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, seeds: Tensor, adapters: Tensor
    ) -> Tensor:
        return self.decoder(self.table((tokens + positions + slots + lengths + seeds + adapters) % VOCABULARY))


class Steps:
    """One decode step in every way that is measured."""

    def __init__(self, size: Size, module: Any, device: str) -> None:
        self.synchronize = module.synchronize
        served = Served(size, device).eval()
        common = {"sizes": (ROWS_RUN // 2, ROWS_RUN), "device_module": module}
        self.runners = {
            name: DecodeRunner(served, SPECS, name=f"runner, {name}", **common, **settings)
            for name, settings in RUNNERS.items()
        }
        for runner in self.runners.values():
            runner.capture()
        self.host = {name: torch.randint(0, VOCABULARY, (ROWS_RUN,)) for name in NAMES}
        self.device = {name: value.to(device) for name, value in self.host.items()}
        self.lists = {name: value.tolist() for name, value in self.host.items()}
        count = sum(spec.bytes(ROWS_RUN) for spec in SPECS)
        self.pinned = torch.zeros(count, dtype=torch.uint8, pin_memory=device == "cuda")
        self.packed = torch.zeros(count, dtype=torch.uint8, device=device)

    def rows(self) -> dict[str, Call]:
        """The ways to run a step, by name."""
        host: dict[str, Any] | None = self.host
        if self.pinned.device == self.packed.device:  # emulated: a tensor of the host looks like one of the device
            known = importlib.util.find_spec("numpy") is not None
            host = {name: value.numpy() for name, value in self.host.items()} if known else None
        rows: dict[str, Call] = {}
        for name, runner in self.runners.items():
            if name != "outputs=clone":
                rows[f"full, {name}"] = lambda runner=runner: (self._copy(), runner.backend.replay(ROWS_RUN))[1]
            if host is not None:
                rows[f"runner, six host inputs, {name}"] = lambda runner=runner: runner(**host)
            rows[f"runner, six device inputs, {name}"] = lambda runner=runner: runner(**self.device)
            rows[f"runner, six lists, {name}"] = lambda runner=runner: runner(**self.lists)
        return rows

    def floors(self) -> dict[str, Call]:
        """What the rows can't go below, by name."""
        bare = self.runners["outputs=static"].backend.graph(ROWS_RUN).replay
        held = [torch.zeros_like(value) for value in self.device.values()]
        given = list(self.device.values())
        return {
            "bare replay": bare,
            "one packed copy": self._copy,
            COPY_IN_TURN: lambda: (self._copy(), bare()),
            SIX: lambda: torch._foreach_copy_(held, given),
            SIX_IN_TURN: lambda: (torch._foreach_copy_(held, given), bare()),
        }

    def checks(self) -> dict[str, Call]:
        """What a replay looks at first, by name; the comparisons of pointers alone, in both ways that torch has."""
        reached = self.runners["outputs=static"].backend._found(ROWS_RUN).reached
        tensors = [place[0][place[1]] for place, _ in reached._tensors]
        pointers = [tensor.data_ptr() for tensor in tensors]
        checks: dict[str, Call] = {
            "what moved": reached.moved,
            f"{len(tensors)} pointers, one by one": lambda: list(map(torch.Tensor.data_ptr, tensors)) == pointers,
        }
        in_one = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
        if in_one is not None:
            places = list(range(len(tensors)))
            checks[f"{len(tensors)} pointers, in one call"] = lambda: in_one(tensors, pointers, places)
        return checks

    def check(self) -> None:
        """Compare every row with eager, bit for bit, on new inputs.

        Raises:
            RuntimeError: a row differs.
        """
        for name, value in self.host.items():
            value.random_(0, VOCABULARY)
            self.device[name].copy_(value)
            self.lists[name][:] = value.tolist()
        one = self.runners["outputs=clone"]
        expected = one.eager(**self.device)
        for name, row in self.rows().items():
            got = row()
            if name.startswith("full"):  # the copy in front of it is of another block
                continue
            if not torch.equal(got, expected):
                raise RuntimeError(f"{name}: differs from eager; its figures would mean nothing")

    def _copy(self) -> None:
        self.packed.copy_(self.pinned, non_blocking=True)


@torch.no_grad()
def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and print; returns rows and ratios (on a GPU) or counts."""
    module, device = chosen_device()
    size = ON_GPU if device == "cuda" else ON_HOST
    say(f"\n{size.layers} layers, hidden {size.hidden}, {dtype_on(device)}; {ROWS_RUN} requests, six inputs each")
    try:
        steps = Steps(size, module, device)
        found = _times(steps, say) if device == "cuda" else _counts(steps, say)
    finally:
        reset()
    return {"size": vars(size), "requests": ROWS_RUN, **found}


def _times(steps: Steps, say: Callable[[str], None]) -> dict[str, Any]:
    steps.check()
    timings = measure({**steps.rows(), **steps.floors(), **steps.checks()}, steps.synchronize)
    steps.check()
    say_timings(say, "overhead", timings)
    ratios = say_ratios(say, _ratios(timings))
    return {"rows": [t.as_dict() for t in timings.values()], "ratios": ratios}


def _ratios(t: dict[str, Timing]) -> list[tuple[Ratio, float | None]]:
    """Ratios with their targets. The sum of rows counts what overlaps twice, so the floors in turn stand beside."""
    found: list[tuple[Ratio, float | None]] = []
    for name in t:
        static = TARGET if "outputs=static" in name else None  # no target was set for one that clones
        if name.startswith(("full", "runner, six host")):
            found.append((ratio(t[name], t["bare replay"], t["one packed copy"]), static))
            found.append((ratio(t[name], t[COPY_IN_TURN]), None))
        elif name.startswith("runner, six device"):
            found.append((ratio(t[name], t["bare replay"], t[SIX]), static))
            found.append((ratio(t[name], t[SIX_IN_TURN]), None))
    return found


def _counts(steps: Steps, say: Callable[[str], None]) -> dict[str, Any]:
    steps.check()
    counted = {name: count(call).as_dict() for name, call in {**steps.rows(), **steps.floors()}.items()}
    steps.check()
    say_counts(say, "overhead", counted)
    return {"counts": counted}
