"""The kinds of a graph's inputs, and the buffers that staged ones are copied into.

======== ========================================================== =============================================
kind     what it is                                                 how a recording sees it
======== ========================================================== =============================================
static   parameter, buffer, or marked with mark_static_address      at its address, checked at every replay
staged   any other device tensor that a piece reads                 copied into a buffer of the pool
passed   tensor that only cuts read, or that is returned as it is   not at all: each call's own tensor is used
number   Python number that Dynamo wrapped in a 0-dim host tensor   by value, which is part of the key
size     int of a dynamic dimension                                 by value, which is part of the key
======== ========================================================== =============================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .facts import example, is_wrapped_number
from .interpret import label

STATIC, STAGED, PASSED, NUMBER, SIZE = "static", "staged", "passed", "number", "size"


@dataclass(frozen=True)
class Input:
    """One input of a graph.

    Attributes:
        name: the placeholder's name.
        index: position among the call's arguments.
        kind: see the module's table.
        written: the graph writes to it.
        label: what users call it (their expression for it), for messages.
        fake: its fake value, whose symbolic size and stride say what its buffer must be.
    """

    name: str
    index: int
    kind: str
    written: bool
    label: str
    fake: Any


def classify(gm: fx.GraphModule, read_by_pieces: Collection[str], written: Collection[str]) -> tuple[Input, ...]:
    """The inputs of ``gm`` in order, by kind. ``read_by_pieces`` holds names of placeholders that pieces take."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return tuple(
        Input(
            name=node.name,
            index=index,
            kind=_kind(node, node.name in read_by_pieces),
            written=node.name in written,
            label=label(node),
            fake=example(node),
        )
        for index, node in enumerate(placeholders)
    )


def _kind(node: fx.Node, read_by_piece: bool) -> str:
    if not isinstance(example(node), torch.Tensor):
        return SIZE
    if is_wrapped_number(node):
        return NUMBER
    if not read_by_piece:
        return PASSED
    return STATIC if is_static(node) else STAGED


def is_static(node: fx.Node) -> bool:
    """Whether Dynamo was told that a placeholder's address is fixed: parameters, buffers and marked tensors."""
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def has_overlap(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a strided tensor may share a byte; dimensions of stride 0 are not counted."""
    reach = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n > 1 and s != 0), key=lambda d: d[1]):
        if s < reach:
            return True
        reach = s * (n - 1) + reach
    return False


def span_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from a strided tensor's first element to the end of its last."""
    if 0 in size:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * dtype.itemsize


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a strided tensor fills its bytes without gaps or repeats, so that clone() keeps its strides."""
    reach = 1
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda d: d[1]):
        if s != reach:
            return False
        reach *= n
    return True


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its repeats: every expanded dimension (stride 0) cut to one element, so it can be written."""
    for dim, (n, s) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if s == 0 and n > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
