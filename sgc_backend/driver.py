"""What the CUDA driver offers for graphs and torch does not, through ctypes. One `Driver` a process."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch

KERNEL, MEMCPY, MEMSET, EMPTY = 0, 1, 2, 5  # kinds of nodes
# Attributes of a kernel's launch that can be read: access window, cooperative, synchronisation policy, cluster
# dimension and scheduling, programmatic serialisation, priority, memory domains, preferred cluster, updatable, shared
# memory carveout.
ATTRIBUTES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14)
VALUE = 64  # bytes that the largest of them takes
EDGE = 8  # bytes of an edge's data
INSTANTIATE_FLAGS = 1 | 8  # free on launch, priorities of nodes: as torch instantiates

_size, _pointer, _uint, _int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int


class _Memset(ctypes.Structure):
    _fields_ = (
        ("dst", _pointer),
        ("pitch", _size),
        ("value", _uint),
        ("element_size", _uint),
        ("width", _size),
        ("height", _size),
    )


class _Side(ctypes.Structure):
    _fields_ = (
        ("offset", _size * 4),
        ("kind", _int),
        ("host", _pointer),
        ("device", _pointer),
        ("array", _pointer),
        ("reserved", _pointer),
        ("pitch", _size),
        ("rows", _size),
    )


class _Memcpy(ctypes.Structure):
    _fields_ = (("src", _Side), ("dst", _Side), ("width", _size), ("height", _size), ("depth", _size))


class _Updated(ctypes.Structure):
    _fields_ = (("result", _int), ("node", _pointer), ("other", _pointer))


class Driver:
    """The driver's calls.

    Attributes:
        launch: ``(executable, stream) -> status``, 0 where it went well; both are addresses. The context of the stream,
            or for stream 0 the thread's current one, must be the executable's.
    """

    def __init__(self) -> None:
        self._lib = lib = ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
        self.launch = lib.cuGraphLaunch
        self.launch.argtypes = [_pointer, _pointer]
        self._destroy, self._update = lib.cuGraphExecDestroy, lib.cuGraphExecUpdate_v2
        self._destroy.argtypes, self._update.argtypes = [_pointer], [_pointer, _pointer, _pointer]
        self._instantiate = lib.cuGraphInstantiateWithFlags
        self._instantiate.argtypes = [_pointer, _pointer, ctypes.c_ulonglong]
        for name, count in (
            ("cuGraphGetNodes", 3),
            ("cuGraphGetEdges_v2", 5),
            ("cuGraphNodeGetType", 2),
            ("cuGraphMemsetNodeGetParams", 2),
            ("cuGraphMemcpyNodeGetParams", 2),
        ):
            getattr(lib, name).argtypes = [_pointer] * count
        lib.cuGraphKernelNodeGetAttribute.argtypes = [_pointer, _int, _pointer]

    # -- captures ----------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Begin a capture on ``stream`` below torch. Raises RuntimeError where the driver refuses."""
        begin, thread_local = self._lib.cuStreamBeginCapture_v2, 1
        begin.argtypes = [_pointer, _int]
        status = begin(stream, thread_local)
        if status != 0:
            raise RuntimeError(f"cuStreamBeginCapture returned {status} while recovering from a failed capture")

    def captured_something(self, stream: int) -> bool:
        """Whether the capture on ``stream`` has a node in front of what comes next; True where the driver won't say."""
        info, active = self._capture_info, 1
        if info is None:
            return True
        told = (ctypes.c_uint64 * 5)()  # the capture's state, its id, its graph, its last nodes, and how many these are
        at = ctypes.addressof(told)
        return info(stream, at, at + 8, at + 16, at + 24, at + 32) != 0 or told[0] != active or told[4] > 0

    @functools.cached_property
    def _capture_info(self) -> Any:
        info = getattr(self._lib, "cuStreamGetCaptureInfo_v2", None)
        if info is not None:
            info.argtypes = [_pointer] * 6
        return info

    # -- executables -------------------------------------------------------------------------------------------------

    def instantiate(self, graph: int) -> int:
        """An executable of ``graph``. Raises RuntimeError where the driver refuses."""
        found = _pointer()
        status = self._instantiate(ctypes.addressof(found), graph, INSTANTIATE_FLAGS)
        if status != 0:
            raise RuntimeError(f"cuGraphInstantiateWithFlags returned {status}")
        return found.value

    def update(self, executable: int, graph: int) -> bool:
        """Have ``executable`` do what ``graph`` says from its next launch on; False where the driver refuses, and the
        executable is as it was."""
        why = _Updated()
        return self._update(executable, graph, ctypes.addressof(why)) == 0

    def destroy(self, executable: int) -> None:
        self._destroy(executable)

    # -- likeness ----------------------------------------------------------------------------------------------------

    def signature(self, graph: int) -> bytes | None:
        """All that two graphs must have in common for one executable to serve both: their nodes' kinds and edges, and
        of a kernel the attributes of its launch. What an update then changes are its function, grid, block, shared
        memory and arguments. None: the graph holds something else than kernels and plain copies and fills."""
        try:
            nodes = self._nodes(graph)
            return self._edges(graph, nodes) + b"".join(map(self._node, nodes))
        except _UnlikeError:
            return None

    def _nodes(self, graph: int) -> list[int]:
        count = _size()
        self._must(self._lib.cuGraphGetNodes(graph, None, ctypes.addressof(count)))
        nodes = (_pointer * count.value)()
        self._must(self._lib.cuGraphGetNodes(graph, nodes, ctypes.addressof(count)))
        return list(nodes)

    def _edges(self, graph: int, nodes: list[int]) -> bytes:
        count, place = _size(), {node: k for k, node in enumerate(nodes)}
        self._must(self._lib.cuGraphGetEdges_v2(graph, None, None, None, ctypes.addressof(count)))
        if not count.value:
            return b""
        first, then = (_pointer * count.value)(), (_pointer * count.value)()
        data = (ctypes.c_ubyte * (EDGE * count.value))()  # what of the first node the second one waits for
        self._must(self._lib.cuGraphGetEdges_v2(graph, first, then, data, ctypes.addressof(count)))
        return b"".join(b"%d>%d;" % (place[a], place[b]) for a, b in zip(first, then, strict=True)) + bytes(data)

    def _node(self, node: int) -> bytes:
        kind = _int()
        self._must(self._lib.cuGraphNodeGetType(node, ctypes.addressof(kind)))
        if kind.value == KERNEL:
            return b"k" + self._kernel(node)
        if kind.value == MEMSET:
            fill = _Memset()
            self._must(self._lib.cuGraphMemsetNodeGetParams(node, ctypes.addressof(fill)))
            return b"s%d,%d" % (fill.element_size, fill.height)
        if kind.value == MEMCPY:
            copy = _Memcpy()
            self._must(self._lib.cuGraphMemcpyNodeGetParams(node, ctypes.addressof(copy)))
            sides = (copy.src, copy.dst)
            if any(any(side.offset) or side.array for side in sides) or (copy.height, copy.depth) != (1, 1):
                raise _UnlikeError
            return b"c%d,%d" % (copy.src.kind, copy.dst.kind)
        if kind.value == EMPTY:
            return b"e"
        raise _UnlikeError

    def _kernel(self, node: int) -> bytes:
        values = (ctypes.c_ubyte * (VALUE * len(ATTRIBUTES)))()
        read, at = self._lib.cuGraphKernelNodeGetAttribute, ctypes.addressof(values)
        told = bytes(read(node, attribute, at + VALUE * k) != 0 for k, attribute in enumerate(ATTRIBUTES))
        return told + bytes(values)

    def _must(self, status: int) -> None:
        if status != 0:
            raise _UnlikeError


class _UnlikeError(Exception):
    """The graph is not to share an executable with another."""


@functools.cache
def driver() -> Driver | None:
    """The process's driver; None where there is none, or one without these calls."""
    if torch.version.hip is not None:
        return None
    try:
        return Driver()
    except (OSError, AttributeError):
        return None
