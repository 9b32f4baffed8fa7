"""Record one callable into one graph: the only place that opens a capture. Transactional.

Note [Unowned tensors]
    Memory that a recording writes must stay assigned to it only while recordings are still being made that must not
    reuse it; afterwards holding it would make the pool grow with every size. So while a key is being recorded every
    result is held strongly until the last recording that reads it is made, and what stays behind are *unowned* tensors:
    an address with a shape, no reference count. One may be read only where the same replay has just rewritten its
    bytes: by a later step of the plan, or by the caller until the next replay from the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from .device import Device
from .errors import CaptureError
from .pool import GraphPool
from .pool_memory import Entry

_AS_IT_IS = contextlib.nullcontext()


class Capture:
    """The captures of one recording, one graph after another; transactional as a whole.

    Use as a context manager, with `begin` and `end` around what each graph is to hold. While it is open the pool is
    this thread's and the capture stream is current. An exception that leaves it drops every graph that it made.

    Args:
        pool: the pool to draw memory from.
        name, key: of the owner and its key, for errors and for the memory report.
        owner: when it dies the pool lets go of the graphs; None: only ``pool.drop(graph)`` makes it.
    """

    def __init__(self, pool: GraphPool, name: str, key: str = "", *, owner: Any = None) -> None:
        self.pool, self.name, self.key = pool, name, key
        self.graphs: list[Any] = []
        self._owned = pool.owned_by(owner)
        self._open: Any = None  # the graph that is being captured into
        self._part, self._family = "", None
        self._outer: BaseException | None = None  # what was being handled around the capture is none of its business
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Capture:
        with self._stack:
            self._stack.enter_context(self.pool.capturing())
            self._stack.enter_context(torch.no_grad())
            self._stack.enter_context(_own_autocast(self.pool.device.type))
            self._outer = sys.exc_info()[1]
            self._level = self._begun = self.pool.reserved_bytes()  # may look at all segments, which may fail
            self._each = self.pool.grew
            self._taken = self._outside()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                self._fail(error)
            else:
                self._book_growth()
                self._book_outside()
        finally:
            self._stack.close()
            if error is not None:
                for graph in self.graphs:
                    self.pool.drop(graph)
                self.pool.trim()

    def begin(self, part: str = "", *, family: Hashable = None) -> None:
        """Begin to capture into a new graph; ``part`` names it.

        Args:
            family: of graphs that draw no random numbers, and that may run through one executable where they are alike;
                None: it has an executable of its own.

        Raises:
            CaptureError: it can't be begun.
        """
        pool, device = self.pool, self.pool.device
        shares = family is not None and pool.executables is not None and pool.executables.worth(family)
        self._part, self._family = part, family if shares else None
        graph = device.new_graph(kept=self._family is not None)
        self._open = graph  # before: an interrupt may come behind its begin
        try:
            with _on_capture_stream(pool):
                device.capture_begin(graph, pool.handle)
        except Exception as error:
            self._open = None
            raise CaptureError(f"{self._what()}: the capture could not be begun: {error}") from error

    def end(self, *, drop_empty: bool = False) -> Any:
        """End the open capture and return its graph; None where ``drop_empty`` and nothing was captured.

        Raises:
            CaptureError: the capture was invalidated; ``__cause__`` is what the device says.
        """
        pool, device = self.pool, self.pool.device
        graph = self._open  # until it is ended: an interrupt may come in front of that
        with _on_capture_stream(pool):
            try:
                # Where warnings are errors, torch's own about an empty graph would leave its capture_end() half done.
                empty = device.fill_if_empty(graph)
                device.capture_end(graph)
                self._open = None
            except Exception as error:
                self._open = None
                device.recover_failed_capture(graph, pool.handle)
                graph.reset()
                raise CaptureError(f"{self._what()}: the capture was invalidated: {error}") from error
        if drop_empty and empty:
            graph.reset()
            return None
        if self._family is not None:
            graph = self._shared(graph)
        pool.add(graph, self._owned)
        self.graphs.append(graph)
        # Asking takes a tenth of the time of recording a small graph. Smaller sizes mostly fit into what there is.
        level = pool.reserved_bytes() if self._each else self._level
        pool.ledger[id(graph)] = Entry(self.name, self.key, self._part, level - self._level, 0)
        self._level = level
        return graph

    def _shared(self, graph: Any) -> Any:
        try:
            return self.pool.executables.join(graph, self._family)
        except Exception as error:
            graph.reset()
            raise CaptureError(f"{self._what()}: what was captured can't be made executable: {error}") from error

    def _outside(self) -> int:
        """Bytes that are held of the device, by whomever, outside of the allocator; less a constant."""
        return -self.pool.device.free_bytes() - self.pool.device.allocator_bytes()

    def _book_growth(self) -> None:
        """What the pool grew by without being looked at after each graph is in the first graph's entry."""
        level = self.pool.reserved_bytes()
        self.pool.grew = level != self._begun
        if level != self._level:
            self._book(added=level - self._level)

    def _book_outside(self) -> None:
        """The driver takes memory for graphs in large steps: the first graph's entry has what all of them took."""
        outside = self._outside() - self._taken
        if outside > 0:
            self._book(outside=outside)

    def _book(self, *, added: int = 0, outside: int = 0) -> None:
        entry = self.pool.ledger.get(id(self.graphs[0])) if self.graphs else None
        if entry is not None:
            changed = dataclasses.replace(entry, added=entry.added + added, outside=entry.outside + outside)
            self.pool.ledger[id(self.graphs[0])] = changed

    def _fail(self, error: BaseException) -> None:
        """End what is open after ``error``; raises a CaptureError in its place where it broke the capture."""
        graph, self._open = self._open, None
        intact = graph is None or _abandon(self.pool, graph)
        _let_go(error, self._outer)
        # An interrupt, or an error of the user's own that left the capture whole, is theirs to see as it is.
        if not intact and isinstance(error, Exception):
            raise CaptureError(f"{self._what()}: can't be captured: {error}") from error

    def _what(self) -> str:
        return ", ".join(text for text in (self.name, self.key and f"key {self.key}", self._part) if text)


def record(
    pool: GraphPool, fn: Callable[[], Any], name: str, key: str = "", part: str = "", *, owner: Any = None
) -> tuple[Any, Any]:
    """Record ``fn()`` on the pool's capture stream into a new graph; nothing is executed.

    Args:
        pool, name, key, owner: see `Capture`.
        fn: called once, under no_grad.
        part: names the graph within its key.

    Returns:
        ``(graph, out)``: the graph, and ``fn``'s result as it is, holding pool memory.

    Raises:
        CaptureError: the capture was invalidated or couldn't be begun or ended; ``__cause__`` is the real reason.
        Exception: what ``fn`` itself raised without disturbing the capture, unchanged.

    After an error no memory is held, the pool and the random generator are usable, and nothing is recorded.
    """
    with Capture(pool, name, key, owner=owner) as capture:
        capture.begin(part)
        out = fn()
        try:
            return capture.end(), out
        except CaptureError:
            out = None  # or the error's frames would hold what was captured
            raise


def _abandon(pool: GraphPool, graph: Any) -> bool:
    """End a capture whose callable raised and drop the graph. Returns whether the capture was still valid."""
    with _on_capture_stream(pool):
        try:
            if pool.device.is_capturing():  # else an interrupt came in front of its begin, or behind its end
                pool.device.fill_if_empty(graph)
                pool.device.capture_end(graph)
        except Exception:
            pool.device.recover_failed_capture(graph, pool.handle)
            return False
        finally:
            graph.reset()
    return True


def _on_capture_stream(pool: GraphPool) -> contextlib.AbstractContextManager[None]:
    """A capture begins and ends on the capture stream, whatever stream the callable left current."""
    here = pool.device.current_raw_stream() == pool.stream.cuda_stream
    return _AS_IT_IS if here else _switched_to_capture_stream(pool)


@contextlib.contextmanager
def _switched_to_capture_stream(pool: GraphPool) -> Iterator[None]:
    current = pool.device.current_stream()
    pool.device.set_stream(pool.stream)
    try:
        yield
    finally:
        pool.device.set_stream(current)


@contextlib.contextmanager
def _own_autocast(device_type: str) -> Iterator[None]:
    """Autocast keeps casts of weights; one that a recording reads would be outdated with the weight, or freed.

    What fails inside an autocast region of a graph never comes to the node that leaves it: that is done here.
    """
    modes = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted({device_type, "cpu"})]
    cached, depth = torch.is_autocast_cache_enabled(), _autocast_depth()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()
        for kind, enabled, dtype in modes:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _let_go(error: BaseException | None, outer: BaseException | None) -> None:
    """Clear the locals of the frames that ``error`` came through: they hold tensors in the pool's memory, and whoever
    keeps the error would keep that memory from being given back."""
    seen: set[int] = set()
    while error is not None and error is not outer and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def unowned_like(device: Device, tensor: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """An unowned tensor over ``tensor``'s bytes; see Note [Unowned tensors].

    ``whole``: over its whole storage, at its offset there, for what reaches around the tensor itself.
    """
    storage = tensor.untyped_storage()
    around = (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if whole else None
    plain = device.unowned(tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype, around)
    return with_bits(plain, tensor.is_conj(), tensor.is_neg())


def with_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` as the view that conj() or .imag of one gives: the same bytes, read with another sign."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor
