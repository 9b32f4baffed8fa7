"""What an ATen op returns and writes, known from its schema and a run on fake tensors, without running it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

_BUILTIN = frozenset({"aten", "prims", "prim"})
_ALLOCATING = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_"
)  # fmt: skip
ALLOCATES_ONLY = frozenset(f"aten::{name}" for name in _ALLOCATING)
"""Ops that launch nothing: a recording must not write garbage where eager code wouldn't write."""

_INDEX_WRITES = frozenset({"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"})

_MAX_PLANS = 1 << 16


class NeedsHost(RuntimeError):
    """The host would have to wait for the device to know this op's result."""


class Op(NamedTuple):
    """What the schema of an op says about it.

    Attributes:
        name: "namespace::name", without the overload.
        custom: not one of torch's own.
        composite: made of other ops, which are what is to be looked at.
        metadata_only: a view, or an in-place change of sizes and strides: touches no data.
        random: draws from a generator.
        written: position and name of each argument that is written to.
        returns: per return value the written argument that it is, or None.
    """

    name: str
    custom: bool
    composite: bool
    metadata_only: bool
    random: bool
    written: tuple[tuple[int, str], ...]
    returns: tuple[tuple[int, str] | None, ...]


class Leaf(NamedTuple):
    """One tensor over `source`: an argument's index, or, below zero, the new storage number ~source.

    `size`, `stride` and `offset` count elements; `offset` is relative to the argument's own where there is
    one.
    """

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, source: int = -1) -> Leaf:
        return cls(source, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)


class Plan(NamedTuple):
    """What one call gives.

    Attributes:
        returns: per return value a `Leaf`, a list of them, or a plain value.
        storages: bytes of each new storage, and the dtype that is first seen in it.
        resized: argument index, new size, new stride and bytes needed of each argument that changes its
            shape.
    """

    returns: tuple[Any, ...]
    storages: tuple[tuple[int, torch.dtype], ...]
    resized: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int], ...]


@functools.cache
def read_schema(func: torch._ops.OpOverload) -> Op:
    """The `Op` of an overload."""
    schema = func._schema
    written, by_alias = [], {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((position, argument.name))
            by_alias.update(dict.fromkeys(argument.alias_info.before_set, (position, argument.name)))
    returns, view = [], False
    for value in schema.returns:
        info = value.alias_info
        writes = info is not None and info.is_write
        source = next((by_alias[a] for a in info.before_set if a in by_alias), None) if writes else None
        returns.append(source)
        view = view or (info is not None and not writes)
    inplace_view = torch.Tag.inplace_view in func.tags and schema.name not in ALLOCATES_ONLY
    return Op(
        name=schema.name,
        custom=func.namespace not in _BUILTIN,
        composite=func._can_decompose(),
        metadata_only=inplace_view or (view and not written),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        written=tuple(written),
        returns=tuple(returns),
    )


_plans: dict[Any, Plan] = {}
_thread = threading.local()


def plan(op: Op, func: Any, flat: Sequence[Any], spec: TreeSpec) -> Plan | None:
    """The plan of ``func(*args, **kwargs)``, its arguments given flat; None when another device is to run it.

    Raises:
        NeedsHost: the result, or its shape, depends on data.
        NotImplementedError: a tensor isn't strided.
        Exception: what the op says of wrong arguments.
    """
    if op.name in _INDEX_WRITES:
        _check_index(func, *tree_unflatten(list(flat), spec))
    twins: dict[int, int] = {}
    key: list[Any] = [func, torch.get_default_dtype()]
    for index, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            _check_layout(op, leaf)
            bits = leaf.is_conj(), leaf.is_neg()
            key.append((leaf.shape, leaf.stride(), leaf.dtype, bits, twins.setdefault(id(leaf), index)))
        else:
            # 1, 1.0 and True are equal and give different results.
            key.append((type(leaf), None if isinstance(leaf, torch.Generator) else leaf))
    try:
        # The text of a spec stands in for it: a TreeSpec has no hash in every version.
        known = _plans.get(full := (str(spec), *key))
    except TypeError:
        return _infer(op, func, flat, spec)
    if known is None:
        known = _infer(op, func, flat, spec)
        if known is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[full] = known
    return known


def _infer(op: Op, func: Any, flat: Sequence[Any], spec: TreeSpec) -> Plan | None:
    # Imported late: it takes seconds, and only a capture needs it.
    from torch._subclasses import fake_tensor

    mode = getattr(_thread, "mode", None)
    if mode is None:
        mode = _thread.mode = fake_tensor.FakeTensorMode()
    with mode:
        fakes, sources = _stand_ins(flat)
        args, kwargs = _counted_from_front(op, *tree_unflatten(fakes, spec))
        try:
            result, refused = func(*args, **kwargs), None
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException) as error:
            raise NeedsHost("its result depends on data, so the host would have to wait for it") from error
        except RuntimeError as error:
            if type(error) is not RuntimeError or op.custom or op.random:
                raise
            refused = error
    if refused is not None:
        # What an op takes on fake tensors may be less than what it takes (a grouped_mm in float32).
        fakes, sources = _stand_ins(flat)
        for fake in fakes:
            if isinstance(fake, torch.Tensor):
                fake.zero_()
        args, kwargs = tree_unflatten(fakes, spec)
        try:
            result = func(*args, **kwargs)
        except Exception:
            raise refused from None
    if any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(result)):
        return None
    numbers: dict[int, int] = {}
    storages: list[tuple[int, torch.dtype]] = []

    def describe(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        _check_layout(op, value)
        storage = value.untyped_storage()
        source = sources.get(storage._cdata)
        if source is None:
            source = ~numbers.setdefault(storage._cdata, len(numbers))
            if ~source == len(storages):
                storages.append((storage.nbytes(), value.dtype))
        return Leaf.of(value, source)

    returns: list[Any] = []
    values = (result,) if len(op.returns) == 1 else tuple(result or ())
    for value, written in zip(values, op.returns, strict=True):
        if written is not None:
            returns.append(None)
        else:
            returns.append([describe(v) for v in value] if isinstance(value, list | tuple) else describe(value))
    resized = tuple(
        (index, tuple(fake.shape), fake.stride(), fake.untyped_storage().nbytes())
        for index, fake in enumerate(fakes)
        if isinstance(fake, torch.Tensor) and fake.shape != flat[index].shape
    )
    return Plan(tuple(returns), tuple(storages), resized)


def _stand_ins(flat: Sequence[Any]) -> tuple[list[Any], dict[int, int]]:
    """Other tensors of the same layouts in the place of those in ``flat``; and by storage, which argument each is."""
    found: list[Any] = []
    twins: dict[int, torch.Tensor] = {}
    sources: dict[int, int] = {}
    for index, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            twin = twins.get(id(leaf))
            if twin is None:
                twin = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
                twin = torch._neg_view(twin) if leaf.is_neg() else twin
                twin = twins[id(leaf)] = twin.conj() if leaf.is_conj() else twin
                sources[twin.untyped_storage()._cdata] = index
            found.append(twin)
        else:
            found.append(leaf)
    return found, sources


def _counted_from_front(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # On fake tensors torch 2.11 keeps a dimension of length 1 that a norm without keepdim names from the end.
    if op.name == "aten::linalg_vector_norm" and len(args) > 2 and args[2] is not None and args[0].dim():
        args = (*args[:2], [dim + args[0].dim() if dim < 0 else dim for dim in args[2]], *args[3:])
    return args, kwargs


def _check_layout(op: Op, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{op.name}: the emulated device records strided tensors only")


def _check_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # No size depends on data here, so a fake run says nothing, yet a real device looks for the true elements
    # of a mask on the host. Only a single value is written without looking.
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in named["indices"])
    if masked and (named["values"].numel() != 1 or named.get("accumulate")):
        raise NeedsHost("a boolean mask as an index is turned into positions on the host")
