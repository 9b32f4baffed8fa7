"""The seam: everything that is asked of a device module.

A *device module* is `torch.cuda` or `sgc_backend.emulated`: an object with graph_pool_handle(), CUDAGraph, Stream,
Event, current_stream() and the rest of torch.cuda's graph API. A `Device` is one device of such a module, with the
private functions that capturing needs. Only cuda_device.py and devices.py name torch.cuda.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Device(abc.ABC):
    """One device of a device module.

    Attributes:
        module: the device module.
        index: device index, int ≥ 0.
        type: torch device type of its tensors ("cuda", "cpu" for the emulated device).
        name: what users read: "cuda", "emulated".
        current_raw_stream: ``() -> int``, an id of the current stream, as cheap as the device can make it.
    """

    type: str
    name: str
    current_raw_stream: Callable[[], int]

    def __init__(self, module: Any, index: int) -> None:
        self.module = module
        self.index = index
        self.torch_device = torch.device("cpu") if self.type == "cpu" else torch.device(self.type, index)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lives on this device."""
        device = tensor.device
        return device.type == self.type and (device.index is None or device.index == self.index)

    # -- streams -----------------------------------------------------------------------------------------------------

    def current_stream(self) -> Any:
        return self.module.current_stream()

    def new_stream(self) -> Any:
        return self.module.Stream()

    def new_event(self) -> Any:
        return self.module.Event()

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self.module.stream(stream)

    def set_stream(self, stream: Any) -> None:
        self.module.set_stream(stream)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Have the memory of ``tensor`` reused only behind what is on ``stream`` when it is freed."""

    def synchronize(self) -> None:
        self.module.synchronize()

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def generator(self) -> torch.Generator:
        """The default random generator."""
        return torch.default_generator

    def is_capturing(self) -> bool:
        return self.module.is_current_stream_capturing()

    # -- graphs ------------------------------------------------------------------------------------------------------

    def new_pool_handle(self) -> Any:
        return self.module.graph_pool_handle()

    def new_graph(self, *, kept: bool = False) -> Any:
        """A graph to capture into; ``kept``: one for `executables`."""
        return self.module.CUDAGraph()

    def executables(self) -> Any:
        """What lets recorded graphs share executables (`Executables`), for one pool; None where it can't be done."""
        return None

    def capture_begin(self, graph: Any, handle: Any) -> None:
        # thread_local: another thread's allocations and queries must neither break a capture nor be broken by it.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def capture_end(self, graph: Any) -> None:
        graph.capture_end()

    @abc.abstractmethod
    def fill_if_empty(self, graph: Any) -> bool:
        """Whether the open capture into ``graph`` holds nothing; if so it gets a harmless node where the end of an
        empty capture would warn."""

    @abc.abstractmethod
    def recover_failed_capture(self, graph: Any, handle: Any) -> None:
        """Undo what an invalidated capture leaves behind: the allocators' redirection, the generator's state.

        Call on the capture stream after ``capture_end(graph)`` raised; ``graph`` then can be reset.
        """

    @abc.abstractmethod
    def allocating_to(self, handle: Any) -> contextlib.AbstractContextManager[None]:
        """While open, this thread's new tensors on the current stream come from the pool ``handle``."""

    def renew_pool(self, handle: Any) -> None:
        """Give back the whole memory of a pool that nothing uses any more but one graph, and keep it usable.

        That graph must never be replayed again: what it wrote to is gone.
        """
        self._release(handle)  # the graph's use of the pool: at zero uses the allocator may give memory back
        self.module.empty_cache()
        self._begin_allocating(handle)  # one use again, on behalf of that graph
        self._end_allocating(handle)

    @abc.abstractmethod
    def _begin_allocating(self, handle: Any) -> None: ...

    @abc.abstractmethod
    def _end_allocating(self, handle: Any) -> None: ...

    @abc.abstractmethod
    def _release(self, handle: Any) -> None: ...

    grows_for_good = False  # whether a pool that grew in place can't be renewed under its handle

    def grow_in_place(self, on: bool) -> None:
        """Whether the allocator's new segments can grow, so that recordings of any order share one span."""

    def prepare(self) -> None:
        """Make what the device needs of its own, before anything is captured."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody holds; 0 where that is not a matter of the device's."""
        return 0

    def allocator_bytes(self) -> int:
        """Memory that the allocator holds from the device, in all pools."""
        return self.module.memory_reserved()

    def allocator_mark(self) -> Any:
        """What equals an earlier mark only where no pool has grown or shrunk since; cheaper than a look at each."""
        return object()

    def prewarm(self) -> None:
        """Have libraries make what they keep per thread and stream (handles, workspaces), on the current stream."""

    def opaque(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, made recordable where the device can't see into compiled code."""
        return fn

    # -- memory ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """The allocator's segments, in the format of torch.cuda.memory_snapshot()."""
        return self.module.memory_snapshot()

    def pool_segments(self, handle: Any) -> list[dict[str, Any]]:
        return [s for s in self.snapshot() if tuple(s.get("segment_pool_id", ())) == tuple(handle)]

    def reserved_bytes(self, handle: Any) -> int:
        """Bytes that the pool ``handle`` holds from the device, free or not."""
        return sum(s["total_size"] for s in self.pool_segments(handle))

    def pinned(self, count: int) -> torch.Tensor:
        """Host memory, [count] uint8, from which copies to the device need not wait."""
        return torch.empty(count, dtype=torch.uint8, device="cpu")  # whatever the default device is

    def unowned(
        self,
        pointer: int,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        around: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """A tensor over ``pointer`` that doesn't keep its memory alive. See Note [Unowned tensors] in capture.py.

        ``around``: the addresses of the first byte of the storage that it is to lie in, and of the one behind its last;
        None: just its own bytes.
        """
        itemsize = dtype.itemsize
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device=self.torch_device)
        span = 1
        for n, s in zip(size, stride, strict=True):
            span += (n - 1) * s
        start, end = around or (pointer, pointer + span * itemsize)
        storage = torch._C._construct_storage_from_data_pointer(start, self.torch_device, end - start)
        with outside_inference_mode():
            out = torch.empty(0, dtype=dtype, device=self.torch_device)
            return out.set_(storage, (pointer - start) // itemsize, size, stride)

    def __repr__(self) -> str:
        return f"{self.name}:{self.index}"


_AS_IT_IS = contextlib.nullcontext()


def outside_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """``torch.inference_mode(False)`` where it makes a difference: it takes as long as making a tensor, and a recording
    is made of many."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def pointer_check() -> Callable[[list[Any], list[int | None], list[int]], bool]:
    """``check(tensors, pointers, indices)``: whether tensors[i].data_ptr() == pointers[i] for each i, in one C call.

    torch's own CUDA graph trees use the same function; builds without CUDA don't have it.
    """
    fast = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if fast is not None:
        return fast

    def check(tensors: list[Any], pointers: list[int | None], indices: list[int]) -> bool:
        return all(tensors[i].data_ptr() == pointers[i] for i in indices)

    return check
