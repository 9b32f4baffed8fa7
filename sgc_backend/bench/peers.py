"""The ways to run a model whose sizes vary, each with what it tells about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from sgc_backend import OptionError, sgc_piecewise, stats

Forward = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[nn.Module, Any], "Peer"]  # of a model and a device module
OURS = {"ours-inductor": "inductor", "ours-eager": "eager"}  # and what compiles their pieces


class Peer:
    """A callable, and how much it recorded.

    Attributes:
        forward: [n, E] in and out, for any n.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def recordings(self) -> list[int] | None:
        """Recordings made of each graph's pieces, None where they can't be counted."""
        return None

    def uncaptured(self) -> int | None:
        """Calls so far that were to replay and ran uncaptured, None where that is not told."""
        return None


class Ours(Peer):
    """This package, with the default options but ``inner`` and what else is given."""

    def __init__(self, model: nn.Module, module: Any, inner: str, **options: Any) -> None:
        self._others = set(stats())
        options = {"inner": inner, "device_module": module, **options}
        super().__init__(torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options))

    def recordings(self) -> list[int]:
        return [sum(counted["captured"].values()) for counted in self._counted()]

    def uncaptured(self) -> int:
        return sum(sum(counted["uncaptured"].values()) for counted in self._counted())

    def _counted(self) -> list[dict[str, dict[str, int]]]:
        return [counted for name, counted in stats().items() if name not in self._others]


class ReduceOverhead(Peer):
    """torch's own graphs, one for each size."""

    def __init__(self, model: nn.Module, module: Any) -> None:
        super().__init__(torch.compile(model, mode="reduce-overhead", dynamic=True))

    def recordings(self) -> list[int] | None:
        try:
            from torch._inductor.cudagraph_trees import get_manager

            manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
            return [tree_size(manager.roots)] if manager is not None else [0]
        except (ImportError, AttributeError, TypeError):  # private: another version of torch keeps them elsewhere
            return None


def tree_size(children: dict[Any, list[Any]]) -> int:
    """How many recordings torch's trees hold: ``children`` and all below them."""
    nodes = [node for group in children.values() for node in group]
    return len(nodes) + sum(tree_size(node.children) for node in nodes)


def why_not_captured(call: Callable[[], Any], times: int = 4) -> str | None:
    """Call what torch is to record until it is steady; why it can't be measured, in one line, or None."""
    skips = counters["inductor"]["cudagraph_skips"]
    try:
        for _ in range(times):
            call()
    except Exception as error:  # whatever a peer raises is its cause, and ends its row alone
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return "torch captured nothing" if counters["inductor"]["cudagraph_skips"] > skips else None


def peers_on(device: str) -> dict[str, Make]:
    """What can run on ``device``, by name."""
    peers: dict[str, Make] = {"eager": lambda model, module: Peer(model)}
    # inductor needs a C++ compiler on the host
    if device == "cuda":
        peers |= {
            "inductor": lambda model, module: Peer(torch.compile(model, dynamic=True)),
            "reduce-overhead": ReduceOverhead,
            "ours-inductor": lambda model, module: Ours(model, module, OURS["ours-inductor"]),
        }
    return peers | {"ours-eager": lambda model, module: Ours(model, module, OURS["ours-eager"])}


def chosen_peers(names: str | None, device: str) -> dict[str, Make]:
    """Those of ``names``, separated by commas, in that order; None: all.

    Raises:
        OptionError: a name of none on ``device``.
    """
    known = peers_on(device)
    if names is None:
        return known
    asked = [name.strip() for name in names.split(",")]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise OptionError(f"--peers: no {', '.join(unknown)} on this device; there are: {', '.join(known)}")
    return {name: known[name] for name in asked}
