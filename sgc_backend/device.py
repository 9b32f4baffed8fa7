"""The seam: everything that is asked of a device module. Only this file names torch.cuda or torch.xpu.

A *device module* is `torch.cuda` or `sgc_backend.emulated`: an object with graph_pool_handle(), CUDAGraph, Stream,
Event, current_stream() and the rest of torch.cuda's graph API. A `Device` is one device of such a module, with the
private functions that capturing needs, each reached in one place here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from .errors import OptionError

STREAMS_REMEMBERED = 64


class Device:
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

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.type, self.index) if self.type != "cpu" else torch.device("cpu")

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

    def new_graph(self) -> Any:
        return self.module.CUDAGraph()

    def capture_begin(self, graph: Any, handle: Any) -> None:
        # thread_local: another thread's allocations and queries must neither break a capture nor be broken by it.
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def capture_end(self, graph: Any) -> None:
        graph.capture_end()

    def fill_if_empty(self, graph: Any) -> bool:
        """Whether the open capture into ``graph`` holds nothing; if so it gets a harmless node where the end of an
        empty capture would warn."""
        raise NotImplementedError

    def recover_failed_capture(self, graph: Any, handle: Any) -> None:
        """Undo what an invalidated capture leaves behind: the allocators' redirection, the generator's state.

        Call on the capture stream after ``capture_end(graph)`` raised; ``graph`` then can be reset.
        """
        raise NotImplementedError

    def allocating_to(self, handle: Any) -> contextlib.AbstractContextManager[None]:
        """While open, this thread's new tensors on the current stream come from the pool ``handle``."""
        raise NotImplementedError

    def renew_pool(self, handle: Any) -> None:
        """Give back the whole memory of a pool that nothing uses any more but one graph, and keep it usable.

        That graph must never be replayed again: what it wrote to is gone.
        """
        self._release(handle)  # the graph's use of the pool: at zero uses the allocator may give memory back
        self.module.empty_cache()
        self._begin_allocating(handle)  # one use again, on behalf of that graph
        self._end_allocating(handle)

    def _begin_allocating(self, handle: Any) -> None:
        raise NotImplementedError

    def _end_allocating(self, handle: Any) -> None:
        raise NotImplementedError

    def _release(self, handle: Any) -> None:
        raise NotImplementedError

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
        return torch.empty(count, dtype=torch.uint8)

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
            return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self.torch_device)
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        start, end = around or (pointer, pointer + span * itemsize)
        storage = torch._C._construct_storage_from_data_pointer(start, self.torch_device, end - start)
        with torch.inference_mode(False):
            out = torch.empty(0, dtype=dtype, device=self.torch_device)
            return out.set_(storage, (pointer - start) // itemsize, tuple(size), tuple(stride))

    def __repr__(self) -> str:
        return f"{self.name}:{self.index}"


class CudaDevice(Device):
    """A CUDA device through torch.cuda."""

    type = "cuda"
    name = "cuda"

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self._streams: dict[int, Any] = {}  # by raw id: a Stream says no more than that
        get = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.24 µs; torch.cuda.current_stream() takes 8
        self.current_raw_stream = (
            functools.partial(get, index) if get is not None else (lambda: module.current_stream(index).cuda_stream)
        )

    def current_stream(self) -> Any:
        raw = self.current_raw_stream()
        stream = self._streams.get(raw)
        if stream is None:
            if len(self._streams) >= STREAMS_REMEMBERED:
                self._streams.clear()
            stream = self._streams[raw] = self.module.current_stream(self.index)
        return stream

    def new_stream(self) -> Any:
        return self.module.Stream(self.index)

    def synchronize(self) -> None:
        self.module.synchronize(self.index)

    def generator(self) -> torch.Generator:
        return self.module.default_generators[self.index]

    def capture_begin(self, graph: Any, handle: Any) -> None:
        # A generator that first meets a graph under inference_mode keeps inference tensors in its state and breaks
        # every later capture outside it.
        with torch.inference_mode(False):
            super().capture_begin(graph, handle)

    def capture_end(self, graph: Any) -> None:
        with torch.inference_mode(False):
            super().capture_end(graph)

    def fill_if_empty(self, graph: Any) -> bool:
        if _captured_something(self.module.current_stream(self.index).cuda_stream):
            return False
        self._scratch.zero_()
        return True

    def recover_failed_capture(self, graph: Any, handle: Any) -> None:
        # capture_end() of an invalidated capture throws at its first step, before it ends the redirection of both
        # allocators and before it tells the generators, and torch offers no way to do those alone. So the stream is
        # put into a fresh capture below torch, and the same capture_end() is asked again: now it finds a valid
        # capture to end and does all of its steps.
        if not self.is_capturing():  # else what raised wasn't the end of the capture, and it is still going on
            self.module.current_stream(self.index).synchronize()
            _begin_raw_capture(self.module.current_stream(self.index).cuda_stream)
        self._scratch.zero_()  # a node, because torch warns about an empty graph
        self.capture_end(graph)

    @contextlib.contextmanager
    def allocating_to(self, handle: Any) -> Iterator[None]:
        self._begin_allocating(handle)
        try:
            yield
        finally:
            self._end_allocating(handle)
            self._release(handle)

    def _begin_allocating(self, handle: Any) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.index, handle)

    def _end_allocating(self, handle: Any) -> None:
        torch._C._cuda_endAllocateToPool(self.index, handle)

    def _release(self, handle: Any) -> None:
        torch._C._cuda_releasePool(self.index, handle)

    # The allocator counts each growth of a segment but its return only once, and so never forgets a pool that grew.
    grows_for_good = True

    def grow_in_place(self, on: bool) -> None:
        # Where the user chose the setting, either way, it stays.
        configured = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if change is not None and "expandable_segments" not in configured and torch.version.hip is None:
            change(f"expandable_segments:{on}")

    def prepare(self) -> None:
        with torch.inference_mode(False):  # it is written in every mode
            self._scratch = torch.zeros(1, device=self.torch_device)

    def free_bytes(self) -> int:
        return self.module.mem_get_info(self.index)[0]

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def allocator_bytes(self) -> int:
        return self._reserved()["current"]

    def allocator_mark(self) -> tuple[int, int, int]:
        counts = self._reserved()
        return counts["current"], counts["allocated"], counts["freed"]

    def _reserved(self) -> dict[str, int]:
        # The flat statistics that memory_reserved() asks for take ten times as long to make.
        return self.module.memory_stats_as_nested_dict(self.index)["reserved_bytes"]["all"]

    def prewarm(self) -> None:
        with torch.no_grad(), torch.inference_mode(False):
            for dtype in (torch.float32, torch.bfloat16):
                a = torch.ones(16, 16, device=self.torch_device, dtype=dtype)
                torch.addmm(a[0], a, a)  # cuBLASLt where it fuses the bias
                torch.mm(a, a)


class EmulatedDevice(Device):
    """The emulated device: CPU tensors behind torch.cuda's graph API."""

    type = "cpu"
    name = "emulated"

    def __init__(self, module: Any, index: int) -> None:
        super().__init__(module, index)
        self.current_raw_stream = lambda: module.current_stream().cuda_stream

    def fill_if_empty(self, graph: Any) -> bool:
        return not graph.captured_nodes

    def recover_failed_capture(self, graph: Any, handle: Any) -> None:
        self.module.end_allocate_to_pool(self.index, handle)
        self.module.release_pool(self.index, handle)
        self.module.recover_generator()

    def allocating_to(self, handle: Any) -> contextlib.AbstractContextManager[None]:
        return self.module.allocate_to_pool(handle)

    def _begin_allocating(self, handle: Any) -> None:
        self.module.begin_allocate_to_pool(self.index, handle)

    def _end_allocating(self, handle: Any) -> None:
        self.module.end_allocate_to_pool(self.index, handle)

    def _release(self, handle: Any) -> None:
        self.module.release_pool(self.index, handle)

    def grow_in_place(self, on: bool) -> None:
        self.module.set_expandable_segments(on)

    def opaque(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return self.module.opaque(fn)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")


def _begin_raw_capture(stream: int) -> None:
    begin = _driver().cuStreamBeginCapture_v2
    begin.argtypes, begin.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
    thread_local = 1
    status = begin(stream, thread_local)
    if status != 0:
        raise RuntimeError(f"cuStreamBeginCapture returned {status} while recovering from a failed capture")


@functools.cache
def _capture_info() -> Callable[..., int] | None:
    info = getattr(_driver(), "cuStreamGetCaptureInfo_v2", None)
    if info is not None:
        info.argtypes, info.restype = [ctypes.c_void_p] * 6, ctypes.c_int
    return info


def _captured_something(stream: int) -> bool:
    """Whether the capture on ``stream`` has a node in front of what comes next; True where the driver won't say."""
    info = _capture_info()
    if info is None:
        return True
    state, capture_id, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes = ctypes.c_void_p(), ctypes.c_void_p()
    places = [ctypes.addressof(v) for v in (state, capture_id, graph, nodes, count)]
    active = 1
    return info(stream, *places) != 0 or state.value != active or count.value > 0


def device_of(module: Any, index: int | None = None) -> Device:
    """The `Device` for a device module; ``index=None`` means its current device.

    Raises:
        OptionError: the module has no graph_pool_handle(), or its device type isn't supported.
    """
    if not isinstance(module, ModuleType) or not hasattr(module, "graph_pool_handle"):
        raise OptionError(
            f"device_module must be torch.cuda or sgc_backend.emulated (it must offer graph_pool_handle()), "
            f"got {module!r}"
        )
    kind = EmulatedDevice if module.__name__.rpartition(".")[2] == "emulated" else CudaDevice
    if kind is CudaDevice and module is not torch.cuda:
        raise OptionError(f"device module {module.__name__} is not supported; use torch.cuda or emulated")
    if not module.is_available():
        raise OptionError(
            f"{module.__name__} has no device on this machine; sgc_backend.emulated (or SGC_DEVICE=emulated) needs none"
        )
    return kind(module, module.current_device() if index is None else index)


def default_module(tensor_type: str, *, emulated: bool) -> Any:
    """The device module that captures tensors of device type ``tensor_type``, or None where nothing can."""
    if emulated and tensor_type == "cpu":
        from . import emulated as module  # only when asked for: it is of no use to a GPU process

        return module
    if tensor_type == "cuda" and hasattr(torch.cuda, "graph_pool_handle"):
        return torch.cuda
    return None


def present_module(*, emulated: bool) -> Any:
    """The device module of this machine: the emulated one where asked for, CUDA's where there is a device, or None."""
    return default_module("cpu" if emulated or not torch.cuda.is_available() else "cuda", emulated=emulated)


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
