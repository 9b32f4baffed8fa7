"""Runner: buckets, owned input buffers, dispatch and slicing around a wrapper."""

from __future__ import annotations

import abc
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .arguments import Arguments
from .buffers import InputBuffers
from .config import checked_name
from .errors import NotCapturedError, OptionError, ReplayError, StrictError
from .input_spec import InputSpec
from .pools import pool_of
from .results import Results
from .runner_setup import check_settings, checked_variants, ladder_of, mark_buffer, wrapper_of
from .shape_key import ShapeKey
from .tc_piecewise import TcPiecewiseCudaGraphBackend
from .wrapper import made_again

Progress = Callable[[int, int, ShapeKey], None]


class Runner(abc.ABC):
    """Runs a callable at any number of rows inside few recordings.

    The callable is called by keyword with one tensor per `InputSpec` (and ``variant=`` where there are variants). At
    capture these are the runner's own buffers, one set for each bucket; a call copies its inputs into the smallest
    bucket that holds them, pads behind them, replays, and returns the result cut to its rows. The callable must give a
    row the same result whatever padding rows hold, and must write nothing that another row reads for padding rows:
    choose pad values (a slot that no request gets, a length of 0) that make it so. A result without rows (a sum or a
    mean over them) is of the whole bucket, padding rows among it.

    A copy (copy.copy, copy.deepcopy, pickle) is a runner with the same settings, buffers of its own and nothing
    recorded.

    Args:
        fn: the callable or module.
        inputs: what it takes; at least one has a dimension of `ROWS`.
        sizes: the buckets, in rows, or "auto": a ladder up to ``max_size``, which must be given then. For "piecewise"
            it begins at 2: Dynamo makes one row a constant, and compiles it apart.
        max_size: the most rows that a call may have; None: no limit, and with ``sizes`` given, calls beyond the largest
            bucket run eagerly, counted.
        variants: hashable values that each get recordings of their own, and are passed on as ``variant``.
        max_padding_ratio: a bucket of more than this times the rows is not used; None: no limit.
        outputs: "clone": results are the caller's; "static": no copy, valid until the next replay or capture in the
            pool.
        strict: raise instead of running eagerly.
        backend: "full", "piecewise" or "breakable": which wrapper records.
        options: further keyword arguments of the wrapper; for "piecewise", options of sgc_piecewise (the README's
            table), but for those that are set here.
        device_module, lane, name, check_addresses: see `CudaGraphBackend`.

    Raises:
        OptionError: a bad argument.
    """

    default_backend: str

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[InputSpec],
        *,
        sizes: Sequence[int] | str = "auto",
        max_size: int | None = None,
        variants: Sequence[Hashable] | None = None,
        max_padding_ratio: float | None = None,
        outputs: str = "clone",
        strict: bool = False,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
        device_module: Any = None,
        lane: str | None = None,
        name: str | None = None,
        check_addresses: bool = True,
    ) -> None:
        self._settings = {
            "fn": fn,
            "inputs": inputs,
            "sizes": sizes,
            "max_size": max_size,
            "variants": variants,
            "max_padding_ratio": max_padding_ratio,
            "outputs": outputs,
            "strict": strict,
            "backend": backend,
            "options": options,
            "lane": lane,
            "name": name,
            "check_addresses": check_addresses,
        }
        name = type(self).__name__ if name is None else checked_name(name)
        check_settings(name, fn, outputs, options, strict, max_padding_ratio)
        self.fn, self.outputs, self.strict = fn, outputs, strict
        kind = self.default_backend if backend is None else backend
        self.sizes, self.max_size = ladder_of(name, sizes, max_size, kind, self._auto), max_size
        self.variants = checked_variants(name, variants)
        self._known_variants = frozenset(self.variants)  # by hash: arrays are compared element by element
        self._settings["variants"] = None if variants is None else self.variants  # an iterator is used up
        self._takes_variant = variants is not None
        self.max_padding_ratio = max_padding_ratio
        common = {"device_module": device_module, "lane": lane, "name": name, "check_addresses": check_addresses}
        self.backend = wrapper_of(kind, fn, self.sizes, options, common)
        self.counters = self.backend.counters
        self._arguments = Arguments(name, inputs, self.backend.device.torch_device, max_size)
        self.specs = self._settings["inputs"] = self._arguments.specs
        one, two = self.sizes[:2] if len(self.sizes) > 1 else (self.sizes[0], 2 * self.sizes[0])
        self._probed = (one, two)
        self.buffers = InputBuffers(self.backend.device, self.specs, max(self.sizes[-1], two))
        self._captured: dict[Hashable, list[int]] = {}
        self._results: Any = None  # Results, once it is captured
        self._closed = False

    # -- capture -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_session(self, *, any_order: bool = True, measure: bool = False) -> Iterator[Runner]:
        """One session in which several runners `capture`; see `CudaGraphBackend.capture_session`.

        ``any_order`` is on, because which phase is the largest is hard to tell: a smaller one may have larger tensors.
        """
        with self.backend.capture_session(any_order=any_order, measure=measure):
            yield self

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[Runner]:
        """Keep other threads from replaying from the pool while open, so that static results stay valid to read."""
        with self.backend.replay_session():
            yield self

    @torch.no_grad()
    def capture(self, *, progress: Progress | None = None) -> None:
        """Record every bucket of every variant, the largest first. Replaces what was recorded before.

        The callable runs on padding rows: twice eagerly, to see which dimensions of its result grow with the rows, then
        as the wrapper's warm-up asks for.

        Args:
            progress: called as ``progress(done, of, key)`` behind each recording.

        Raises:
            CaptureError: a bucket can't be recorded. Nothing is recorded then.
            OptionError: the result can't be cut to the rows of a call; or ``progress`` is no callable, and what was
                recorded before stays.
            Exception: what the callable raised.
        """
        if progress is not None and not callable(progress):
            raise OptionError(self._say(f"progress must be a callable (done, of, key), got {type(progress).__name__}"))
        keys = [ShapeKey(size, variant) for size in reversed(self.sizes) for variant in self.variants]
        try:
            with self.backend.capture_session():
                self._closed = False
                with self._buffers_taken():
                    self._results = Results(self.backend.name, self._probed, self._run_padding)
                for done, key in enumerate(keys, 1):
                    with self._buffers_taken():
                        self._capture_one(key)
                    if progress is not None:
                        progress(done, len(keys), key)
        except BaseException:
            self.release()
            raise
        if isinstance(self.backend, TcPiecewiseCudaGraphBackend):
            self.backend.check_compilations(len(self.variants) * (2 if 1 in self.sizes else 1))

    @contextlib.contextmanager
    def _buffers_taken(self) -> Iterator[None]:
        """Keep calls of other threads, which replay what was recorded before, from staging in between."""
        pool = pool_of(self.backend.device, self.backend.lane)
        with pool.lock:
            pool.check_free()
            pool.hold(pool.generation)  # its lock, once more, and behind the last replay
            try:
                yield
            finally:
                pool.let_go()

    def _capture_one(self, key: ShapeKey) -> None:
        views = self.buffers.views(key.size)
        self.buffers.pad(key.size)
        fn, keywords = self.fn, self._keywords(views, key.variant)
        if isinstance(self.backend, TcPiecewiseCudaGraphBackend):
            fn = self.backend.compiled
            for spec in self.specs:
                mark_buffer(views[spec.name], spec)
        versions = [view._version for view in views.values()]
        out = self.backend.capture_one(key, lambda: fn(**keywords))
        if versions != [view._version for view in views.values()]:
            self.buffers.shared = True  # the callable writes to its inputs: what was padded need not stay so
        assert self._results is not None
        inside = pool_of(self.backend.device, self.backend.lane).contains()
        for leaf in self._results.check(out, key.size, key.variant, inside):
            if self.buffers.holds(leaf):
                self.buffers.shared = True  # an input that is returned: the caller may write it, or give it back
        sizes = self._captured.setdefault(key.variant, [])
        if key.size not in sizes:
            sizes.insert(bisect_left(sizes, key.size), key.size)

    def _run_padding(self, size: int) -> Any:
        views = self.buffers.views(size)
        self.buffers.pad(size)
        return self.fn(**self._keywords(views, self.variants[0]))

    # -- the call ----------------------------------------------------------------------------------------------------

    def __call__(self, /, *, variant: Hashable = None, **inputs: Any) -> Any:
        """Run on these inputs, by the names of the specs.

        Args:
            variant: one of ``variants``.
            inputs: tensors on the device or on the host, or lists of numbers.

        Returns:
            What the callable returns, tensors cut to the call's rows.

        Raises:
            OptionError: an input is missing, unknown, or of another shape or dtype; too many rows; an unknown variant.
            NotCapturedError: `capture` has not been called.
            ReplayError: after `cleanup`; or see the wrapper's ``replay``.
            StrictError: strict, and the call would run eagerly.
        """
        try:
            known = variant in self._known_variants
        except TypeError:  # it can't be hashed
            known = False
        if not known:
            self._refuse_variant(variant)
        n, given, host = self._arguments.checked(inputs)
        size = self._bucket(n, variant)
        if isinstance(size, str):
            return self._eager(given, variant, size)
        key = size if variant is None else ShapeKey(size, variant)
        gradients = torch.is_grad_enabled()
        recording = self.backend.hold(key)
        try:
            torch._C._set_grad_enabled(False)  # what torch.no_grad() does, without an object for it
            self.buffers.stage(size, n, given, host)
            return self._results.cut(self.backend.replay_held(recording), size, n, clone=self.outputs == "clone")
        finally:
            try:
                torch._C._set_grad_enabled(gradients)
            finally:
                recording.pool.let_go()
                if recording.pool.doomed:
                    recording.pool.settle()

    def eager(self, /, *, variant: Hashable = None, **inputs: Any) -> Any:
        """What the call returns, without a recording: for comparisons. Raises: see the call."""
        try:
            known = variant in self._known_variants
        except TypeError:  # it can't be hashed
            known = False
        if not known:
            self._refuse_variant(variant)
        _, given, _ = self._arguments.checked(inputs)
        return self._run_eagerly(given, variant)

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """A bucket's own input buffers by name, to be written in place and run by `replay`.

        All buckets share their memory: writing one overwrites the others. Calls pad again in full from now on.

        Raises:
            OptionError: ``size`` is no bucket.
        """
        if type(size) is not int or size not in self.sizes:
            raise OptionError(f"{self.backend.name}: {size} is no bucket; there are {self.sizes}")
        self.buffers.shared = True
        return self.buffers.views(size)

    @torch.no_grad()
    def replay(self, size: int, *, rows: int | None = None, variant: Hashable = None) -> Any:
        """Run a bucket on what its buffers hold (see `views`); ``rows`` cuts the result, None leaves it whole.

        Raises: see the wrapper's ``replay``; OptionError for a size that is none, and rows beyond the bucket.
        """
        key = ShapeKey(size, variant)
        n = size if rows is None else rows
        if type(n) is not int or not 0 <= n <= size:
            raise OptionError(f"{self.backend.name}: rows must be an int from 0 to the bucket's {size}, got {rows!r}")
        recording = self.backend.hold(key)
        try:
            return self._results.cut(self.backend.replay_held(recording), size, n, clone=self.outputs == "clone")
        finally:
            recording.pool.let_go()
            if recording.pool.doomed:
                recording.pool.settle()

    def _refuse_variant(self, variant: Hashable) -> None:
        known = ", ".join(map(repr, self.variants))
        raise OptionError(self._say(f"unknown variant {variant!r}; there are {known}"))

    def _bucket(self, n: int, variant: Hashable) -> int | str:
        """The bucket for n rows; or why none is."""
        sizes = self._captured.get(variant)
        if not sizes:
            self._refuse_uncaptured()
        place = bisect_left(sizes, n)
        if place == len(sizes):
            return f"larger than the largest bucket, {sizes[-1]}"
        size = sizes[place]
        if self.max_padding_ratio is not None and size > self.max_padding_ratio * n:
            return f"the bucket of {size} is more than max_padding_ratio {self.max_padding_ratio} times the rows"
        return size

    def _refuse_uncaptured(self) -> None:
        if self._closed:
            raise ReplayError(self._say("used after cleanup(); capture() records again"))
        raise NotCapturedError(self._say("nothing is recorded; call capture() first, or eager() to run without"))

    def _eager(self, given: Sequence[torch.Tensor], variant: Hashable, cause: str) -> Any:
        if self.strict:
            raise StrictError(self._say(f"strict=True, and this call would run eagerly: {cause}"))
        self.counters.uncaptured[cause] += 1
        return self._run_eagerly(given, variant)

    @torch.no_grad()
    def _run_eagerly(self, given: Sequence[torch.Tensor], variant: Hashable) -> Any:
        device = self.backend.device.torch_device
        tensors = [value.to(device) for value in given]
        named = {spec.name: tensor for spec, tensor in zip(self.specs, tensors, strict=True)}
        return self.fn(**self._keywords(named, variant))

    def _keywords(self, tensors: Mapping[str, torch.Tensor], variant: Hashable) -> dict[str, Any]:
        return {**tensors, "variant": variant} if self._takes_variant else dict(tensors)

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop every recording; `capture` records again. Idempotent."""
        self._captured.clear()
        self.backend.release()

    def cleanup(self) -> None:
        """Drop every recording and give unused memory back. Idempotent; calls are refused until the next `capture`."""
        self._captured.clear()
        self._closed = True
        self.backend.cleanup()

    # -- construction ------------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return made_again, (type(self), self.backend.device.module.__name__, self._settings)

    @abc.abstractmethod
    def _auto(self, max_size: int) -> Sequence[int]:
        """The ladder that ``sizes="auto"`` stands for: ascending, and ending with ``max_size``."""

    def _say(self, text: str) -> str:
        return f"{self.backend.name}: {text}"
