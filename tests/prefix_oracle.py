"""Runs a graph at n rows and at b >= n rows with garbage in the others, and compares what the layouts say is equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from sgc_backend.facts import example
from sgc_backend.forms import expression
from sgc_backend.nodes import leaf_name, walk_leaves
from sgc_backend.prefix import PrefixFacts, prefix_facts
from sgc_backend.prefix_layouts import Layout
from sgc_backend.symbols import Symbols

N = 12  # the rows of example inputs: a dimension of this length is dynamic
SIZES = ((4, 8), (8, 12), (12, 20), (20, 24))
POISONS = ("nan", "large")


@dataclass
class Program:
    """A graph as Dynamo handed it over, with what was found about it."""

    gm: fx.GraphModule
    inputs: list[torch.Tensor]
    symbols: Symbols
    found: PrefixFacts
    tensors: list[int]  # positions of the tensor placeholders
    rows: frozenset[Any]
    guards: list[Any]

    def takes(self, rows: int) -> bool:
        """Whether Dynamo's guards admit so many rows; otherwise another graph would be called."""
        return all(g.xreplace(dict.fromkeys(self.rows, rows)) == sympy.true for g in self.guards)


class StopTracing(Exception):
    """Raised behind what is wanted of a graph: nothing is compiled of it."""


def program(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], is_cut: Callable[[fx.Node], bool] = lambda node: False
) -> Program:
    made = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        symbols = Symbols(gm)
        rows = frozenset(symbols.dimensions | symbols.sizes.keys())
        holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        positions = [at for at, n in enumerate(holders) if isinstance(example(n), torch.Tensor)]
        given = [t for t in examples if isinstance(t, torch.Tensor)]
        mode = detect_fake_mode([example(n) for n in holders])
        env = getattr(mode, "shape_env", None)
        guards = [env.replace(guard.expr) for guard in env.guards] if env is not None else []
        made.append(Program(gm, given, symbols, prefix_facts(gm, rows, is_cut), positions, rows, guards))
        raise StopTracing

    for tensor in inputs:
        for d, size in enumerate(tensor.shape):
            if size != N:
                torch._dynamo.mark_static(tensor, d)
    # A number that a closure holds is no number of rows.
    with torch.no_grad(), torch._dynamo.config.patch(specialize_int=True):
        try:
            torch.compile(fn, backend=backend, dynamic=True, fullgraph=True)(*inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, StopTracing):
                raise
    (only,) = made
    return only


class Run:
    """One run of a program's graph, node by node."""

    def __init__(self, made: Program, rows: int) -> None:
        self.made, self.rows = made, rows
        self.values = dict.fromkeys(made.rows, rows)
        self.env: dict[fx.Node, Any] = {}

    def size(self, expr: Any) -> int:
        expr = expression(expr)
        return int(expr.xreplace(self.values)) if hasattr(expr, "xreplace") else int(expr)

    def shape(self, tensor: torch.Tensor) -> list[int]:
        return [self.size(n) for n in tensor.shape]

    def versions(self) -> list[int]:
        """How often each value was written to."""
        return [t._version for t in pytree.tree_leaves(list(self.env.values())) if isinstance(t, torch.Tensor)]

    def memory(self, values: Any = None) -> set[int]:
        leaves = pytree.tree_leaves(list((values or self.env).values()))
        return {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, torch.Tensor)}

    def call(self, node: fx.Node) -> Any:
        args = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        runner = fx.Interpreter(self.made.gm)
        with torch.no_grad():
            return getattr(runner, node.op)(node.target, *args)


def differences(made: Program, exact_rows: int, rows: int, poison: str, *, trust: bool = False) -> list[str]:
    """Names of the values whose part within the exact sizes a padded run computes otherwise.

    ``trust``: run also the nodes that were blamed; otherwise their values are those of the exact run.
    """
    if not made.takes(exact_rows) or not made.takes(rows):
        return []
    generator = torch.Generator().manual_seed(rows * 31 + exact_rows)
    exact, padded = Run(made, exact_rows), Run(made, rows)
    layouts = made.found.layouts
    wrong: list[str] = []
    position, views = 0, False
    for node in made.gm.graph.nodes:
        if node.op == "output":
            break
        value = example(node)
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                real = drawn(made.inputs[position], exact.shape(value), generator)
                exact.env[node] = real
                padded.env[node] = spread(real, padded.shape(value), made.inputs[position], poison, generator)
                position += 1
            else:
                exact.env[node], padded.env[node] = exact.size(value), padded.size(value)
            continue
        versions, memory = exact.versions(), exact.memory()
        exact.env[node] = exact.call(node)
        wrote = versions != exact.versions()[: len(versions)]
        if wrote and views:
            break  # to what a blamed view may share
        if "empty" in node.name:  # whatever it holds
            padded.env[node] = padded.call(node)
            continue
        if node.name in made.found.blame and not trust:
            padded.env[node] = padded_like(exact.env[node], padded, value, poison, generator)
            if wrote:
                break  # what it wrote to isn't what the cut that it becomes would have written to
            views |= bool(exact.memory({node: exact.env[node]}) & memory)
            continue
        padded.env[node] = padded.call(node)
        wrong += compare(node, exact, padded, layouts)
    if trust or not made.found.blame:  # what was written in place since shows in what it was written to
        for node in exact.env:
            if "empty" not in node.name:
                wrong += compare(node, exact, padded, layouts)
    return wrong


def drawn(like: torch.Tensor, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Another input; integers, also in floating point, and booleans are values of ``like``."""
    if like.dtype.is_floating_point and not torch.equal(like, like.round()):
        return torch.randn(shape, generator=generator).to(like.dtype)
    picks = torch.randint(0, max(like.numel(), 1), shape, generator=generator)
    return like.flatten()[picks] if like.numel() else torch.zeros(shape, dtype=like.dtype)


def spread(
    real: torch.Tensor, shape: list[int], like: torch.Tensor, poison: str, generator: torch.Generator
) -> torch.Tensor:
    """``real`` as the prefix of a tensor of ``shape``, garbage behind it."""
    if like.dtype.is_floating_point:
        large = torch.randn(shape, generator=generator) * 1e4
        made = torch.full(shape, float("nan")) if poison == "nan" else large
        made = made.to(like.dtype)
    else:
        made = drawn(like, shape, generator)
    if all(a >= b for a, b in zip(shape, real.shape, strict=True)):  # otherwise there is no prefix
        made[tuple(slice(0, n) for n in real.shape)] = real
    return made


def padded_like(value: Any, padded: Run, fake: Any, poison: str, generator: torch.Generator) -> Any:
    """What the cut that a blamed node becomes hands to the next piece."""

    def one(real: Any, fake: Any) -> Any:
        if not isinstance(real, torch.Tensor):
            return padded.size(fake) if isinstance(fake, torch.SymInt) else real
        return spread(real, padded.shape(fake), real, poison, generator)

    return pytree.tree_map(one, value, fake)


def compare(node: fx.Node, exact: Run, padded: Run, layouts: dict[str, Layout]) -> list[str]:
    wrong = []
    found = dict(walk_leaves(padded.env[node], ()))
    for path, leaf in walk_leaves(exact.env[node], ()):
        if isinstance(leaf, torch.Tensor):
            name = leaf_name(node, path)
            if not equal(leaf, within(found[path], layouts[name], exact, padded)):
                wrong.append(name)
    return wrong


def within(tensor: torch.Tensor, layout: Layout, exact: Run, padded: Run) -> torch.Tensor:
    """The part of a padded tensor that has all coordinates inside of the exact sizes, in the exact shape."""
    tensor = tensor.reshape([padded.size(f) for dim in layout for f in dim])
    for d, factor in enumerate(f for dim in layout for f in dim):
        tensor = tensor.narrow(d, 0, exact.size(factor))
    sizes = []
    for dim in layout:
        size = 1
        for factor in dim:
            size *= exact.size(factor)
        sizes.append(size)
    return tensor.reshape(sizes)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(a, b)
