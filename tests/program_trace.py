"""A program's function as the FX graph that Dynamo would hand over, made without Dynamo: some milliseconds a program.

The function runs once on fake tensors under a mode that writes down every torch-level call. Sizes are symbols, as with
``dynamic=True``; a graph is used again only where its guards hold and its inputs have its layouts, as Dynamo does it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DUNDERS = {"__setitem__": operator.setitem, "__getitem__": operator.getitem}
REFLECTED = {
    "__radd__": operator.add, "__rmul__": operator.mul, "__rsub__": operator.sub, "__rtruediv__": operator.truediv,
}  # fmt: skip
SEEN_PROPERTIES = (torch.Tensor.mT, torch.Tensor.data, torch.Tensor.imag)
UNSEEN = ("__get__", "size", "dim", "numel", "stride", "__len__", "is_floating_point", "storage_offset")


class UntraceableError(Exception):
    """The function can't run on fake tensors; nothing is said about the backend."""


class _Recording(TorchFunctionMode):
    """Writes what is called into a graph, each node with the fake value that it has."""

    def __init__(self, graph: fx.Graph, symbol_nodes: dict[sympy.Symbol, fx.Node]) -> None:
        super().__init__()
        self.graph = graph
        self.symbol_nodes = symbol_nodes  # expression -> node
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids are only unique among the living

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in UNSEEN and getattr(func, "__self__", None) not in SEEN_PROPERTIES:
            return out
        node = self._node(func, name, self.argument(args), self.argument(kwargs))
        node.meta["example_value"] = out
        self._remember(out, node)
        return out

    def _node(self, func: Any, name: str, args: Any, kwargs: Any) -> fx.Node:
        if name in REFLECTED:
            return self.graph.call_function(REFLECTED[name], (args[1], args[0]))
        if name in DUNDERS:
            return self.graph.call_function(DUNDERS[name], args)
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if getattr(torch.Tensor, name, None) is func:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _remember(self, value: Any, node: fx.Node) -> None:
        self.alive.append(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            for index, item in enumerate(value):
                if isinstance(item, (torch.Tensor, tuple, list)):
                    picked = self.graph.call_function(operator.getitem, (node, index))
                    picked.meta["example_value"] = item
                    self._remember(item, picked)
        elif isinstance(value, torch.Tensor):
            self.nodes.setdefault(id(value), node)
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.symbol_nodes.setdefault(value.node.expr, node)

    def argument(self, tree: Any) -> Any:
        return fx.node.map_aggregate(tree, self._leaf)  # slices, too

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                raise UntraceableError("a tensor that no call gave")
            return self.nodes[id(value)]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(value.node.expr, value)
        return value

    def _number(self, expr: Any, value: Any = None) -> Any:
        """The node of an expression over sizes, as the arithmetic that Python would have done."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_number:
            return float(expr)
        found = self.symbol_nodes.get(expr)
        if found is not None:
            return found
        if isinstance(expr, sympy.Add):
            fn, parts = operator.add, expr.args
        elif isinstance(expr, sympy.Mul):
            fn, parts = operator.mul, expr.args
        elif type(expr).__name__ in ("FloorDiv", "CleanDiv"):
            fn, parts = operator.floordiv, expr.args
        elif type(expr).__name__ in ("PythonMod", "Mod"):
            fn, parts = operator.mod, expr.args
        elif type(expr).__name__ in ("IntTrueDiv", "FloatTrueDiv"):
            fn, parts = operator.truediv, expr.args
        elif type(expr).__name__ == "ToFloat":
            return self._emit(torch.sym_float, (self._number(expr.args[0]),))
        else:
            raise NotImplementedError(f"size {expr}")
        done = self._number(parts[0])
        for part in parts[1:]:
            done = self._emit(fn, (done, self._number(part)))
        return done

    def _emit(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        values = [a.meta["example_value"] if isinstance(a, fx.Node) else a for a in args]
        out = fn(*values)
        if not isinstance(out, (torch.SymInt, torch.SymFloat)):
            return out
        node = self.graph.call_function(fn, args)
        node.meta["example_value"] = out
        self.symbol_nodes.setdefault(out.node.expr, node)
        self.alive.append(out)
        return node


class Traced:
    """One graph of a function, and when it may be used.

    Args:
        fn: takes tensors, None and plain values in a flat list.
        args: an example.
        static: which of them have a fixed address.
        dynamic: the size that becomes a symbol; None: no symbol.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], static: Sequence[bool], dynamic: int | None
    ) -> None:
        self.modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self.inference = _inference(args)
        self.env = env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(shape_env=env, static_shapes=False, allow_non_fake_inputs=False)
        mode.cache_enabled = False  # it takes longer than it saves where every program is new
        graph = fx.Graph()
        symbols: dict[Any, fx.Node] = {}
        self.constants = [None if isinstance(a, torch.Tensor) else a for a in args]
        fakes: list[Any] = []
        for position, arg in enumerate(args):
            fakes.append(self._fake(mode, arg, position, dynamic) if isinstance(arg, torch.Tensor) else arg)
        self.fakes = fakes
        self.readers = self._symbols()
        recording = _Recording(graph, symbols)
        self.takes: list[int | sympy.Symbol] = []  # what the placeholders are: an argument, or a symbol
        for symbol, (position, read) in self.readers.items():
            node = graph.placeholder(str(symbol))
            node.meta["example_value"] = env.create_symintnode(symbol, hint=read(args[position]))
            symbols[symbol] = node
            self.takes.append(symbol)
        for position, fake in enumerate(fakes):
            if isinstance(fake, torch.Tensor):
                node = graph.placeholder(f"arg{position}_")
                node.meta["example_value"] = fake
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if static[position] else {}
                recording.nodes[id(fake)] = node
                self.takes.append(position)
        try:
            with mode, recording:
                out = fn(*fakes)
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
        self.flat, self.spec = pytree.tree_flatten(out)
        graph.output(tuple(recording.argument(v) for v in self.flat))
        self._drop_unused(graph)
        graph.lint()
        self.gm = fx.GraphModule({}, graph)
        self.examples = [n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"]
        self.call: Callable[..., Any] | None = None

    def _fake(self, mode: FakeTensorMode, arg: torch.Tensor, position: int, dynamic: int | None) -> torch.Tensor:
        dims = [DimDynamic.DUCK if dynamic is not None and n == dynamic else DimDynamic.STATIC for n in arg.shape]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        return mode.from_tensor(arg, symbolic_context=context, source=ConstantSource(f"arg{position}"))

    def _symbols(self) -> dict[sympy.Symbol, tuple[int, Callable[[torch.Tensor], int]]]:
        """The symbols of the inputs' sizes, strides and offsets, and which argument shows each."""
        found: dict[sympy.Symbol, tuple[int, Callable[[torch.Tensor], int]]] = {}
        for position, fake in enumerate(self.fakes):
            if isinstance(fake, torch.Tensor):
                for k, number in enumerate(_numbers(fake)):
                    if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
                        found.setdefault(number.node.expr, (position, lambda t, k=k: _numbers(t)[k]))
        return found

    def _drop_unused(self, graph: fx.Graph) -> None:
        kept = []
        for position, node in zip(self.takes, [n for n in graph.nodes if n.op == "placeholder"], strict=True):
            if not node.users and isinstance(position, int):
                graph.erase_node(node)
            else:
                kept.append(position)
        self.takes = kept

    def serves(self, args: Sequence[Any]) -> bool:
        """Whether the graph may be used for ``args``."""
        if self.modes != (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
            return False
        if self.inference != _inference(args):  # as Dynamo does, whose guards see a tensor's dispatch keys
            return False
        for fake, arg, constant in zip(self.fakes, args, self.constants, strict=True):
            if isinstance(fake, torch.Tensor) != isinstance(arg, torch.Tensor):
                return False
            if not isinstance(arg, torch.Tensor):
                if arg != constant or type(arg) is not type(constant):
                    return False
            elif (arg.dtype, arg.requires_grad, arg.dim()) != (fake.dtype, fake.requires_grad, fake.dim()):
                return False
        first = {id(fake): arg for fake, arg in zip(self.fakes, args, strict=True)}
        if any(isinstance(f, torch.Tensor) and first[id(f)] is not a for f, a in zip(self.fakes, args, strict=True)):
            return False  # it was made for one tensor given twice
        values = {symbol: sympy.Integer(read(args[position])) for symbol, (position, read) in self.readers.items()}
        for symbol, value in values.items():
            # 0 and 1 are special, as they are to Dynamo; a symbol that became a number is that number.
            known = self.env.replacements.get(symbol)
            if value < 2 or (known is not None and known.xreplace(values) != value):
                return False
        for fake, arg in zip(self.fakes, args, strict=True):
            if isinstance(fake, torch.Tensor):
                wanted = [self._value(number, values) for number in _numbers(fake)[:-1]]
                if wanted != _numbers(arg)[:-1]:
                    return False
        return all(bool(self._value(guard.expr, values)) for guard in self.env.guards)

    def _value(self, number: Any, values: dict[sympy.Symbol, Any]) -> Any:
        expr = number.node.expr if isinstance(number, torch.SymInt) else number
        if not isinstance(expr, sympy.Basic):
            return expr
        expr = expr.xreplace(values)
        return expr if expr in (sympy.true, sympy.false) else int(expr)

    def run(self, args: Sequence[Any]) -> Any:
        """The compiled graph's result for ``args``, nested as the function nests it."""
        given = []
        for take in self.takes:
            if isinstance(take, int):
                given.append(args[take])
            else:
                position, read = self.readers[take]
                given.append(read(args[position]))
        return pytree.tree_unflatten(list(self.call(*given)), self.spec)


def _inference(args: Sequence[Any]) -> list[bool]:
    return [isinstance(arg, torch.Tensor) and arg.is_inference() for arg in args]


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return [*tensor.shape, *tensor.stride(), tensor.storage_offset()]


class ByHand:
    """A function compiled by a Dynamo backend without Dynamo, one graph for each set of guards."""

    def __init__(
        self, fn: Callable[..., Any], static: Sequence[bool], backend: Callable[..., Any], dynamic: bool
    ) -> None:
        self.fn, self.static, self.backend, self.dynamic = fn, static, backend, dynamic
        self.graphs: list[Traced] = []

    def __call__(self, args: Sequence[Any], n: int) -> Any:
        """The result for ``args``, ``n`` of whose sizes are dynamic where they are this number."""
        for graph in self.graphs:
            if graph.serves(args):
                return graph.run(args)
        graph = Traced(self.fn, args, self.static, n if self.dynamic and n >= 2 else None)
        graph.call = self.backend(graph.gm, graph.examples)
        self.graphs.append(graph)
        return graph.run(args)
