"""What Dynamo says of the nodes and values of its graph, and calling a node on other values. FX and fakes only."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

HOST_TYPES = (int, float, bool, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
SYM_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
WRAPPED, LABEL = "sgc_wrapped_number", "sgc_label"  # where `note_inputs` keeps what it finds


def example(node: fx.Node) -> Any:
    """The fake value that Dynamo computed for ``node``, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_host_value(value: Any) -> bool:
    """Whether ``value`` holds no tensor: numbers, sizes, symbols, and containers of them."""
    leaves = pytree.tree_leaves(list(value) if isinstance(value, torch.Size) else value)
    return value is not None and all(isinstance(v, (*HOST_TYPES, *SYM_TYPES)) or v is None for v in leaves)


def free_unbacked(value: Any) -> bool:
    """Whether a size or number in ``value`` depends on tensor data.

    Sizes of inputs that were marked as unbacked do not: every call shows them.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for leaf in pytree.tree_leaves(list(value) if isinstance(value, torch.Size) else value):
        if isinstance(leaf, (torch.Tensor, *SYM_TYPES)):
            found = free_unbacked_symbols(leaf)
            if found and not found <= _shown_by_inputs(leaf):
                return True
    return False


def _shown_by_inputs(value: Any) -> Any:
    """The unbacked symbols of the graph that ``value`` comes from that are sizes of its inputs."""
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
    symbolic = next(size for size in sizes if isinstance(size, SYM_TYPES))
    return getattr(symbolic.node.shape_env, "unbacked_inputs", frozenset())


def is_wrapped_number(node: fx.Node) -> bool:
    """Whether a placeholder is a Python number that Dynamo wrapped in a 0-dim host tensor."""
    if WRAPPED in node.meta:
        return node.meta[WRAPPED]
    arg = node.meta.get("grapharg")
    return node.op == "placeholder" and arg is not None and bool(getattr(arg, "pass_arg_as_tensor", False))


def label(node: fx.Node) -> str:
    """What the user calls a placeholder: "L['x']"."""
    if LABEL in node.meta:
        return node.meta[LABEL]
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is not None:
        try:
            name = source.name
            return str(name() if callable(name) else name)  # a property since torch 2.10, a method before
        except (NotImplementedError, AttributeError):
            pass
    return str(node.target)


def note_inputs(gm: fx.GraphModule) -> None:
    """Keep what Dynamo says of the placeholders while it compiles, and deletes then: the graph may be split again."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta[WRAPPED], node.meta[LABEL] = is_wrapped_number(node), label(node)


def tensors(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors among the leaves of ``tree``."""
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What a get_attr node stands for."""
    return operator.attrgetter(str(node.target))(gm)


def is_composite(func: Any) -> bool:
    """Whether ``func`` is made of other ops, which are what is to be looked at.

    Outside of inference mode the dispatcher takes such an op apart before a mode sees it; inside, or on tensors made
    inside, the mode gets it whole: an `aten::to` of which the schema doesn't tell whether it copies, nor where to.
    """
    # prim::device and its like are no dispatcher's ops, and can't be asked.
    return isinstance(func, OpOverload) and func.namespace != "prim" and func._can_decompose()


@contextlib.contextmanager
def computing_aside(mode: Any) -> Iterator[None]:
    """Fakes of ``mode`` (None: of no mode) may be computed, and neither guards nor symbols of Dynamo's come of it."""
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        # As Dynamo does: without it some ops (constant_pad_nd) turn symbolic sizes into numbers, and the mode's cache
        # would hand those on to whoever compiles the pieces.
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        yield


def refreshed(value: Any) -> Any:
    """Fakes like ``value``'s, each over a storage of its own, so that roots can be told apart."""
    return pytree.tree_map_only(torch.Tensor, _fresh_fake, value)


def _fresh_fake(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided or free_unbacked(t):
        return t
    with torch.inference_mode(False):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)


def call(gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call what ``node`` calls."""
    if isinstance(node.target, HigherOrderOperator):
        return run_body(args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def run_body(args: Any) -> Any:
    """Run what a transparent operator wraps: its body and the operands behind it, less the body's identifier."""
    position = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
    operands = list(args[position + 1 :])
    if operands and isinstance(operands[0], str):
        del operands[0]
    return args[position](*operands)


TRANSPARENT = frozenset(
    ("wrap", "tag_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled", "invoke_subgraph")
)
