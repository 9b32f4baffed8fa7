"""Nested containers of tensors, as callables take and return them.

Pytrees, and besides them dataclasses and subclasses of dict and list (a model's output is often both), whether anyone
registered them or not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, ItemsView, Iterator, ValuesView
from typing import Any

import torch
from torch.utils import _pytree as pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; containers that nobody registered are taken apart, too, and a torch.Size is a leaf."""
    return pytree.tree_flatten(_opened(tree), is_leaf=lambda value: isinstance(value, torch.Size))


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
    if isinstance(leaf, (list, tuple, dict, set, frozenset, ValuesView, ItemsView)):
        held += leaf.values() if isinstance(leaf, dict) else leaf
    for value in held:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from hidden_tensors(value, depth - 1)


def is_unrun(leaf: Any) -> bool:
    """Whether a leaf is code that runs as it is iterated or awaited: a generator, a map, a coroutine."""
    return isinstance(leaf, (Iterator, Awaitable, AsyncIterator))


class _Opened:
    """An unregistered container on its way through a pytree.

    Attributes:
        shell: a copy of the container that holds None in all of its places: structures are kept for long, and must not
            keep tensors.
        fields: of a dataclass, by name.
        items: of a dict by key, of a list by position.
    """

    def __init__(self, shell: Any, fields: dict[str, Any], items: dict[Any, Any]) -> None:
        self.shell, self.fields, self.items = shell, fields, items


pytree.register_pytree_node(
    _Opened,
    lambda opened: (
        [*opened.fields.values(), *opened.items.values()],
        (_Shell(opened.shell), tuple(opened.fields), tuple(opened.items)),
    ),
    lambda values, context: _Opened(
        context[0].value,
        dict(zip(context[1], values, strict=False)),
        dict(zip(context[2], list(values)[len(context[1]) :], strict=True)),
    ),
    serialized_type_name="sgc_backend.tree._Opened",
)


class _Shell:
    """An emptied container inside a tree's structure; structures are equal where the classes are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__name__


def _opened(tree: Any, around: tuple[int, ...] = ()) -> Any:
    if id(tree) in around:  # an object that reaches itself
        return tree
    around = (*around, id(tree))
    if type(tree) not in pytree.SUPPORTED_NODES and not isinstance(tree, (tuple, type)):
        fields: dict[str, Any] = {}
        items: dict[Any, Any] = {}
        if dataclasses.is_dataclass(tree):
            fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        if isinstance(tree, (dict, list)):
            items = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
        if fields or items:
            shell = _filled(tree, dict.fromkeys(fields), dict.fromkeys(items))
            if shell is None:
                return tree
            opened = [{k: _opened(v, around) for k, v in held.items()} for held in (fields, items)]
            return _Opened(shell, *opened)
    return _map_children(lambda child: _opened(child, around), tree)


def _closed(tree: Any) -> Any:
    if isinstance(tree, _Opened):
        return _filled(
            tree.shell,
            {name: _closed(value) for name, value in tree.fields.items()},
            {key: _closed(value) for key, value in tree.items.items()},
        )
    return _map_children(_closed, tree)


def _filled(container: Any, fields: dict[str, Any], items: dict[Any, Any]) -> Any:
    """A copy of ``container`` with these values in its places; None where it can't be copied."""
    try:
        made = copy.copy(container)
    except Exception:  # a class whose instances only its own code can make
        return None
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    put = dict.__setitem__ if isinstance(made, dict) else list.__setitem__
    for key, value in items.items():
        put(made, key, value)
    return made


def _map_children(fn: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) is tuple or type(tree) is list:
        return type(tree)(fn(v) for v in tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(fn(v) for v in tree))
    node = pytree.SUPPORTED_NODES.get(type(tree))
    if node is None:
        return tree
    # By its own functions alone: a registered class may refuse whatever else changes it (a Hugging Face ModelOutput is
    # a dict without update()).
    children, context = node.flatten_fn(tree)
    made = [fn(child) for child in children]
    same = all(a is b for a, b in zip(children, made, strict=True))
    return tree if same else node.unflatten_fn(made, context)
