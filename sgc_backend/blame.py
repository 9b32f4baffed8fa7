"""Which custom operation it was that can't be captured, as an error's traceback tells."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from types import TracebackType

import torch
from torch import fx

TORCHS_OWN = ("aten", "prim", "prims", "_c10d_functional", "c10d_functional", "c10d")
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def blamed(error: BaseException, gms: Iterable[fx.GraphModule]) -> str | None:
    """The custom operation of one of ``gms`` that was called as ``error``, or its cause, was raised: "ns::op".

    What is run for a piece is generated code, whether a compiler's or the graph's own, and spells out what it calls.
    None where it called no custom operation, or where memory was short, which is nobody's fault.
    """
    ops = {name: called for gm in gms for name, called in _custom_ops(gm)}
    if not ops or any(isinstance(behind, OUT_OF_MEMORY) for behind in _chain(error)):
        return None
    at: BaseException | None = error
    while at is not None:
        for line in _lines(at.__traceback__):
            for name, called in ops.items():
                if f"{called}(" in line or f"{called}." in line:
                    return name
        at = at.__cause__
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and all that it was raised from, or while handling."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        at = left.pop()
        if at is not None and id(at) not in seen:
            seen.add(id(at))
            yield at
            left += [at.__cause__, at.__context__]


def _custom_ops(gm: fx.GraphModule) -> Iterator[tuple[str, str]]:
    # The bodies of higher-order operators are modules within it.
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            target = target.overloadpacket
        if isinstance(target, torch._ops.OpOverloadPacket):
            namespace, _, op = target._qualified_op_name.partition("::")
            if namespace not in TORCHS_OWN:
                yield target._qualified_op_name, f"torch.ops.{namespace}.{op}"


def _lines(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
