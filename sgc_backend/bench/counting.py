"""Count what a call does on the emulated device, where its time would mean nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves

from sgc_backend import emulated

from .timing import no_collections

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
        allocations: tensors with memory of their own that ops outside of graphs returned, clones among them.
    """

    graphs: int
    launches: int
    copies: int
    clones: int
    ops: int
    allocations: int

    def as_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return asdict(self)


def count(call: Callable[[], Any]) -> Counts:
    """Call ``call`` once. It must not enter Dynamo, which leaves a function uncompiled that it meets in here."""
    stats = emulated.stats()
    graphs, launches = stats.replays, stats.launches
    with _Seen() as seen:
        call()
    did = seen.copies, seen.clones, seen.ops, seen.allocations
    return Counts(stats.replays - graphs, stats.launches - launches, *did)


def functions(call: Callable[[], Any]) -> Counter[str]:
    """Call ``call`` once and count the Python functions of this package that it entered, by "file: name".

    What runs whatever torch is installed, and on every device. So left out are the emulated device's own files, which
    stand for a driver; benchmarks and demos; what builds of torch with CUDA have in C; what depends on where memory
    happens to lie; and comprehensions, which are no functions from Python 3.12 on, with generator expressions. Another
    generator counts each time it goes on.
    """
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            path = Path(code.co_filename)
            if path.parent == _PACKAGE and not path.stem.startswith(("_", "emulated")):
                name = f"{path.stem}: {code.co_name}"
                if name not in _NOT_COUNTED and not name.endswith(("comp>", "<genexpr>")):
                    found[name] += 1

    before = sys.getprofile()
    with no_collections():  # finalizers of what others left would count
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


_PACKAGE = Path(emulated.__file__).parent
_NOT_COUNTED = {
    "device: check",  # `pointer_check`'s, which torch has in C where it was built with CUDA
    "plan: _move_out",  # entered where an input happens to lie between two segments of the pool
}


class _Seen(dispatch.TorchDispatchMode):
    """Counts the ops of this thread. A replay runs without modes, so nothing recorded is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.clones = self.ops = self.allocations = 0

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
        result = func(*args, **(kwargs or {}))
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        made = {_storage(value) for value in tree_leaves(result) if isinstance(value, torch.Tensor)}
        self.allocations += len(made - given)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
