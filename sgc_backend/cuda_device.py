"""CUDA through torch.cuda, and what torch does not offer through its private functions and the driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .device import Device

STREAMS_REMEMBERED = 64


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
