"""The values of a walk over a graph: fake tensors, and tensors of which only form and memory are known so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .forms import number_form, storage_id, tensor_form

Memory = int | None


class ChangedError(Exception):
    """A node changed the form or the memory of a tensor that it was given, or gave another value than one like it."""


class Held:
    """One tensor of a walk.

    Attributes:
        node: whose value it was first.
        form: what tells it apart; None where its like can't be told.
        memory: a number that it shares with what lies in the same storage; None where it has none to show.
        tensor: the fake; None until a node that has to be run takes it.
    """

    __slots__ = ("form", "memory", "node", "tensor")

    def __init__(self, node: fx.Node, form: Hashable, memory: Memory, tensor: torch.Tensor | None) -> None:
        self.node, self.form, self.memory, self.tensor = node, form, memory, tensor


class Flat(NamedTuple):
    """A value.

    Attributes:
        leaves: `Held` for tensors; anything else as it is.
        spec: the structure.
        shape: that as text; None for one leaf.
    """

    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    shape: str | None


class Fakes:
    """The values of a graph's nodes.

    Args:
        told: whether forms are wanted. Without, memory is asked of the tensors each time, as nodes may change it.
    """

    def __init__(self, *, told: bool) -> None:
        self.told = told
        self.numbered = 0  # the number of the next memory
        self._values: dict[fx.Node, Flat] = {}
        self._held: dict[int, Held] = {}  # by id of the fakes, which live as long as this
        self._numbers: dict[int, Memory] = {}  # of storages by their ids
        self._storages: list[torch.UntypedStorage] = []  # kept: what is made later must not get the id of one that died

    def value(self, node: fx.Node) -> Flat:
        return self._values[node]

    def held(self, node: fx.Node) -> list[Held]:
        """The tensors in a node's value, in order."""
        flat = self._values.get(node)
        return [] if flat is None else [leaf for leaf in flat.leaves if type(leaf) is Held]

    def given(self, node: fx.Node) -> list[Held]:
        """The tensors in a node's arguments: each once, in order."""
        return list(dict.fromkeys(h for source in node.all_input_nodes for h in self.held(source)))

    def memories(self, node: fx.Node) -> list[Memory]:
        """The memory of a node's arguments and then of its value: each once, in order."""
        return list(dict.fromkeys(h.memory for h in (*self.given(node), *self.held(node))))

    def number(self, storage: int | None) -> Memory:
        """The number of a storage by its id; None for one that no value lies in."""
        return None if storage is None else self._numbers.get(storage)

    def real(self, node: fx.Node) -> Any:
        """A node's value with the fakes in it, which are there."""
        flat = self._values[node]
        return pytree.tree_unflatten([v.tensor if type(v) is Held else v for v in flat.leaves], flat.spec)

    def hold(self, node: fx.Node, value: Any) -> None:
        """``value`` is what the node was found to have."""
        leaves, spec = pytree.tree_flatten(value)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[k] = self._held.get(id(leaf)) or self._new(node, leaf)
        self._values[node] = Flat(leaves, spec, None if spec.is_leaf() else repr(spec))

    def assume(self, node: fx.Node, value: Flat) -> None:
        """``value`` is what the node has to have."""
        self._values[node] = value

    def fill(self, node: fx.Node, value: Any) -> None:
        """Put the fakes of ``value``, which is the node's, in the places of those that aren't there yet.

        Raises:
            ChangedError: one has another form or lies in other memory than it has to.
        """
        for h, tensor in zip(self._values[node].leaves, pytree.tree_leaves(value), strict=True):
            if type(h) is Held and h.tensor is None:
                h.tensor = tensor
                self._held[id(tensor)] = h
                storage = storage_id(tensor)
                if storage is not None and storage not in self._numbers:
                    self._note(tensor, storage, h.memory)
                number = self.number(storage)
                if self.form(tensor) != h.form or number != h.memory:
                    raise ChangedError

    def check_same(self, node: fx.Node) -> None:
        """Behind the running of a node, look at what it was given. Raises ChangedError."""
        for h in self.given(node):
            if not self.told:
                h.memory = self._number_of(h.tensor)
            elif h.form is not None and (self.form(h.tensor) != h.form or self._number_of(h.tensor) != h.memory):
                raise ChangedError

    def form(self, tensor: Any) -> Hashable | None:
        """What tells a tensor apart, with what it lies in; None where its like can't be told."""
        form = tensor_form(tensor)
        if form is None or getattr(tensor, "constant", None) is not None or storage_id(tensor) is None:
            return None
        wrapped = getattr(tensor, "_wrapped_number", None)
        return form, number_form(tensor.untyped_storage().nbytes()), number_form(wrapped)

    def another_memory(self) -> int:
        """The number of memory that nothing else lies in."""
        self.numbered += 1
        return self.numbered - 1

    def _new(self, node: fx.Node, tensor: torch.Tensor) -> Held:
        form = self.form(tensor) if self.told else None
        held = self._held[id(tensor)] = Held(node, form, self._number_of(tensor), tensor)
        return held

    def _number_of(self, tensor: Any) -> Memory:
        storage = storage_id(tensor)
        if storage is None:
            return None
        number = self._numbers.get(storage)
        if number is None:
            number = self.another_memory()
            self._note(tensor, storage, number)
        return number

    def _note(self, tensor: torch.Tensor, storage: int, number: Memory) -> None:
        self._numbers[storage] = number
        self._storages.append(tensor.untyped_storage())
