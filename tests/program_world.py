"""A case, and one side's caller: its model, its inputs in every layout, the results that it holds.

Eager and compiled each have a world of their own, made alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from program_lines import ROWS, D
from torch import nn

STATE = ("w", "b", "tied", "cache", "ring", "count")
HELD = 6  # results and inputs of as many calls stay the caller's


@dataclass(frozen=True)
class Call:
    """One call: its size, how its inputs lie in memory, its mode, and what happens in front of it.

    Attributes:
        before: "", or the name of one of `World`'s or `Compiled`'s events.
    """

    n: int
    x: str = "fresh"
    y: str = "fresh"
    z: bool = False
    k: int = 2
    f: float = 0.5
    mode: str = "no_grad"
    before: str = ""
    session: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """A program and its calls.

    Attributes:
        lines: the function's body.
        returned: expressions that it returns.
        options: of the backend.
        dynamo: compiled by torch.compile, otherwise its graph is made by program_trace.
        dynamic: as torch.compile's.
        grad: whether the parameters want gradients.
        ring: "own", or "cache" where m.ring is a part of m.cache.
    """

    lines: tuple[str, ...]
    returned: tuple[str, ...]
    calls: tuple[Call, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dynamo: bool = False
    dynamic: bool | None = True
    grad: bool = False
    ring: str = "own"

    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def fn(m, x, y, idx, z, k, f):\n{body}    return ({', '.join(self.returned)},)\n"

    def text(self) -> str:
        """The whole case, as code that can be read and run again."""
        calls = "".join(f"    {call},\n" for call in self.calls)
        rest = {k: getattr(self, k) for k in ("options", "dynamo", "dynamic", "grad", "ring")}
        more = "".join(f"    {k}={v!r},\n" for k, v in rest.items())
        return f"{self.source()}Case(\n    {self.lines!r},\n    {self.returned!r},\n    ({calls}),\n{more})"


class Program(nn.Module):
    """The function over its state."""

    def __init__(self, fn: Any, grad: bool, ring: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.w = nn.Parameter(torch.randn(D, D, generator=generator) * 0.3, requires_grad=grad)
        self.b = nn.Parameter(torch.randn(D, generator=generator), requires_grad=grad)
        self.tied = self.w
        self.register_buffer("cache", torch.randn(ROWS, D, generator=generator))
        own = torch.randn(4, D, generator=generator)
        self.register_buffer("ring", self.cache[3:7] if ring == "cache" else own)
        self.register_buffer("count", torch.zeros(()))
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


class World:
    """What one side's caller has.

    Attributes:
        roots: tensors over whole storages, by a name that both sides share.
        held: results of earlier calls.
    """

    def __init__(self, case: Case, device: str) -> None:
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(case.source(), "<program>", "exec"), space)
        self.device = device
        self.model = Program(space["fn"], case.grad, case.ring)
        if device != "cpu":
            self.model.to(device)
            if case.ring == "cache":
                self.model.ring = self.model.cache[3:7]
        self.bases: dict[str, torch.Tensor] = {}
        self.held: list[list[Any]] = []
        self.last_x: torch.Tensor | None = None
        self.calls = 0

    def roots(self) -> dict[str, torch.Tensor]:
        found = {f"m.{name}": getattr(self.model, name) for name in STATE}
        found |= self.bases
        for age, outputs in enumerate(self.held):
            found |= {f"held {age}.{i}": o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)}
        return found

    def arguments(self, call: Call) -> list[Any]:
        self.calls += 1
        generator = torch.Generator().manual_seed(call.seed)
        x = self._rows("x", call.x, call.n, generator)
        y = x if call.y == "x" else self._rows("y", call.y, call.n, generator)
        if call.y in ("over", "halves"):
            step = 1 if call.y == "over" else call.n
            base = self._base("xy", torch.randn(call.n + step, D, generator=generator))
            x, y = base[: call.n], base[step : step + call.n]
        self.last_x = x if call.x != "prev" else None  # a static result is worth nothing in the call after the next
        idx = self._base("idx", torch.randperm(ROWS, generator=generator)[: call.n])
        z = self._base("z", torch.randn((), generator=generator)) if call.z else None
        for name in list(self.bases)[: max(0, len(self.bases) - 4 * HELD)]:
            del self.bases[name]
        return [x, y, idx, z, call.k, call.f]

    def _base(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.device)
        self.bases[f"{name} of call {self.calls}"] = tensor
        return tensor

    def _rows(self, name: str, kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
        if kind == "prev":
            for output in reversed(self.held[-1] if self.held else []):
                if isinstance(output, torch.Tensor) and output.shape == (n, D) and output.dtype == torch.float32:
                    return output.detach()
        if kind == "again" and self.last_x is not None and self.last_x.shape[0] == n:
            return self.last_x
        if kind == "cache":
            return self.model.cache[2 : 2 + n]
        if kind == "t":
            return self._base(name, torch.randn(D, n, generator=generator)).t()
        if kind in ("offset", "wide", "strided", "expanded"):
            shape = {"offset": (n + 3, D), "expanded": (1, D)}.get(kind, (n, 2 * D))
            base = self._base(name, torch.randn(shape, generator=generator))
            views = {"offset": base[2 : 2 + n], "wide": base[:, 4:12], "strided": base[:, ::2]}
            return views[kind] if kind in views else base.expand(n, D)
        return self._base(name, torch.randn(n, D, generator=generator))

    # -- what happens between calls, alike on both sides --------------------------------------------------------------

    def write_weight(self) -> None:
        with torch.no_grad():
            self.model.w.mul_(-0.75)
            self.model.b.add_(0.25)

    def data_weight(self) -> None:
        self.model.w.data = self.model.w.data.clone() * 0.5

    def new_weight(self) -> None:
        self.model.b = nn.Parameter(self.model.b.detach() + 1, requires_grad=self.model.b.requires_grad)

    def new_cache(self) -> None:
        self.model.cache = self.model.cache.detach() * 0.5

    def write_cache(self) -> None:
        with torch.no_grad():
            self.model.cache.add_(0.5)

    def write_held(self) -> None:
        with torch.inference_mode():
            for output in (o for outputs in self.held for o in outputs):
                if isinstance(output, torch.Tensor) and output.is_floating_point() and 0 not in output.stride():
                    output.fill_(0.125)


EVENTS = ("write_weight", "data_weight", "new_weight", "new_cache", "write_cache", "write_held")
COMPILED_EVENTS = ("reset", "decode")
