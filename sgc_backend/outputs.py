"""What makes each output of a call out of what its recordings and cuts left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .capture import unowned_like, with_bits
from .extents import Compact, copy_elements, in_factors, lies_as, prefix
from .groups import HostRef, Ref
from .inputs import Input, is_dense, span_bytes
from .plan import Real
from .recording import PaddingError, Recording
from .spans import storage_span, tensor_span
from .steps import Frame


class Outputs(Recording):
    """Makes the makers of outputs."""

    def _bind_outputs(self) -> None:
        shared: dict[int, int] = {}  # storage address -> frame slot that holds this call's one copy of it
        for out in self.split.outputs:
            if not isinstance(out, (Ref, HostRef)):
                make: Callable[[Real], Callable[[Frame], Any]] = _always(self._structure(out))
            elif isinstance(out, HostRef):
                make = _always(self._number(out))
            else:
                make = self._tensor_output(out.name, shared)
            self.plan.makers.append(make)

    def _structure(self, out: Any) -> Callable[[Frame], Any]:
        leaves, spec = pytree.tree_flatten(out, is_leaf=lambda v: isinstance(v, HostRef))
        makers = [self._number(v) if isinstance(v, HostRef) else (lambda frame, v=v: v) for v in leaves]
        return lambda frame: pytree.tree_unflatten([make(frame) for make in makers], spec)

    def _tensor_output(self, name: str, shared: dict[int, int]) -> Callable[[Real], Callable[[Frame], Any]]:
        if name in self.inputs:
            return _always(_taker(self.inputs[name].index))
        if name in self.slots:
            slot = self.slots[name]
            if name not in self.in_pool:
                return _always(_taker(slot))
            copy = self.clone
            return _always(lambda frame: frame[slot].clone() if copy else _made_here(frame[slot]))
        value = self.env[name]
        if not isinstance(value, torch.Tensor):
            return _always(lambda frame: value)
        owner = self._input_under(value)
        if owner is not None:
            if self.itself.get(name) == owner.index and self._takes_all(name, owner):
                # What an in-place op returned: the caller's own object, whose data it may exchange.
                return _always(_taker(owner.index))
            return self._view_of_argument(name, owner)
        unowned = unowned_like(self.pool.device, value)
        if self.bucket is not None:
            return self._prefix_output(name, unowned, shared)
        if not self.clone:
            return _always(_static_result(unowned))
        return _always(self._cloner(name, unowned, shared))

    def _takes_all(self, name: str, owner: Input) -> bool:
        """Whether an output lies just as the argument that it lies in, at all sizes that the plan serves."""
        if self.bucket is None or (self._is_static(owner.name) and name not in self.wide):
            return True
        sizes = (self.wide, self.other)
        return all(name in at and owner.name in at and at[name][:3] == at[owner.name][:3] for at in sizes)

    def _view_of_argument(self, name: str, owner: Input) -> Callable[[Real], Callable[[Frame], Any]]:
        value, seen, detached = self.env[name], self.env[owner.name], name in self.detached
        # In inference mode view(dtype) gives an inference tensor, whatever it views.
        finish = _made_here if name in self.inference else _as_it_is
        bits = (value.is_conj(), value.is_neg())
        offset = value.data_ptr() - seen.data_ptr()
        if self.bucket is None or (self._is_static(owner.name) and name not in self.wide):
            shape = tuple(value.size()), tuple(value.stride())
            return _always(_view_of_argument(owner.index, *shape, value.dtype, offset, bits, detached, finish))
        wide, base = self._known(name), self._known(owner.name)
        itemsize = value.dtype.itemsize
        if (wide.offset - base.offset) * itemsize != offset or wide.factors is not None:
            raise PaddingError(f"{self.what}: output {name} lies at another place than the graph was traced with")

        def make(real: Real) -> Callable[[Frame], Any]:
            here = real[name]
            at = (here.offset - real[owner.name].offset) * itemsize
            return _view_of_argument(owner.index, here.size, here.stride, value.dtype, at, bits, detached, finish)

        return make

    def _prefix_output(
        self, name: str, unowned: torch.Tensor, shared: dict[int, int]
    ) -> Callable[[Real], Callable[[Frame], Any]]:
        """The real rows of an output, lying as the graph was traced with."""
        wide = self._known(name)
        siblings = self._outputs_over(self._storage_under(name))
        if len(siblings) > 1:
            return self._shared_prefix(name, unowned, siblings, shared)

        clone = self.clone
        # What has one size alone lies as it was made: a cut may return other strides than it was traced with.
        stride = tuple(unowned.stride()) if wide.size == self.other[name].size and wide.factors is None else None

        def make(real: Real) -> Callable[[Frame], Any]:
            geometry = real[name] if stride is None else real[name]._replace(stride=stride)
            if not clone and lies_as(geometry, wide):
                return _static_result(prefix(unowned, geometry, wide))
            if lies_as(geometry, wide) and is_dense(geometry.size, geometry.stride):
                return _cloned(prefix(unowned, geometry, wide))
            compact = Compact(unowned, geometry, wide, written=False)
            return lambda frame: compact.fetch()

        return make

    def _shared_prefix(
        self, name: str, unowned: torch.Tensor, siblings: Sequence[str], shared: dict[int, int]
    ) -> Callable[[Real], Callable[[Frame], Any]]:
        """Outputs over one storage share one copy of it, in which each lies as the graph was traced with."""
        wide = {n: self._known(n) for n in siblings}
        dtypes = {n: self.env[n].dtype for n in siblings}
        if any(self.env[n].is_conj() or self.env[n].is_neg() for n in siblings):
            raise PaddingError(f"{self.what}: outputs {', '.join(siblings)} share memory, of which one is conjugate")
        address = self._storage_under(name).data_ptr()
        first = address not in shared
        if first:
            shared[address] = len(self.args) + len(self.slots)
            self.slots[f"storage of {name}"] = shared[address]
        slot, dtype, device, clone = shared[address], dtypes[name], self.pool.device.torch_device, self.clone

        def make(real: Real) -> Callable[[Frame], Any]:
            geometry, rows = real[name], prefix(unowned, real[name], wide[name])
            if not clone and all(lies_as(real[n], wide[n]) for n in siblings):
                return _static_result(rows)
            ends = [
                real[n].offset * d.itemsize + span_bytes(real[n].size, real[n].stride, d) for n, d in dtypes.items()
            ]
            nbytes = max(ends)

            def fetch(frame: Frame) -> torch.Tensor:
                if first:
                    frame[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                out = torch.empty(0, dtype=dtype, device=device)
                out.set_(frame[slot].untyped_storage(), geometry.offset, geometry.size, geometry.stride)
                copy_elements(in_factors(out, geometry), rows)
                return out

            return fetch

        return make

    def _outputs_over(self, storage: torch.UntypedStorage) -> list[str]:
        """The names of the outputs whose memory lies in ``storage``, as often as they are returned."""
        names = [
            o.name for o in self.split.outputs if isinstance(o, Ref) and isinstance(self.env.get(o.name), torch.Tensor)
        ]
        return [n for n in names if self._storage_under(n).data_ptr() == storage.data_ptr()]

    def _input_under(self, value: torch.Tensor) -> Input | None:
        """The input whose memory ``value`` lies in: the caller must get a view of its own tensor."""
        at = value.data_ptr()
        if value.numel() == 0:
            return None
        seen = {n: self.env.get(n) for n in self.inputs}
        bytes_of = {n: t for n, t in seen.items() if isinstance(t, torch.Tensor) and t.numel()}
        # What reaches around an input may lie outside of it: then its storage tells.
        for span in (tensor_span, storage_span):
            for name, tensor in bytes_of.items():
                start, end = span(tensor)
                if start <= at < end:
                    return self.inputs[name]
        return None

    def _cloner(self, name: str, unowned: torch.Tensor, shared: dict[int, int]) -> Callable[[Frame], torch.Tensor]:
        """Copies an output out of the pool: outputs over one storage share one copy, strides stay as they are."""
        value = self.env[name]
        if not value.numel():  # it has no bytes, and so no place among those of others
            size, stride = tuple(value.size()), tuple(value.stride())
            return lambda frame: torch.empty_strided(size, stride, dtype=unowned.dtype, device=unowned.device)
        storage = self._storage_under(name)
        others = [o.name for o in self.split.outputs if isinstance(o, Ref) and o.name in self.env]
        alone = sum(self._storage_under(o).data_ptr() == storage.data_ptr() for o in others) == 1
        bits = (value.is_conj(), value.is_neg())
        if alone and is_dense(value.size(), value.stride()):
            if not any(bits):
                return lambda frame: unowned.clone()
            plain = self.pool.device.unowned(value.data_ptr(), value.size(), value.stride(), value.dtype)
            return lambda frame: with_bits(plain.clone(), *bits)
        whole = self.pool.device.unowned(storage.data_ptr(), (storage.nbytes(),), (1,), torch.uint8)
        size, stride, dtype = tuple(value.size()), tuple(value.stride()), value.dtype
        offset = (value.data_ptr() - storage.data_ptr()) // dtype.itemsize
        first = storage.data_ptr() not in shared
        if first:
            shared[storage.data_ptr()] = len(self.args) + len(self.slots)
            self.slots[f"storage of {name}"] = shared[storage.data_ptr()]
        slot = shared[storage.data_ptr()]

        def make(frame: Frame) -> torch.Tensor:
            if first:
                frame[slot] = whole.clone()
            out = torch.empty(0, dtype=dtype, device=whole.device)
            return with_bits(out.set_(frame[slot].untyped_storage(), offset, size, stride), *bits)

        return make


def _made_here(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as this moment's mode would have made it: an inference tensor in inference mode.

    Such a one may not be written outside of inference mode, nor saved for a backward pass, as it may not when it comes
    from eager code; and a static result's bytes wouldn't last until then.
    """
    if tensor.is_inference() or not torch.is_inference_mode_enabled():
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return with_bits(made, tensor.is_conj(), tensor.is_neg())


def _static_result(unowned: torch.Tensor) -> Callable[[Frame], torch.Tensor]:
    with torch.inference_mode():
        inference = _made_here(unowned)
    # A new object each time: a caller may change its shape in place.
    return lambda frame: (inference if torch.is_inference_mode_enabled() else unowned).detach()


def _cloned(rows: torch.Tensor) -> Callable[[Frame], torch.Tensor]:
    return lambda frame: rows.clone()


def _taker(index: int) -> Callable[[Frame], Any]:
    return lambda frame: frame[index]


def _always(make: Callable[[Frame], Any]) -> Callable[[Real], Callable[[Frame], Any]]:
    """An output's maker that is the same for all real sizes."""
    return lambda real: make


def _view_of_argument(
    index: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int,
    bits: tuple[bool, bool],
    detached: bool,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[Frame], torch.Tensor]:
    """The view of argument ``index`` that begins ``offset`` bytes behind its first element."""

    def make(frame: Frame) -> torch.Tensor:
        arg = frame[index].detach() if detached else frame[index]
        base = arg if arg.dtype == dtype else arg.view(dtype)
        view = base.as_strided(size, stride, base.storage_offset() + offset // dtype.itemsize)
        return finish(with_bits(view, *bits))

    return make


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
