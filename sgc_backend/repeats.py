"""Goes through Dynamo's graph node by node on fake tensors, and runs none that is like an earlier one.

The layers of a model repeat the same nodes, and to run one on fakes takes a millisecond. FX and fake tensors only; no
device is touched, and neither guards nor symbols come of it.

Note [Repeated nodes]
    Two nodes are alike where they call the same with arguments of the same forms, which share memory among themselves
    in the same way, and where Dynamo computed values of the same form for both. What was found of the first then holds
    for the second, told by places: of its arguments, and of the memory that they and its value lie in. So the second
    isn't run. Its value is known by form and memory, and fakes are made when a node that has to be run takes them: new
    ones where the value is new memory, else (a view) by running the node after all.

    That rests on nodes changing nothing but what they return. Nodes without tensors (a grad mode, a level of
    torch.func) do, so nothing behind one is like anything in front of it. Where a node changes its argument's form, its
    size or its memory, the walk is begun anew and remembers nothing.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from .forms import number_form, storage_id, tensor_form
from .interpret import (
    HOST_TYPES,
    SYM_TYPES,
    TRANSPARENT,
    attribute,
    call,
    example,
    free_unbacked,
    is_host_value,
    is_wrapped_number,
    refreshed,
)

Found = TypeVar("Found")
Walks = TypeVar("Walks", bound="Walker[Any]")
Memory = int | None
ALIKE_EVERYWHERE = ("_log_api_usage_once",)  # change nothing, although they return nothing


class Held:
    """One tensor of a walk.

    Attributes:
        node: whose value it was first.
        form: None where its like can't be told.
        memory: a number that it shares with what lies in the same storage; None where it has none to show.
        tensor: the fake; None until a node that has to be run takes it.
    """

    __slots__ = ("form", "memory", "node", "tensor")

    def __init__(self, node: fx.Node, form: Hashable, memory: Memory, tensor: torch.Tensor | None) -> None:
        self.node, self.form, self.memory, self.tensor = node, form, memory, tensor


class _Flat(NamedTuple):
    """A node's value: leaves with `Held` for tensors, and the structure; ``shape`` is its text, None for one leaf."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    shape: str | None


class _Place(NamedTuple):
    """A tensor of a remembered value.

    Attributes:
        given: the argument that it is, by its place; None for a new tensor.
        leaf: the first leaf that it is.
        memory: what it lies in, by its place.
    """

    given: int | None
    leaf: int
    memory: int
    form: Hashable


@dataclass(frozen=True)
class _Seen(Generic[Found]):
    """A node that was run: its value with a `_Place` for each tensor, whether all new ones are new memory, and what was
    found."""

    value: _Flat
    fresh: bool
    found: Found


class _ChangedError(Exception):
    """A node changed what it was given, or changed by itself."""


class _UnlikeError(Exception):
    """A value whose like can't be told."""


class Walker(abc.ABC, Generic[Found]):
    """Visits the nodes of a graph in order. Placeholders get fakes over storages of their own.

    A subclass says what it wants to find of a call node: `examine` finds it and the node's value, either by `run`, or
    for a node that `skips` says must not be run by `refreshed` from what Dynamo computed; `conclude` tells it by
    places, and `apply` is given it for this node and for every later one that is like it.
    """

    def __init__(self, gm: fx.GraphModule, *, remembers: bool = True) -> None:
        self.gm = gm
        self.mode: Any = detect_fake_mode([example(n) for n in gm.graph.nodes])
        self.values: dict[fx.Node, _Flat] = {}
        self._remembers = remembers
        self._seen: dict[Hashable, _Seen[Found]] = {}
        self._like: dict[fx.Node, _Seen[Found]] = {}  # of nodes that weren't run
        self._held: dict[int, Held] = {}  # by id of the fakes, which live as long as the walk
        self._numbers: dict[int, int] = {}  # of storages by their ids
        self._order: dict[fx.Node, int] = {}
        self._count = itertools.count()
        self._epoch = 0

    def interpret(self) -> None:
        mode = self.mode
        with contextlib.ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode)
                if mode.shape_env is not None:
                    # Only facts are wanted here: no new guard and no new symbol may come of this walk.
                    stack.enter_context(mode.shape_env.suppress_guards())
                    stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            # As Dynamo does: without it some ops (constant_pad_nd) turn symbolic sizes into numbers, and the mode's
            # cache would hand those on to whoever compiles the pieces.
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.no_grad())
            for node in self.gm.graph.nodes:
                self._order[node] = len(self._order)
                if node.op == "placeholder":
                    self._hold(node, self._placeholder(node))
                    self.visit_input(node)
                elif node.op == "get_attr":
                    self._hold(node, self._attribute(node))
                elif node.op != "output":
                    self._visit(node)

    # -- what a subclass says ----------------------------------------------------------------------------------------

    def visit_input(self, node: fx.Node) -> None:
        """Called behind each placeholder."""

    @abc.abstractmethod
    def examine(self, node: fx.Node) -> tuple[Any, Any]:
        """The value of a call node, and what is to be concluded from."""

    @abc.abstractmethod
    def conclude(self, node: fx.Node, seen: Any) -> Found:
        """What was found, told by places alone: in `given`, in `held`, in `memories`."""

    @abc.abstractmethod
    def apply(self, node: fx.Node, found: Found) -> None:
        """Called once for each call node, in order; its value is known by `held` then."""

    def context(self, node: fx.Node) -> Hashable:
        """What else has to be equal for two nodes to be alike."""

    def about(self, held: Held) -> Hashable:
        """What else has to be equal for two arguments to be alike."""

    # -- what it can ask ---------------------------------------------------------------------------------------------

    def held(self, node: fx.Node) -> list[Held]:
        """The tensors in a node's value, in order."""
        flat = self.values.get(node)
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

    def run(self, node: fx.Node) -> Any:
        """Call what ``node`` calls with the values of its arguments."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._real)
        return call(self.gm, node, args, kwargs)

    def skips(self, node: fx.Node) -> bool:
        """Nodes that must not or need not be run again: host arithmetic, unbacked sizes, operators of operators."""
        value = example(node)
        if isinstance(node.target, HigherOrderOperator):
            return node.target.name() not in TRANSPARENT
        if free_unbacked(value) or any(free_unbacked(example(n)) for n in node.all_input_nodes):
            return True
        return value is not None and is_host_value(value)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        key = self._key(node)
        seen = None if key is None else self._seen.get(key)
        if seen is None:
            self.apply(node, self._examined(node, key))
        else:
            self._like[node] = seen
            self.values[node] = self._value_like(node, seen.value)
            self.apply(node, seen.found)

    def _examined(self, node: fx.Node, key: Hashable) -> Found:
        self._make(h for source in node.all_input_nodes for h in self.held(source))
        value, raw = self.examine(node)
        given = self.given(node)
        for h in given:
            self._check_same(h)
        flat = self._hold(node, value)
        found = self.conclude(node, raw)
        if key is not None:
            fresh = self._is_fresh(node, given)
            places = self._places(node, given) if fresh is not None else None
            if places is not None:
                self._seen[key] = _Seen(_Flat(places, flat.spec, flat.shape), bool(fresh), found)
        elif not given and not self.held(node) and not _changes_nothing(node):
            self._epoch += 1
        return found

    def _check_same(self, h: Held) -> None:
        if not self._remembers:
            h.memory = self._number_of(h.tensor)
        elif h.form is not None and (self._form(h.tensor) != h.form or self._number_of(h.tensor) != h.memory):
            raise _ChangedError

    def _key(self, node: fx.Node) -> Hashable | None:
        given = self.given(node) if self._remembers else ()
        if not given:
            return None
        places = {h: k for k, h in enumerate(given)}
        memories: dict[Memory, int] = {}
        told = []
        for h in given:
            if h.form is None:
                return None
            told.append((h.form, memories.setdefault(h.memory, len(memories)), self.about(h)))
        try:
            key = (
                self._epoch,
                node.op,
                node.target,
                tuple(told),
                self._frozen(node.args, places),
                self._frozen(node.kwargs, places),
                _example_form(example(node)),
                self.context(node),
            )
            hash(key)
        except (_UnlikeError, TypeError):
            return None
        return key

    def _frozen(self, value: Any, places: dict[Held, int]) -> Hashable:
        if isinstance(value, fx.Node):
            flat = self.values[value]
            return ("node", flat.shape, *(places[v] if type(v) is Held else _host_form(v) for v in flat.leaves))
        if isinstance(value, (tuple, list)):
            return (type(value), *(self._frozen(v, places) for v in value))
        if isinstance(value, dict):
            return ("dict", *((k, self._frozen(v, places)) for k, v in value.items()))
        if isinstance(value, slice):
            return ("slice", *(self._frozen(v, places) for v in (value.start, value.stop, value.step)))
        return _host_form(value)

    # -- values ------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        value = example(node)
        if not isinstance(value, torch.Tensor) or is_wrapped_number(node):
            return value
        return refreshed(value)

    def _attribute(self, node: fx.Node) -> Any:
        value = attribute(self.gm, node)
        if isinstance(value, torch.Tensor) and self.mode is not None:
            return self.mode.from_tensor(value, static_shapes=True)
        return value

    def _hold(self, node: fx.Node, value: Any) -> _Flat:
        leaves, spec = pytree.tree_flatten(value)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[k] = self._held.get(id(leaf)) or self._new(node, leaf)
        flat = self.values[node] = _Flat(leaves, spec, None if spec.is_leaf() else repr(spec))
        return flat

    def _new(self, node: fx.Node, tensor: torch.Tensor) -> Held:
        form = self._form(tensor) if self._remembers else None
        held = self._held[id(tensor)] = Held(node, form, self._number_of(tensor), tensor)
        return held

    def _number_of(self, tensor: Any) -> Memory:
        storage = storage_id(tensor)
        return None if storage is None else self._numbers.setdefault(storage, next(self._count))

    def _form(self, tensor: Any) -> Hashable | None:
        form = tensor_form(tensor)
        if form is None or getattr(tensor, "constant", None) is not None or storage_id(tensor) is None:
            return None
        wrapped = getattr(tensor, "_wrapped_number", None)
        return form, number_form(tensor.untyped_storage().nbytes()), number_form(wrapped)

    def _is_fresh(self, node: fx.Node, given: Sequence[Held]) -> bool | None:
        """Whether all new tensors in a value are what `refreshed` makes of Dynamo's; None: one is Dynamo's own, or
        another node's."""
        old, known = set(given), {h.memory for h in given}
        new = [(k, h) for k, h in enumerate(self.values[node].leaves) if type(h) is Held and h not in old]
        examples, spec = pytree.tree_flatten(example(node))
        if any(h.node is not node or any(h.tensor is leaf for leaf in examples) for _, h in new):
            return None
        if len({h.memory for _, h in new} - known) < len(new) or spec != self.values[node].spec:
            return not new
        made = pytree.tree_leaves(refreshed(example(node)))
        return all(isinstance(made[k], torch.Tensor) and self._form(made[k]) == h.form for k, h in new)

    def _places(self, node: fx.Node, given: Sequence[Held]) -> list[Any] | None:
        """The leaves of a node's value by places; None where it holds what can't be."""
        at, memories = {h: k for k, h in enumerate(given)}, self.memories(node)
        first: dict[Held, int] = {}
        places: list[Any] = []
        for k, leaf in enumerate(self.values[node].leaves):
            if type(leaf) is Held:
                if leaf.form is None:
                    return None
                leaf = _Place(at.get(leaf), first.setdefault(leaf, k), memories.index(leaf.memory), leaf.form)
            elif not _is_host_leaf(leaf):
                return None
            places.append(leaf)
        return places

    def _value_like(self, node: fx.Node, value: _Flat) -> _Flat:
        given = self.given(node)
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
                        memories.append(next(self._count))
                    leaf = Held(node, leaf.form, memories[leaf.memory], None)
            leaves.append(leaf)
        return _Flat(leaves, value.spec, value.shape)

    def _real(self, node: fx.Node) -> Any:
        flat = self.values[node]
        return pytree.tree_unflatten([v.tensor if type(v) is Held else v for v in flat.leaves], flat.spec)

    def _make(self, wanted: Iterable[Held]) -> None:
        """Make the fakes that are not there yet."""
        needed: set[fx.Node] = set()
        stack = [h.node for h in wanted if h.tensor is None]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if not self._like[node].fresh:
                    stack.extend(h.node for h in self.given(node) if h.tensor is None)
        for node in sorted(needed, key=self._order.__getitem__):
            value = refreshed(example(node)) if self._like[node].fresh else self.run(node)
            for h, tensor in zip(self.values[node].leaves, pytree.tree_leaves(value), strict=True):
                if type(h) is Held and h.tensor is None:
                    self._fill(h, tensor)

    def _fill(self, h: Held, tensor: torch.Tensor) -> None:
        h.tensor = tensor
        self._held[id(tensor)] = h
        storage = storage_id(tensor)
        if self._form(tensor) != h.form or storage is None or self._numbers.setdefault(storage, h.memory) != h.memory:
            raise _ChangedError


def walked(make: Callable[[bool], Walks]) -> Walks:
    """The walker that ``make(remembers)`` makes, once it went through its graph."""
    walker = make(True)
    try:
        walker.interpret()
    except _ChangedError:
        walker = make(False)
        walker.interpret()
    return walker


def _is_host_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (*HOST_TYPES, *SYM_TYPES, torch.Size))


def _host_form(value: Any) -> Hashable:
    """Raises _UnlikeError for what is none of a tensor's sizes and settings."""
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
    return (value is not None and is_host_value(value)) or name in ALIKE_EVERYWHERE
