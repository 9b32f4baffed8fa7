"""Which pieces of a graph are the same program: the layers of a model, as a rule. They are compiled once."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from .forms import number_form, storage_id, tensor_form
from .groups import Group


def program(group: Group) -> Hashable | None:
    """What a group computes, without the names it gives things: equal for two groups that one compilation serves.

    None where the group holds something that can't be compared.
    """
    places: dict[fx.Node, int] = {}
    storages: dict[int | None, int] = {}
    fakes = iter(group.fakes)
    lines: list[Any] = []
    try:
        for node in group.gm.graph.nodes:
            places[node] = len(places)
            if node.op == "placeholder":
                fake = next(fakes)
                # Compilers hold a write to one input for no write to another, unless they see them share memory.
                storage = storage_id(fake) if isinstance(fake, torch.Tensor) else None
                lines.append(
                    ("placeholder", _value(fake), storages.setdefault(storage, places[node]) if storage else None)
                )
            elif node.op == "get_attr":
                # By identity: two constants that are equal now may be written apart later.
                lines.append(("get_attr", id(operator.attrgetter(str(node.target))(group.gm))))
            else:
                lines.append((node.op, node.target, _frozen(node.args, places), _frozen(node.kwargs, places)))
        found = tuple(lines)
        hash(found)
    except (_DifferentError, TypeError):
        return None
    return found


class _DifferentError(Exception):
    """A value that can't be compared."""


def _value(fake: Any) -> Hashable:
    if not isinstance(fake, torch.Tensor):
        return number_form(fake)
    form = tensor_form(fake)
    if form is None:
        raise _DifferentError
    return form


def _frozen(value: Any, places: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", places[value])
    if isinstance(value, (tuple, list)):
        return (type(value), *(_frozen(v, places) for v in value))
    if isinstance(value, Mapping):
        return ("mapping", *((k, _frozen(v, places)) for k, v in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_frozen(v, places) for v in (value.start, value.stop, value.step)))
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _DifferentError
    return number_form(value)
