"""One recorded launch of the emulated device: an op on recorded addresses, and running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from ._op_plan import Leaf


class Launch(NamedTuple):
    fn: Callable[..., Any]
    bound: list[Any]
    spec: Any
    copies: tuple[tuple[int, torch.Tensor], ...]  # which leaf of the result goes to which recorded tensor
    within: Callable[[], contextlib.AbstractContextManager[Any]]
    random: bool

    def run(self) -> None:
        # Unflattened each time: compiled callables empty the list that they are given.
        args, kwargs = tree_unflatten(self.bound, self.spec)
        with self.within():
            result = self.fn(*args, **kwargs)
        if self.copies:
            leaves = tree_leaves(result)
            for index, target in self.copies:
                write(target, leaves[index])


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    # copy_ refuses to write one address twice, which a broadcast dimension would ask for.
    if target.shape != value.shape:
        raise RuntimeError(f"a replayed op gave shape {tuple(value.shape)}, {tuple(target.shape)} was recorded")
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def over(storage: torch.UntypedStorage, leaf: Leaf) -> torch.Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=leaf.dtype, device="cpu")
        return empty.set_(storage, leaf.offset, leaf.size, leaf.stride)


def like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """What `tensor` is, over `storage`: read with the same sign as well."""
    made = over(storage, Leaf.of(tensor))
    made = torch._neg_view(made) if tensor.is_neg() else made
    return made.conj() if tensor.is_conj() else made


def ambient() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The grad, inference and autocast state of this moment, to be entered again later."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        cast = torch.autocast("cpu", dtype=dtype, enabled=autocast)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), cast:
            yield

    return enter
