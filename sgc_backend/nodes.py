"""Questions about single nodes of a Dynamo graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .facts import GraphFacts, example, free_unbacked, is_host_value


def is_float_arithmetic(node: fx.Node) -> bool:
    """Arithmetic on host floats: sympy reorders it, which changes last bits, so it is computed as it was written."""
    return (
        node.op == "call_function"
        and isinstance(example(node), torch.SymFloat)
        and all(is_evaluated(n) for n in node.all_input_nodes)
    )


def is_evaluated(node: fx.Node) -> bool:
    value = example(node)
    return node.op != "get_attr" and value is not None and is_host_value(value) and not free_unbacked(value)


def plain_value(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def is_container(value: Any) -> bool:
    """Whether ``value`` is a tuple or list that holds tensors."""
    return isinstance(value, (tuple, list)) and not isinstance(value, torch.Size) and not is_host_value(value)


def reads_number(node: fx.Node, facts: GraphFacts) -> bool:
    """The .item() of a Python number that Dynamo wrapped: every group takes the number itself."""
    source = node.args[0] if node.op == "call_method" and node.target == "item" else None
    return isinstance(source, fx.Node) and source.name in facts.wrapped_numbers


def walk_leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            yield from walk_leaves(item, (*path, index))
    else:
        yield path, value


def leaves(node: fx.Node) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of every leaf of a value: one, with an empty path, where it isn't a container."""
    value = example(node)
    if not is_container(value):
        return [((), value)]
    return list(walk_leaves(value, ()))


def leaf_names(node: fx.Node) -> list[str]:
    return [leaf_name(node, path) for path, _ in leaves(node)]


def leaf_name(node: fx.Node, path: tuple[Any, ...]) -> str:
    return "__".join((node.name, *map(str, path)))


def source_line(node: fx.Node) -> str:
    """The user's line that made ``node``, as ``file:line: code``, or an empty string."""
    trace = node.stack_trace or ""
    frames = [line.strip() for line in trace.strip().splitlines()]
    for position in range(len(frames) - 1, -1, -1):
        if frames[position].startswith("File "):
            place = frames[position].removeprefix("File ").split(", in ")[0]
            file, _, line = place.partition(", line ")
            code = frames[position + 1] if position + 1 < len(frames) else ""
            return f"{file.strip(chr(34))}:{line}: {code}"
    return ""
