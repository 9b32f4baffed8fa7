"""CUDA through torch.cuda, and what torch does not offer through its private functions and the driver."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from .device import Device, outside_inference_mode
from .driver import driver
from .executables import Executables

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

        self.is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", module.is_current_stream_capturing)

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

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        if tensor.is_neg() or tensor.is_conj():
            # torch runs an operation on a copy without the bit and writes back what it returned. record_stream returns
            # nothing, and torch writes behind the end of its stack.
            storage = tensor.untyped_storage()
            tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        self.module.synchronize(self.index)

    def generator(self) -> torch.Generator:
        return self.module.default_generators[self.index]

    def new_graph(self, *, kept: bool = False) -> Any:
        return self.module.CUDAGraph(keep_graph=True) if kept else self.module.CUDAGraph()

    def executables(self) -> Executables | None:
        calls = driver()
        known = calls is not None and hasattr(torch._C, "_cuda_getDevice")
        return Executables(calls, self._stream_here) if known else None

    def _stream_here(self) -> int | None:
        """The current stream's address; None where it is the default one and this thread is on another device."""
        raw = self.current_raw_stream()
        return raw if raw or torch._C._cuda_getDevice() == self.index else None

    def capture_begin(self, graph: Any, handle: Any) -> None:
        # A generator that first meets a graph under inference_mode keeps inference tensors in its state and breaks
        # every later capture outside it.
        with outside_inference_mode():
            super().capture_begin(graph, handle)

    def capture_end(self, graph: Any) -> None:
        with outside_inference_mode():
            super().capture_end(graph)

    def fill_if_empty(self, graph: Any) -> bool:
        calls = driver()
        if calls is None or calls.captured_something(self.current_raw_stream()):
            return False
        self._scratch.zero_()
        return True

    def recover_failed_capture(self, graph: Any, handle: Any) -> None:
        # capture_end() of an invalidated capture throws at its first step, before it ends the redirection of both
        # allocators and before it tells the generators, and torch offers no way to do those alone. So the stream is
        # put into a fresh capture below torch, and the same capture_end() is asked again: now it finds a valid
        # capture to end and does all of its steps.
        if not self.is_capturing():  # else what raised wasn't the end of the capture, and it is still going on
            calls, stream = driver(), self.module.current_stream(self.index)
            if calls is None:
                raise RuntimeError("the CUDA driver can't be asked to undo a failed capture")
            stream.synchronize()
            calls.begin_capture(stream.cuda_stream)
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
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

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
