"""Which operation of a piece it was that can't be captured, as an error's traceback tells."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import fx

TORCHS_OWN = ("aten", "prim", "prims", "_c10d_functional", "c10d_functional", "c10d")


def blamed(error: BaseException, gm: fx.GraphModule) -> str | None:
    """The custom operation of ``gm`` that was called as ``error`` was raised, as "ns::op"; None where none is named.

    What is run for a piece is generated code, whether a compiler's or the graph's own, and spells out what it calls.
    """
    ops = {}
    for node in gm.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            target = target.overloadpacket
        if isinstance(target, torch._ops.OpOverloadPacket):
            name = target._qualified_op_name
            namespace, _, op = name.partition("::")
            if namespace not in TORCHS_OWN:
                ops[f"torch.ops.{namespace}.{op}"] = name
    if not ops:
        return None
    for line in _lines(error.__traceback__):
        for called, name in ops.items():
            if f"{called}(" in line or f"{called}." in line:
                return name
    return None


def _lines(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
