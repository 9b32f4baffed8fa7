"""Nested containers of tensors, as callables take and return them: pytrees, with dataclasses as containers too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a pytree in which dataclasses count as containers, whether registered or not."""
    return pytree.tree_flatten(_opened(tree))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The inverse of `flatten`."""
    return _closed(pytree.tree_unflatten(leaves, spec))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor in ``tree``, in order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def hidden_tensors(leaf: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors that a leaf holds which is no tensor: in attributes and containers, ``depth`` levels down.

    Modules are not looked into: what they hold is as a rule their own.
    """
    if depth == 0 or isinstance(leaf, (torch.Tensor, torch.nn.Module, type)):
        return
    held = list(getattr(leaf, "__dict__", {}).values())
    held += [getattr(leaf, name) for name in getattr(leaf, "__slots__", ()) if hasattr(leaf, name)]
    if isinstance(leaf, (list, tuple, dict, set, frozenset)):
        held += leaf.values() if isinstance(leaf, dict) else leaf
    for value in held:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from hidden_tensors(value, depth - 1)


class _Opened:
    """A dataclass instance on its way through a pytree: the instance, and those of its fields that hold tensors."""

    def __init__(self, origin: Any, fields: dict[str, Any]) -> None:
        self.origin, self.fields = origin, fields


pytree.register_pytree_node(
    _Opened,
    lambda opened: (list(opened.fields.values()), (_Origin(opened.origin), tuple(opened.fields))),
    lambda values, context: _Opened(context[0].value, dict(zip(context[1], values, strict=True))),
    serialized_type_name="sgc_backend.tree._Opened",
)


class _Origin:
    """A dataclass instance inside a tree's structure; structures are equal where the classes are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Origin) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__name__


def _opened(tree: Any, around: tuple[int, ...] = ()) -> Any:
    if id(tree) in around:  # an object that reaches itself
        return tree
    around = (*around, id(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and type(tree) not in pytree.SUPPORTED_NODES:
        if isinstance(tree, (tuple, list, dict)):
            return tree
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        return _Opened(tree, {name: _opened(value, around) for name, value in fields.items()})
    return _map_children(lambda child: _opened(child, around), tree)


def _closed(tree: Any) -> Any:
    if isinstance(tree, _Opened):
        made = copy.copy(tree.origin)
        for name, value in tree.fields.items():
            object.__setattr__(made, name, _closed(value))
        return made
    return _map_children(_closed, tree)


def _map_children(fn: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) is tuple or type(tree) is list:
        return type(tree)(fn(v) for v in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(fn(v) for v in tree))
    if isinstance(tree, dict) and type(tree) in pytree.SUPPORTED_NODES:
        copied = tree.copy()
        copied.update((k, fn(v)) for k, v in tree.items())
        return copied
    return tree
