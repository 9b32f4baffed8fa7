"""Record one callable into one graph: the only place that opens a capture. Transactional.

Note [Unowned tensors]
    Memory that a recording writes must stay assigned to it only while recordings are still being made that must not
    reuse it; afterwards holding it would make the pool grow with every size. So while a key is being recorded every
    result is held strongly until the last recording that reads it is made, and what stays behind are *unowned* tensors:
    an address with a shape, no reference count. One may be read only where the same replay has just rewritten its
    bytes: by a later step of the plan, or by the caller until the next replay from the pool.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .device import Device
from .errors import CaptureError
from .pool import Entry, GraphPool


def record(
    pool: GraphPool, fn: Callable[[], Any], name: str, key: str = "", part: str = "", *, owner: Any = None
) -> tuple[Any, Any]:
    """Record ``fn()`` on the pool's capture stream into a new graph; nothing is executed.

    Args:
        pool: the pool to draw memory from.
        fn: called once, under no_grad.
        name, key, part: of the owner, its key and the piece, for errors and for the memory report.
        owner: when it dies the pool lets go of the graph; None: only ``pool.drop(graph)`` makes it.

    Returns:
        ``(graph, out)``: the graph, and ``fn``'s result as it is, holding pool memory.

    Raises:
        CaptureError: the capture was invalidated or couldn't be begun or ended; ``__cause__`` is the real reason.
        Exception: what ``fn`` itself raised without disturbing the capture, unchanged.

    After an error no memory is held, the pool and the random generator are usable, and nothing is recorded.
    """
    what = ", ".join(text for text in (name, key and f"key {key}", part) if text)
    device = pool.device
    held, free, reserved = pool.reserved_bytes(), device.free_bytes(), device.allocator_bytes()
    try:
        graph, out = _record(pool, fn, what)
    except BaseException:
        pool.trim()
        raise
    pool.add(graph, owner)
    outside = free - device.free_bytes() - (device.allocator_bytes() - reserved)
    pool.ledger[id(graph)] = Entry(name, key, part, pool.reserved_bytes() - held, max(outside, 0))
    return graph, out


def _record(pool: GraphPool, fn: Callable[[], Any], what: str) -> tuple[Any, Any]:
    device = pool.device
    with pool.capturing(), torch.no_grad():
        graph = device.new_graph()
        try:
            device.capture_begin(graph, pool.handle)
        except Exception as error:
            raise CaptureError(f"{what}: the capture could not be begun: {error}") from error
        try:
            out = fn()
        except BaseException as error:
            intact = _abandon(pool, graph)
            _let_go(error)
            # An interrupt, or an error of the user's own that left the capture whole, is theirs to see as it is.
            if intact or not isinstance(error, Exception):
                raise
            raise CaptureError(f"{what}: can't be captured: {error}") from error
        try:
            device.capture_end(graph)
        except Exception as error:
            out = None
            device.recover_failed_capture(graph, pool.handle)
            graph.reset()
            raise CaptureError(f"{what}: the capture was invalidated: {error}") from error
    return graph, out


def _abandon(pool: GraphPool, graph: Any) -> bool:
    """End a capture whose callable raised and drop the graph. Returns whether the capture was still valid."""
    try:
        pool.device.capture_end(graph)
    except Exception:
        pool.device.recover_failed_capture(graph, pool.handle)
        return False
    finally:
        graph.reset()
    return True


def _let_go(error: BaseException | None) -> None:
    """Clear the locals of the frames that ``error`` came through: they hold tensors in the pool's memory, and whoever
    keeps the error would keep that memory from being given back."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def unowned_like(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """An unowned tensor over ``tensor``'s bytes; see Note [Unowned tensors]."""
    plain = device.unowned(tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)
    return with_bits(plain, tensor.is_conj(), tensor.is_neg())


def with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` as the view that conj() or .imag of one gives: the same bytes, read with another sign."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


def unowned_tree(device: Device, tree: Any) -> Any:
    """``tree`` (any pytree) with every tensor of ``device`` replaced by an unowned one."""
    return pytree.tree_map_only(torch.Tensor, lambda t: unowned_like(device, t) if device.owns(t) else t, tree)
