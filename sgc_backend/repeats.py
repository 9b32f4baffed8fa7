"""Which nodes of a graph are like an earlier one, and what is known of them then. FX and fake tensors only.

Note [Repeated nodes]
    The layers of a model repeat the same nodes, and to run one on fakes takes a millisecond. Two nodes are alike where
    they call the same with arguments of the same forms, which share memory among themselves in the same way, and where
    Dynamo computed values of the same form for both. What was found of the first then holds for the second, told by
    places: of its arguments, and of the memory that they and its value lie in. So the second isn't run. Its value is
    known by form and memory, and fakes are made when a node that has to be run takes them: new ones where the value is
    new memory, else (a view) by running the node after all.

    That rests on nodes changing nothing but what tensors hold. Nodes without tensors may (a grad mode, a level of
    torch.func), so nothing behind one is like anything in front of it. Where a node changes the form or the memory of
    a tensor that it was given, the walk is begun anew, and then every node is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .fakes import Fakes, Flat, Held, Memory
from .forms import number_form, tensor_form
from .interpret import HOST_TYPES, SYM_TYPES, example, is_host_value, refreshed

Found = TypeVar("Found")
CHANGE_NOTHING = ("_log_api_usage_once",)  # although they return nothing


class _Place(NamedTuple):
    """A tensor of a remembered value.

    Attributes:
        given: the argument that it is, by its place; None for a new tensor.
        leaf: the first leaf that it is.
        memory: what it lies in, by its place in `Fakes.memories`.
        form: as of `Held`.
    """

    given: int | None
    leaf: int
    memory: int
    form: Hashable


@dataclass(frozen=True)
class Seen(Generic[Found]):
    """A node that was run.

    Attributes:
        value: with places for tensors.
        fresh: all new tensors in it are what `refreshed` makes of Dynamo's.
        found: what was found, told by places.
    """

    value: Flat
    fresh: bool
    found: Found


class _UnlikeError(Exception):
    """A value whose like can't be told."""


class Repeats(Generic[Found]):
    """What was found of the nodes of one graph that were run.

    Args:
        fakes: the values of its nodes.
        about: what else has to be equal for two arguments to be alike.
        context: what else has to be equal for two nodes to be alike.
    """

    def __init__(self, fakes: Fakes, about: Callable[[Held], Hashable], context: Callable[[fx.Node], Hashable]) -> None:
        self._fakes, self._about, self._context = fakes, about, context
        self._seen: dict[Hashable, Seen[Found]] = {}
        self._epoch = 0

    def key(self, node: fx.Node) -> Hashable | None:
        """Equal for nodes that are alike; None where that can't be told, or there are no tensors in its arguments."""
        given = self._fakes.given(node) if self._fakes.told else ()
        if not given or any(h.form is None for h in given):
            return None
        memories: dict[Memory, int] = {}
        told = tuple((h.form, memories.setdefault(h.memory, len(memories)), self._about(h)) for h in given)
        places = {h: k for k, h in enumerate(given)}
        try:
            arguments = self._frozen(node.args, places), self._frozen(node.kwargs, places)
            computed = _example_form(example(node))
            key = (self._epoch, node.op, node.target, told, arguments, computed, self._context(node))
            hash(key)
        except (_UnlikeError, TypeError):
            return None
        return key

    def find(self, key: Hashable | None) -> Seen[Found] | None:
        """What was found of a node of that key."""
        return None if key is None else self._seen.get(key)

    def keep(self, node: fx.Node, key: Hashable | None, found: Found, numbered: int) -> None:
        """``found`` is what the running of ``node`` told; memory from ``numbered`` on was met in it first."""
        if key is not None:
            fresh, places = self._is_fresh(node, numbered), self._places(node)
            if fresh is not None and places is not None:
                _, spec, shape = self._fakes.value(node)
                self._seen[key] = Seen(Flat(places, spec, shape), fresh, found)
        elif not self._fakes.given(node) and not self._fakes.held(node) and not _changes_nothing(node):
            self._epoch += 1

    def value_like(self, node: fx.Node, value: Flat) -> Flat:
        """The value of ``node``, which is like another one that had ``value``."""
        given = self._fakes.given(node)
        memories = list(dict.fromkeys(h.memory for h in given))
        leaves: list[Any] = []
        for k, leaf in enumerate(value.leaves):
            if type(leaf) is _Place:
                if leaf.given is not None:
                    leaf = given[leaf.given]
                elif leaf.leaf < k:
                    leaf = leaves[leaf.leaf]
                else:
                    while leaf.memory >= len(memories):
                        memories.append(self._fakes.another_memory())
                    leaf = Held(node, leaf.form, memories[leaf.memory], None)
            leaves.append(leaf)
        return Flat(leaves, value.spec, value.shape)

    def _places(self, node: fx.Node) -> list[Any] | None:
        """The leaves of a node's value by places; None where one can't be told so."""
        at, memories = {h: k for k, h in enumerate(self._fakes.given(node))}, self._fakes.memories(node)
        first: dict[Held, int] = {}
        places: list[Any] = []
        for k, leaf in enumerate(self._fakes.value(node).leaves):
            if type(leaf) is Held:
                if leaf.form is None:
                    return None
                leaf = _Place(at.get(leaf), first.setdefault(leaf, k), memories.index(leaf.memory), leaf.form)
            elif not _is_host_leaf(leaf):
                return None
            places.append(leaf)
        return places

    def _is_fresh(self, node: fx.Node, numbered: int) -> bool | None:
        """Whether all new tensors in a value are what `refreshed` makes of Dynamo's; None: one is Dynamo's own, or of
        another node that is no argument's."""
        given, value = self._fakes.given(node), self._fakes.value(node)
        known = {h.memory for h in given}
        new = [(k, h) for k, h in enumerate(value.leaves) if type(h) is Held and h not in given]
        examples, spec = pytree.tree_flatten(example(node))
        for _, h in new:
            elsewhere = h.memory is None or (h.memory < numbered and h.memory not in known)
            if elsewhere or h.node is not node or any(h.tensor is leaf for leaf in examples):
                return None
        if len({h.memory for _, h in new} - known) < len(new) or spec != value.spec:
            return not new
        made = pytree.tree_leaves(refreshed(example(node)))
        return all(isinstance(made[k], torch.Tensor) and self._fakes.form(made[k]) == h.form for k, h in new)

    def _frozen(self, value: Any, places: dict[Held, int]) -> Hashable:
        if isinstance(value, fx.Node):
            leaves, _, shape = self._fakes.value(value)
            return ("node", shape, *(places[v] if type(v) is Held else _host_form(v) for v in leaves))
        if isinstance(value, (tuple, list)):
            return (type(value), *(self._frozen(v, places) for v in value))
        if isinstance(value, dict):
            return ("dict", *((k, self._frozen(v, places)) for k, v in value.items()))
        if isinstance(value, slice):
            return ("slice", *(self._frozen(v, places) for v in (value.start, value.stop, value.step)))
        return _host_form(value)


def _is_host_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (*HOST_TYPES, *SYM_TYPES, torch.Size))


def _host_form(value: Any) -> Hashable:
    """Raises _UnlikeError for what is no number, size or setting."""
    if isinstance(value, torch.Size):
        return ("size", *map(number_form, value))
    if isinstance(value, fx.GraphModule):
        return ("graph", id(value))  # which the graph keeps alive
    if not _is_host_leaf(value):
        raise _UnlikeError
    return number_form(value)


def _example_form(value: Any) -> Hashable:
    leaves, spec = pytree.tree_flatten(value)
    told = []
    for leaf in leaves:
        form = tensor_form(leaf) if isinstance(leaf, torch.Tensor) else _host_form(leaf)
        if form is None and leaf is not None:
            raise _UnlikeError
        told.append(form)
    return (None if spec.is_leaf() else repr(spec), *told)


def _changes_nothing(node: fx.Node) -> bool:
    value = example(node)
    name = getattr(node.target, "__name__", "")
    return (value is not None and is_host_value(value)) or name in CHANGE_NOTHING
