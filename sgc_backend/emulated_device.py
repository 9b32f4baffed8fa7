"""The emulated device behind the seam."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .device import Device


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
