"""The dispatch mode of the emulated device that records a thread's ATen ops.

Recording executes nothing: what an op returns is known from a run on fake tensors, fresh results get a
poisoned block of the arena, and a launch is kept that runs the op on the recorded addresses. A launch never
owns arena memory: its tensors are made over the segment and not over the block, so a block is free again once
the caller's tensors are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ._arena import EmulatedCaptureError
from ._launch import Launch, address, ambient, like, over, tensors
from ._op_plan import ALLOCATES_ONLY, Leaf, NeedsHost, Op, plan
from ._pool_mode import PoolMode

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _HostReads(TorchFunctionMode):
    """Sees what the dispatcher does not: a custom op's body that reads its tensors into a list."""

    def __init__(self, recorder: Recorder, op: str) -> None:
        super().__init__()
        self._recorder, self._op = recorder, op

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            cause = "the host would wait for the device and read its values"
            raise self._recorder.forbid(f"Tensor.tolist in {self._op}", cause)
        return func(*args, **(kwargs or {}))


class Recorder(PoolMode):
    """Records this thread's ops on the streams of one capture.

    Attributes:
        launches: what was recorded, in order.
        streams: ids of the streams that take part; the first one began the capture.
        error: why the capture is invalid, or None.
    """

    def __init__(self, *args: Any, error_mode: str) -> None:
        super().__init__(*args)
        self.error_mode = error_mode
        self.origin = self.where()
        self.streams = {self.origin}
        self.launches: list[Launch] = []
        self.error: str | None = None
        self._seed = torch.initial_seed()
        self._bound: dict[Any, torch.Tensor] = {}
        self._whole: dict[tuple[int, int], torch.UntypedStorage] = {}

    def applies(self) -> bool:
        return self.where() in self.streams

    def forbid(self, what: str, cause: str) -> EmulatedCaptureError:
        """Invalidate the capture and make the error to raise."""
        message = f"operation not permitted when stream is capturing: {what}: {cause}"
        self.error = self.error or message
        return EmulatedCaptureError(message)

    def check_seed(self) -> None:
        """Invalidate the capture where the generator was given another seed, which no replay would do again."""
        if torch.initial_seed() != self._seed:
            self.forbid("manual_seed", "a generator can be given no other seed while it is captured from")

    def check(self) -> None:
        """Raise EmulatedCaptureError when the capture is already invalid."""
        if self.error is not None:
            raise EmulatedCaptureError(f"operation failed due to a previous error during capture: {self.error}")

    def launch(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check()
        if op.metadata_only:
            return func(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        if op.random:
            self.check_seed()
            self.check()
            registered = torch.default_generator._cdata  # what an op is given is another object of Python's
            if any(isinstance(leaf, torch.Generator) and leaf._cdata != registered for leaf in flat):
                raise self.forbid(op.name, "its generator isn't registered with the graph, which would not advance it")
        try:
            planned = plan(op, func, flat, spec)
        except NeedsHost as error:
            raise self.forbid(op.name, str(error)) from error
        if planned is None:
            return func(*args, **kwargs)
        for index, size, stride, nbytes in planned.resized:
            self._resize(op, flat[index], size, stride, nbytes)
        storages = [self._fresh(nbytes, dtype) for nbytes, dtype in planned.storages]
        returns: list[Any] = []
        leaves: list[Any] = []  # per leaf of the result: how it is made, and the tensor
        for made, written in zip(planned.returns, op.returns, strict=True):
            if written is not None:
                at, name = written
                returns.append(args[at] if at < len(args) else kwargs[name])
                leaves += [(None, leaf) for leaf in tree_leaves(returns[-1])]
            elif isinstance(made, list):
                returns.append([self._make(leaf, flat, storages) for leaf in made])
                leaves += zip(made, returns[-1], strict=True)
            else:
                returns.append(self._make(made, flat, storages))
                leaves.append((made, returns[-1]))
        if op.name not in ALLOCATES_ONLY:
            copies = [
                (index, self.bind(tensor))
                for index, (made, tensor) in enumerate(leaves)
                if isinstance(made, Leaf) and made.source < 0
            ]
            bound = [self.bind(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
            self._append(func, bound, spec, copies, contextlib.nullcontext, op.random)
        if len(returns) == 1:
            return returns[0]
        return tuple(returns) or None

    def custom(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check()
        mark = len(self.launches)
        written = [args[at] if at < len(args) else kwargs.get(name) for at, name in op.written]
        targets = [self.bind(tensor) for tensor in tensors(written)]
        saved = [target.clone() for target in targets]
        try:
            with self, _HostReads(self, op.name):
                result = func.redispatch(_CPU, *args, **kwargs)
        finally:
            # Whatever the body did behind the dispatcher's back must not have happened yet.
            for target, before in zip(targets, saved, strict=True):
                target.copy_(before)
        kept = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        fresh = [tensor for tensor in tensors(result) if tensor.untyped_storage()._cdata not in kept]
        unseen = any(leaf.numel() and self.arena.segment_of(address(leaf)) is None for leaf in fresh)
        if unseen or (len(self.launches) == mark and (fresh or op.written)):
            del self.launches[mark:]
            return self.opaque(func, args, kwargs)
        return result

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one call of `fn` without looking into it; see `emulated.opaque`."""
        self.check()
        flat, spec = tree_flatten((args, kwargs))
        doubles: dict[int, torch.UntypedStorage] = {}
        originals: dict[int, torch.Tensor] = {}
        probe: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                leaf, original = self._double(leaf, doubles), leaf
                originals.setdefault(leaf.untyped_storage()._cdata, original)
            probe.append(leaf)
        probe_args, probe_kwargs = tree_unflatten(probe, spec)
        generator = torch.get_rng_state()
        try:
            result = fn(*probe_args, **probe_kwargs)
        finally:
            torch.set_rng_state(generator)
        pairs = zip(probe, flat, strict=True)
        same = {id(double): real for double, real in pairs if isinstance(real, torch.Tensor)}
        leaves, result_spec = tree_flatten(result)
        fresh: dict[int, torch.UntypedStorage] = {}
        copies = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) in same:
                leaves[index] = same[id(leaf)]
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in originals:
                leaves[index] = like(leaf, originals[storage._cdata].untyped_storage())
                continue
            if storage._cdata not in fresh:
                fresh[storage._cdata] = self._fresh(storage.nbytes(), leaf.dtype)
            leaves[index] = like(leaf, fresh[storage._cdata])
            copies.append((index, self.bind(leaves[index])))
        # Code that can't be looked into may count from a storage's begin, and compare storages.
        bound = [self._bind_whole(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        if self._take_over_shapes(flat, probe, originals):
            fn = self._on_aliases(fn)
        self._append(fn, bound, spec, copies, ambient(), random=False)
        for given, seen in zip(args, probe_args, strict=True):
            if isinstance(given, list) and given and not seen:
                given.clear()  # what a compiled callable does to its argument list, so that tensors die early
        return tree_unflatten(leaves, result_spec)

    def _take_over_shapes(self, flat: list[Any], probe: list[Any], originals: dict[int, torch.Tensor]) -> bool:
        """Give arguments what a call gave their doubles: another shape (`unsqueeze_`), or the memory of another one
        (`set_`).

        Returns:
            Whether there was any.

        Raises:
            NotImplementedError: the memory that an argument was given is none of the arguments'.
        """
        places = {double: original.untyped_storage() for double, original in originals.items()}
        changed = []
        for real, double in zip(flat, probe, strict=True):
            if isinstance(real, torch.Tensor):
                storage = places.get(double.untyped_storage()._cdata)
                if storage is None:
                    raise NotImplementedError("an opaque call that gives an argument new memory isn't recorded")
                if Leaf.of(double) != Leaf.of(real) or storage._cdata != real.untyped_storage()._cdata:
                    changed.append((real, storage, Leaf.of(double)))
        with torch.no_grad():
            for real, storage, leaf in changed:
                real.set_(storage, leaf.offset, leaf.size, leaf.stride)
        return bool(changed)

    def _on_aliases(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` on aliases of its arguments: what it does to their shapes must find the same shapes at each replay."""

        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self._made_over(leaf.untyped_storage(), leaf, leaf.storage_offset())

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(alias, (args, kwargs))
            return fn(*args, **kwargs)

        return call

    def _make(self, leaf: Any, flat: list[Any], storages: list[torch.UntypedStorage]) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        if leaf.source < 0:
            return over(storages[~leaf.source], leaf)
        base = flat[leaf.source]
        return base.as_strided(leaf.size, leaf.stride, base.storage_offset() + leaf.offset)

    def _fresh(self, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        storage = self.arena.storage(self.pool, self.where(), nbytes)
        if nbytes:
            # NaN as a float, -1 as an integer; a bool must stay a bool.
            ctypes.memset(storage.data_ptr(), 0x01 if dtype == torch.bool else 0xFF, nbytes)
        return storage

    def _resize(
        self, op: Op, tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], nbytes: int
    ) -> None:
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        if nbytes + offset * tensor.element_size() > storage.nbytes():
            if op.name in ALLOCATES_ONLY and tensor.numel():
                raise NotImplementedError(f"{op.name}: growing a tensor that has data isn't recorded")
            storage, offset = self._fresh(nbytes, tensor.dtype), 0
        with torch.no_grad():
            tensor.set_(storage, offset, size, stride)

    def _double(self, tensor: torch.Tensor, doubles: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        storage = tensor.untyped_storage()
        double = doubles.get(storage._cdata)
        if double is None:
            # A whole storage, because arguments may share one. Poison as an index could crash a kernel:
            # zeros.
            buffer = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu")
            if storage.nbytes() and self.arena.segment_of(storage.data_ptr()) is None:
                ctypes.memmove(buffer.data_ptr(), storage.data_ptr(), storage.nbytes())
            double = doubles[storage._cdata] = buffer.untyped_storage()
        return like(tensor, double)

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a launch uses for `tensor`: same bytes, no claim on the block, never an inference tensor."""
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        segment = self.arena.segment_of(storage.data_ptr())
        bits = tensor.is_conj(), tensor.is_neg()
        key = (storage.data_ptr(), storage._cdata, offset, tensor.shape, tensor.stride(), tensor.dtype, bits)
        if segment is not None:
            offset += (storage.data_ptr() - segment.storage.data_ptr()) // tensor.element_size()
            storage = segment.storage
            key = (segment.address, None, offset, *key[3:])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._made_over(storage, tensor, offset)
        return bound

    @staticmethod
    def _made_over(storage: torch.UntypedStorage, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        # In-place ops of a replay outside of inference mode would refuse an inference tensor.
        with torch.inference_mode(False):
            bound = over(storage, Leaf.of(tensor)._replace(offset=offset))
            bound = torch._neg_view(bound) if tensor.is_neg() else bound
            return bound.conj() if tensor.is_conj() else bound

    def _bind_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `bind`, over a storage that begins and ends where the tensor's own does."""
        storage = tensor.untyped_storage()
        if self.arena.segment_of(storage.data_ptr()) is None:
            return self.bind(tensor)
        place = storage.data_ptr(), storage.nbytes()
        whole = self._whole.get(place)
        if whole is None:
            whole = self._whole[place] = self.arena.unowned(*place)
        return self._made_over(whole, tensor, tensor.storage_offset())

    def _append(
        self,
        fn: Callable[..., Any],
        bound: list[Any],
        spec: Any,
        copies: list[tuple[int, torch.Tensor]],
        within: Callable[[], contextlib.AbstractContextManager[Any]],
        random: bool,
    ) -> None:
        self.launches.append(Launch(fn, bound, spec, tuple(copies), within, random))
