"""Count what a call does on the emulated device, where its time would mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils import _python_dispatch as dispatch

from sgc_backend import emulated

# They launch nothing: views, and memory without contents.
_FREE = frozenset(("aten::detach", "aten::alias", "aten::empty", "aten::empty_like", "aten::empty_strided"))


@dataclass(frozen=True)
class Counts:
    """What one call did.

    Attributes:
        graphs: graph replays.
        launches: recorded launches that those executed.
        copies: tensors copied into existing ones, outside of graphs and of other ops.
        clones: tensors copied into new ones, likewise.
        ops: all other ops outside of graphs that launch something; a custom op is one.
    """

    graphs: int
    launches: int
    copies: int
    clones: int
    ops: int

    def as_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return asdict(self)


def count(call: Callable[[], Any]) -> Counts:
    """Call ``call`` once. It must not enter Dynamo, which leaves a function uncompiled that it meets in here."""
    stats = emulated.stats()
    graphs, launches = stats.replays, stats.launches
    with _Seen() as seen:
        call()
    return Counts(stats.replays - graphs, stats.launches - launches, seen.copies, seen.clones, seen.ops)


class _Seen(dispatch.TorchDispatchMode):
    """Counts the ops of this thread. A replay runs without modes, so nothing recorded is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.clones = self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "aten::copy_":
            self.copies += 1
        elif name == "aten::_foreach_copy_":
            self.copies += len(args[0])
        elif name == "aten::clone":
            self.clones += 1
        elif not (func.is_view or name in _FREE):
            self.ops += 1
        return func(*args, **(kwargs or {}))
