"""The dispatch mode of the emulated device that runs a thread's ATen ops in a pool's memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_map_only

from ._arena import Arena, EmulatedCaptureError, Handle
from ._launch import over, tensors
from ._op_plan import Leaf, Op, read_schema

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@contextlib.contextmanager
def outside(mode: dispatch.TorchDispatchMode) -> Iterator[None]:
    """Take `mode`, and those entered after it, off this thread's stack inside of the block."""
    above = []
    while (top := dispatch._get_current_dispatch_mode()) is not None and top is not mode:
        above.append(dispatch._pop_mode())
    # Left in full, and not only popped: Dynamo looks at flags that entering a mode sets.
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
        for other in reversed(above):
            dispatch._push_mode(other)


def leave(mode: dispatch.TorchDispatchMode) -> None:
    """Take `mode` off this thread's stack for good, even where modes entered after it are still on."""
    above = []
    while (top := dispatch._get_current_dispatch_mode()) is not None and top is not mode:
        above.append(dispatch._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        dispatch._push_mode(other)


class PoolMode(dispatch.TorchDispatchMode):
    """Runs this thread's ops for real, and moves what they return into a pool.

    `where()` gives the id of the thread's current stream, `usable()` whether random ops may run, and
    `opaque_ops` holds the names of the ops that are not looked into.
    """

    supports_higher_order_operators = True  # or torch refuses them all, before this is asked

    def __init__(
        self,
        arena: Arena,
        pool: Handle,
        where: Callable[[], int],
        usable: Callable[[], bool],
        opaque_ops: set[str],
    ) -> None:
        super().__init__()
        self.arena, self.pool = arena, pool
        self.where, self.usable, self.opaque_ops = where, usable, opaque_ops
        self.thread = threading.get_ident()

    def applies(self) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass unwraps itself, and its inner ops come back here
        if not self.applies() or any(t.device.type != "cpu" for t in tensors((args, kwargs))):
            return func(*args, **kwargs)
        op = read_schema(func)
        if op.name in self.opaque_ops or func.name() in self.opaque_ops:
            return self.opaque(func, args, kwargs)
        if op.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if op.random and not self.usable():
            raise EmulatedCaptureError(
                f"Offset increment outside graph capture encountered unexpectedly ({op.name}): an earlier "
                "capture failed and left the random generator in its capture state; recover_generator() cures it"
            )
        if op.custom:
            return self.custom(op, func, args, kwargs)
        if op.name in ("aten::lift_fresh", "aten::lift"):
            # A constant is born outside of the pool; what the caller gets must be a tensor of the pool.
            func = torch.ops.aten.clone.default
            op = read_schema(func)
        return self.launch(op, func, args, kwargs)

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...]) -> Any:
        if func.name() != "invoke_subgraph":
            raise NotImplementedError(f"{func.name()} can't be recorded on the emulated device")
        body, _, *operands = args
        with self:
            return body(*operands)

    def launch(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._adopt(func(*args, **kwargs), (args, kwargs))

    def custom(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            result = func.redispatch(_CPU, *args, **kwargs)
        return self._adopt(result, (args, kwargs))

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._adopt(fn(*args, **kwargs), (args, kwargs))

    def _adopt(self, result: Any, given: Any) -> Any:
        kept = {tensor.untyped_storage()._cdata for tensor in tensors(given)}
        moved: dict[int, torch.UntypedStorage] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            old = tensor.untyped_storage()
            if tensor.device.type != "cpu" or old._cdata in kept or self.arena.segment_of(old.data_ptr()):
                return tensor
            new = moved.get(old._cdata)
            if new is None:
                new = moved[old._cdata] = self.arena.storage(self.pool, self.where(), old.nbytes())
                ctypes.memmove(new.data_ptr(), old.data_ptr(), old.nbytes())
            return over(new, Leaf.of(tensor))

        return tree_map_only(torch.Tensor, move, result)
