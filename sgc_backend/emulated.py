"""The device that needs no device: torch.cuda's graph API over CPU tensors, with what makes CUDA graphs hard.

The module itself is a device module: pass `sgc_backend.emulated` where `torch.cuda` would be passed.

- A capture executes nothing. What it recorded is replayed on the same addresses; Python doesn't run again.
- Tensors born in a capture live in the pool's arena, which reuses blocks per stream (`_arena.py`).
- What a real capture forbids raises `EmulatedCaptureError`, and leaves behind what a real one leaves behind.
- Work that a real device could run at the same time, and that would then corrupt a pool, raises
  `EmulatedRaceError`. Here everything runs in the order of the calls, so order is kept account of with a
  vector clock per stream: what a stream has launched, and what it has waited for.

Every CPU tensor is a device tensor here: a sync on a tensor that would live on the host is refused as well.
What escapes the dispatcher (numpy(), printing, data_ptr() readers, tolist() but in the body of a custom op) can't be
seen and is not refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _streams
from ._arena import BLOCK_ROUND, SEGMENT_GRANULE, EmulatedCaptureError, Handle
from ._graph import CUDAGraph, EmulatedRaceError
from ._pool_mode import PoolMode, outside
from ._streams import (
    Event,
    Stats,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)
from .errors import OptionError

__all__ = [
    "BLOCK_ROUND",
    "SEGMENT_GRANULE",
    "CUDAGraph",
    "EmulatedCaptureError",
    "EmulatedRaceError",
    "Event",
    "Graph",
    "Stats",
    "Stream",
    "allocate_to_pool",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "end_allocate_to_pool",
    "graph_pool_handle",
    "in_pool",
    "is_available",
    "is_current_stream_capturing",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "opaque",
    "random_usable",
    "recover_generator",
    "release_pool",
    "reset_emulation",
    "set_stream",
    "stats",
    "stream",
    "synchronize",
    "treat_as_opaque",
]


def reset_emulation() -> None:
    """Forget all pools, streams, poison and counters. For tests; end captures first.

    Graphs and tensors made before stay readable, but belong to the forgotten device. A capture that this
    thread left open is abandoned.
    """
    old = _streams.state()
    for mode in reversed(getattr(old.thread, "modes", [])[:]):
        old.exit(mode)
    _streams.renew()


def stats() -> Stats:
    """The live counters."""
    return _streams.state().stats


# -- the device ----------------------------------------------------------------------------------------


def is_available() -> bool:
    """True: it needs no device."""
    return True


def device_count() -> int:
    """One."""
    return 1


def current_device() -> int:
    """Zero."""
    return 0


# -- graphs --------------------------------------------------------------------------------------------


def graph_pool_handle() -> Handle:
    """A new handle ``(0, n)``; the pool itself appears with the first capture into it."""
    return (0, next(_streams.state().numbers))


def is_current_stream_capturing() -> bool:
    """Whether the current stream takes part in a capture, valid or not."""
    return _streams.state().current() in _streams.state().captures


Graph = CUDAGraph


def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make `fn` one launch of a recording: it is called again at every replay, with its recorded arguments.

    For callables that can't be looked into, such as code that inductor compiled. `fn` takes tensors and plain
    values, in lists too, and returns tensors, plain values and None in any nesting. Plain values are frozen
    at capture.

    Under capture `fn` is called once on copies of its arguments (zeros for those in a pool), to learn what it
    returns: an output that aliases an argument comes back as that view of the real argument, others get memory
    from the pool, sharing storage as they did. The random generator is put back. Without a capture `fn` is
    simply called; inside of `allocate_to_pool` its new tensors are then moved to the pool.

    Raises:
        OptionError: `fn` is no callable.
    """
    if not callable(fn):
        raise OptionError(f"opaque: fn must be a callable, got {type(fn).__name__}")

    def call(*args: Any, **kwargs: Any) -> Any:
        state = _streams.state()
        mode = state.mode()
        if mode is None or not mode.applies():
            return fn(*args, **kwargs)
        with outside(mode):
            return mode.opaque(fn, args, kwargs)

    if hasattr(fn, "__name__"):
        functools.update_wrapper(call, fn, updated=())
    if getattr(fn, "_boxed_call", False):
        call._boxed_call = True  # type: ignore[attr-defined]
    return call


def treat_as_opaque(name: str) -> None:
    """Record the op `name` ("ns::op" or "ns::op.overload") as one launch, without looking into its body.

    An op whose body launches nothing through torch is recognised without this, but only by running the body
    once, on whatever bytes the pool holds; name it here when that may crash.

    Raises:
        OptionError: it is no such name.
    """
    if not isinstance(name, str) or "::" not in name:
        raise OptionError(f"an op to treat as opaque must be named 'ns::op' or 'ns::op.overload', got {name!r}")
    _streams.state().opaque_ops.add(name)


# -- memory --------------------------------------------------------------------------------------------


def memory_reserved(device: Any = None) -> int:
    """Bytes of all segments of all pools."""
    return _streams.state().arena.reserved()


def memory_allocated(device: Any = None) -> int:
    """Bytes of all blocks that a living tensor holds."""
    return sum(segment["allocated_size"] for segment in _streams.state().arena.snapshot())


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of all pools by address, in the format of `torch.cuda.memory_snapshot`, sizes in bytes."""
    return _streams.state().arena.snapshot()


def empty_cache() -> None:
    """Give back the free segments of pools that no graph uses."""
    _streams.state().arena.trim()


def in_pool(tensor: torch.Tensor) -> Handle | None:
    """The pool whose memory `tensor` lies in, or None; None for a tensor without bytes."""
    segment = _streams.state().arena.segment_of(tensor.untyped_storage().data_ptr())
    return None if segment is None else segment.pool


@contextlib.contextmanager
def allocate_to_pool(pool: Handle) -> Iterator[None]:
    """Execute this thread's ops as usual, but let what they make live in `pool`, on the current stream.

    A user of the pool while open, like torch's begin, end and release in one.

    Raises:
        EmulatedCaptureError: this thread is capturing, or is inside of another `allocate_to_pool`; the pool
            is being recorded to or has lost its graphs; or, from an op, the random generator is stuck.
        OptionError: `pool` is no handle.
    """
    state, handle = _streams.state(), _checked(pool)
    if state.mode() is not None:
        raise EmulatedCaptureError("allocate_to_pool inside of a capture or of another allocate_to_pool")
    state.arena.begin(handle)
    mode = PoolMode(state.arena, handle, state.current, state.usable, state.opaque_ops)
    state.enter(mode)
    try:
        yield
    finally:
        state.exit(mode)
        state.arena.end(handle)
        state.arena.release(handle)


def _checked(pool: Any) -> Handle:
    if not isinstance(pool, (tuple, list)) or len(pool) != 2 or not all(isinstance(k, int) for k in pool):
        raise OptionError(f"a pool must be a handle of graph_pool_handle(), two ints, got {pool!r}")
    return tuple(pool)


def set_expandable_segments(on: bool) -> bool:
    """Whether new segments can grow in place, as with the CUDA allocator's setting of that name; what it was."""
    arena = _streams.state().arena
    was, arena.expandable = arena.expandable, on
    return was


def begin_allocate_to_pool(device: Any, pool: Handle) -> None:
    """Add a use of `pool` and route this device's captures to it until `end_allocate_to_pool`."""
    _streams.state().arena.begin(_checked(pool))


def end_allocate_to_pool(device: Any, pool: Handle) -> None:
    """End the recording state that a failed capture left `pool` in."""
    _streams.state().arena.end(_checked(pool))


def release_pool(device: Any, pool: Handle) -> None:
    """Drop one use of `pool`, such as a failed capture leaves behind; unused, it is given back as it empties."""
    _streams.state().arena.release(_checked(pool), give_back=True)


def random_usable() -> bool:
    """Whether random ops may run: not after a failed capture, until recovered or until one succeeds."""
    return _streams.state().usable()


def recover_generator() -> None:
    """Put the random generator right after a failed capture."""
    _streams.state().generator_stuck = False
