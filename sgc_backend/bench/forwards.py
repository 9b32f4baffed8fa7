"""One decoder, recorded in every way that the package has, and the bare work that each way can't do without.

The decoder's attention writes into a buffer that its caller allocated: a cut or a break without a copy.

n tokens, E hidden, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sgc_backend import (
    BreakableCudaGraphBackend,
    FullCudaGraphBackend,
    ShapeKey,
    TcPiecewiseCudaGraphBackend,
    sgc_piecewise,
)
from sgc_backend.executables import plain
from sgc_backend.seen import Replayed, calls_seen

from .agree import TOLERANCE
from .attention import CONTEXT, Decode, Prefill, attend, attend_as_break, attend_in_function
from .breakable_peer import NAME as PEER
from .breakable_peer import breakable_peer
from .decoder import Size, decoder, dtype_on

COPY_IN_TURN, IN_TURN = "one packed copy, then bare replay", "bare replays and cut ops in turn"
UNCHECKED = "full, check_addresses=False"
FUNCTIONS = "breakable (functions)"
Call = Callable[[], Any]


class Forwards:
    """One decoder in one phase, recorded in every way for every size."""

    def __init__(
        self, phase: str, sizes: tuple[int, ...], size: Size, module: Any, device: str, inners: tuple[str, ...]
    ) -> None:
        self.phase, self.size, self.synchronize = phase, size, module.synchronize
        most = max(sizes)
        head = size.hidden // size.heads
        like = {"device": device, "dtype": dtype_on(device)}
        # One row more than the largest size, or Dynamo compiles that one apart.
        self.given, self.buffer = (torch.zeros(most + 1, size.hidden, **like) for _ in range(2))
        with torch.device(device):
            cache = (most, size.heads, CONTEXT, head)
            peer = breakable_peer(device)
            marked = [attend_as_break, attend_in_function]
            attends = [attend, *marked, *([peer.attend] if peer is not None else [])]
            ways = [Decode(way, cache) if phase == "decode" else Prefill(way) for way in attends]
        self.model, marked, functions, *others = (decoder(size, device, way) for way in ways)
        for other in (marked, functions, *others):
            other.load_state_dict(self.model.state_dict(), assign=True)  # the same weights and the same cache
        # q, k and v as the layers have them, of each layer: one set for all would stay in the host's caches
        self.qkv = [torch.zeros(most, 3, size.heads, head, **like) for _ in self.model]
        self.out = [torch.zeros(most, size.heads, head, **like) for _ in self.model]

        self.full, self.breakable = FullCudaGraphBackend(module), BreakableCudaGraphBackend(module)
        self.functions = BreakableCudaGraphBackend(module, name="breaks in functions")
        self.trusting = FullCudaGraphBackend(module, name="trusting", check_addresses=False)
        cut = {"cut_ops": ["sgc_bench::attend"]}  # at size 1 too, where no dimension is dynamic
        options = {"inner": "eager", **cut}
        self.tc = TcPiecewiseCudaGraphBackend(self.model, capture_sizes=sizes, options=options, device_module=module)
        settings = {**cut, "capture_sizes": sizes, "device_module": module}
        self.compiled = {
            inner: torch.compile(self.model, backend=sgc_piecewise, dynamic=True, options={**settings, "inner": inner})
            for inner in inners
        }
        self.peers: dict[str, dict[int, Call]] = {}
        for other in others:
            self.peers[PEER] = {n: peer.record(partial(other, self.buffer[:n])) for n in sizes}
        wrappers = (self.full, self.trusting, self.breakable, self.functions, self.tc)
        with contextlib.ExitStack() as sessions:
            for wrapper in wrappers:
                sessions.enter_context(wrapper.capture_session())
            for n in sizes:
                held = self.buffer[:n]
                self.full.capture_one(n, lambda held=held: self.model(held))
                self.trusting.capture_one(n, lambda held=held: self.model(held))
                self.breakable.capture_one(n, lambda held=held: marked(held))
                self.functions.capture_one(n, lambda held=held: functions(held))
                self.tc.capture_one(n, lambda held=held: self.tc.compiled(held))
                for compiled in self.compiled.values():
                    compiled(self.given[:n])

    def rows(self, n: int) -> dict[str, Call]:
        """The ways to run ``n`` tokens, by name."""
        given, copy = self.given[:n], self._copy(n)

        def full(wrapper: FullCudaGraphBackend) -> Any:
            copy()
            return wrapper.replay(n)

        return {
            "eager": lambda: self.model(given),
            "full": partial(full, self.full),
            UNCHECKED: partial(full, self.trusting),
            "breakable": lambda: self.breakable.replay(n),
            FUNCTIONS: lambda: self.functions.replay(n),
            "tc_piecewise": lambda: self.tc.replay(n),
            **{name: recorded[n] for name, recorded in self.peers.items()},
            **{piecewise(inner): lambda c=compiled: c(given) for inner, compiled in self.compiled.items()},
        }

    def floors(self, n: int) -> dict[str, Call]:
        """What the rows can't go below, by name."""
        copy, bare = self._copy(n), self.full.graph(n).replay
        every_cut = self._cuts(n)

        def cuts() -> None:
            for cut in every_cut:
                cut()

        def bare_replays(replays: list[Call]) -> None:
            for replay in replays:
                replay()

        def in_turn(replays: list[Call]) -> None:
            for replay, cut in zip(replays[:-1], every_cut, strict=True):
                replay()
                cut()
            replays[-1]()

        floors: dict[str, Call] = {
            "bare replay": bare,
            "one packed copy": copy,
            COPY_IN_TURN: lambda: (copy(), bare()),
            "cut ops alone": cuts,
        }
        for name, graphs in self._graphs(n).items():
            if len(graphs) != self.size.layers + 1:
                raise RuntimeError(f"{name} made {len(graphs)} graphs of {self.size.layers} layers, expected one more")
            replays = [plain(graph).replay for graph in graphs]
            floors[f"bare replays of {name}"] = partial(bare_replays, replays)
            floors[f"{IN_TURN} of {name}"] = partial(in_turn, replays)
        return floors

    def check(self, n: int) -> dict[str, float]:
        """Compare every row with eager: bitwise where the same kernels run, else by the relative error returned.

        The input is a new one, so that a recording that reads an old one is found.

        Raises:
            RuntimeError: a row differs.
        """
        self.given.copy_(torch.randn(self.given.shape))
        rows = self.rows(n)
        expected = rows.pop("eager")()
        errors = {}
        for name, row in rows.items():
            self.buffer.copy_(self.given)
            if name in ("full", UNCHECKED):
                self.buffer.zero_()  # it is to fill the buffer itself
            got = row()
            error = float((got.double() - expected.double()).norm() / expected.double().norm())
            allowed = TOLERANCE[got.dtype] if name == piecewise("inductor") else 0.0
            if not (torch.equal(got, expected) if allowed == 0 else error <= allowed):
                raise RuntimeError(
                    f"{name}, {self.phase} {n}: differs from eager by {error:.2g} of its length, allowed is "
                    f"{allowed:g}; its figures would mean nothing"
                )
            errors[name] = error
        self.buffer.copy_(self.given)
        return errors

    def _copy(self, n: int) -> Call:
        held, given = self.buffer[:n], self.given[:n]
        return lambda: held.copy_(given)

    def _cuts(self, n: int) -> list[Call]:
        """Each layer's attention on tensors of its own."""
        given = []
        for layer, qkv, out in zip(self.model, self.qkv, self.out, strict=True):
            q, k, v = qkv[:n].unbind(1)
            if self.phase == "decode":
                k, v = layer.attend.k_cache, layer.attend.v_cache
            given.append((q, k, v, out[:n]))
        return [partial(attend, *tensors) for tensors in given]

    def _graphs(self, n: int) -> dict[str, list[Any]]:
        """Each recording's graphs in order, by the name of its row."""
        graphs = {
            "breakable": self.breakable._found(ShapeKey(n)).graphs(),
            FUNCTIONS: self.functions._found(ShapeKey(n)).graphs(),
            "tc_piecewise": self.tc._found(ShapeKey(n)).plan.graphs,
        }
        for name, replayed in self._replayed(n).items():
            graphs[name] = [graph for r in replayed for graph in r.plan.graphs]
        return graphs

    def checks(self, n: int) -> dict[str, Call]:
        """What is looked at before anything is replayed, by name."""
        ((name, (replayed, *_)), *_) = self._replayed(n).items()
        graph, args, plan = replayed.graph, replayed.args, replayed.plan
        return {
            f"{name}: key": lambda: graph._key(args),
            f"{name}: key, plan and addresses": lambda: graph._plan(graph._key(args), args),
            f"{name}: overlap of inputs": lambda: plan.writes and plan.aliased(args),
            f"{name}: inputs in the pool": lambda: plan.writes and plan.writes_into_pool(args),
            "wrappers: what moved": self.full._found(n).reached.moved,
        }

    def plans(self, n: int) -> dict[str, Call]:
        """What the piecewise rows run behind Dynamo's guards, by name."""
        return {
            name: lambda all=all: [r.plan.run(r.args, r.sizes) for r in all] for name, all in self._replayed(n).items()
        }

    def _replayed(self, n: int) -> dict[str, list[Replayed]]:
        found = {}
        for inner, compiled in self.compiled.items():
            with calls_seen() as seen:
                compiled(self.given[:n])
            found[piecewise(inner)] = seen.replayed
        return found


def piecewise(inner: str) -> str:
    """The name of the compiled module's row."""
    return "piecewise" if inner == "eager" else f"piecewise ({inner})"
