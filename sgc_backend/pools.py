"""The process's pools: one per device and lane, made on first use, given back all at once."""

from __future__ import annotations

import threading
from typing import Any

from .device import Device
from .devices import device_of
from .errors import OptionError
from .pool import GraphPool
from .recorders import recorders

_pools: dict[tuple[str, int, str | None], GraphPool] = {}
_pools_lock = threading.RLock()


def checked_lane(lane: str | None) -> str | None:
    """``lane``; raises OptionError where it is neither None nor a non-empty str."""
    if lane is not None and (not isinstance(lane, str) or not lane):
        raise OptionError(f"lane must be None or a non-empty str, got {lane!r}")
    return lane


def pool_of(device: Device, lane: str | None = None) -> GraphPool:
    """The process's pool on ``device``, made on first use.

    Raises:
        OptionError: ``lane`` is neither None nor a non-empty str.
    """
    key = (device.name, device.index, checked_lane(lane))
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = GraphPool(device, lane)
    return pool


def get_or_create_global_graph_memory_pool(device_module: Any, *, lane: str | None = None) -> Any:
    """The pool handle that every capture on ``device_module``'s current device draws from, made on first use.

    Args:
        device_module: ``torch.cuda`` or ``sgc_backend.emulated``, or its name.
        lane: None for the pool that all phases share. A name gives a pool (and a capture stream) of its own, for a
            phase whose replays may overlap the others'; it shares no memory with them.

    Returns:
        What ``device_module.graph_pool_handle()`` returns: pass it as ``pool=`` to a capture of your own. Capture on
        `get_or_create_global_capture_stream` too, or little is shared (Note [Why one stream] in pool.py). Never None.
        The same until ``sgc_backend.reset()``; on CUDA also until a pool whose recordings came in any order falls idle
        (Note [Growing in place] in growing.py).

    Raises:
        OptionError: ``device_module`` is not a supported device module, or ``lane`` is no name.
    """
    return pool_of(device_of(device_module), lane).handle


def get_or_create_global_capture_stream(device_module: Any, *, lane: str | None = None) -> Any:
    """The stream of every capture on ``device_module``'s current device, made on first use with the pool of ``lane``.

    A ``device_module.Stream``, the same until ``sgc_backend.reset()``; see Note [Why one stream] in pool.py.

    Raises:
        OptionError: ``device_module`` is not a supported device module, or ``lane`` is no name.
    """
    return pool_of(device_of(device_module), lane).stream


def static_output_generation(device_module: Any, *, lane: str | None = None) -> int:
    """A number that changes whenever static outputs may have been overwritten.

    Read it behind the call that returned them: they are what they were as long as it is the same. It changes with every
    replay from the pool of ``device_module``'s current device and ``lane``, every capture into it, and reset().

    Raises:
        OptionError: ``device_module`` is not a supported device module, or ``lane`` is no name.
    """
    return pool_of(device_of(device_module), lane).written


def pools() -> list[GraphPool]:
    """Every open pool."""
    with _pools_lock:
        return list(_pools.values())


def release_everything() -> None:
    """Release every recording and every pool's memory; handles change, later captures start afresh. Idempotent."""
    for pool in pools():
        pool.check_closable()
    for recorder in recorders():
        recorder.release()
    with _pools_lock:
        doomed = list(_pools.values())
        _pools.clear()
    for pool in doomed:
        pool.close()
