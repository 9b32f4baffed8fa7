"""Compile a group of nodes, or a graph left whole, with the inner compiler.

A piece that one of torch's compilers can't take runs eagerly, and is captured all the same. That is decided when it is
compiled, by the compiler's error or by what its fakes show, and never by a run: a run that fails may have written
already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from .alike import program
from .errors import OptionError
from .facts import written
from .forms import storage_id
from .groups import PIECE, Group
from .interpret import example, tensors

TORCHS = ("inductor", "aot_eager")  # compilers of torch's own, which functionalise what they are given
# Nothing about the piece: the next one would fail as well.
LATE = "it came about when a capture had failed, and Dynamo takes no guards any more that a compiler might need"
SETUP_ERRORS = frozenset(("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton", "OutOfMemoryError"))


@dataclass(frozen=True)
class Uncompiled:
    """Why a piece runs eagerly: ``cause`` in words, ``error`` what the compiler raised, if it was asked."""

    cause: str
    error: Exception | None = None


def compile_group(group: Group, inner: str | Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A piece's callable: takes ``group.inputs`` in order, returns a tuple in the order of ``group.outputs``.

    Raises:
        Exception: whatever the compiler raises.
    """
    if inner == "eager":
        return group.gm.forward
    fakes = [_in_backend_mode(fake) for fake in group.fakes]
    if inner == "inductor":
        return _inductor(group.gm, fakes)
    return _flat(compile_whole(group.gm, fakes, inner))


Programs = dict[Hashable, "Callable[..., tuple[Any, ...]] | Uncompiled"]  # by what they compute


def compile_pieces(
    groups: Sequence[Group], inner: str | Callable[..., Any], known: Programs | None = None
) -> tuple[list[Callable[..., tuple[Any, ...]]], Mapping[int, Uncompiled], Programs]:
    """The callables of ``groups``, cuts as they are; pieces that are the same program are compiled once.

    Args:
        known: what was compiled while Dynamo still took guards. Nothing else is compiled then: a compiler may rely on
            a guard that Dynamo would never learn of.

    Returns:
        The callables in order; by index of their group, those pieces that run eagerly because a compiler of torch's
        can't take them, or may not any more; and what was compiled. An ``inner`` of the user's own takes every piece.

    Raises:
        Exception: what ``inner`` raises where it is a callable, or where no piece could be compiled here.
    """
    made: Programs = {} if known is None else dict(known)
    found: list[Callable[..., tuple[Any, ...]]] = []
    eager: dict[int, Uncompiled] = {}
    for group in groups:
        if group.kind != PIECE:
            found.append(group.gm.forward)
            continue
        key = program(group) if inner in TORCHS else None
        cause = _why_misled(group, inner)
        cause = _why_misread(group) if cause is None and inner in TORCHS else cause
        compiled = made.get(key) if key is not None else None
        if cause is not None:
            compiled, key = Uncompiled(cause), None  # which storages are one is no part of the key
        elif compiled is None:
            late = known is not None and inner != "eager"
            compiled = Uncompiled(LATE) if late else _compile_or_say_why(group, inner)
        if key is not None:
            made[key] = compiled
        if isinstance(compiled, Uncompiled):
            eager[group.index] = compiled
            found.append(group.gm.forward)
        else:
            found.append(compiled)
    return found, eager, made


def _compile_or_say_why(group: Group, inner: str | Callable[..., Any]) -> Callable[..., tuple[Any, ...]] | Uncompiled:
    if inner not in TORCHS:
        return compile_group(group, inner)
    try:
        return compile_group(group, inner)
    except Exception as error:
        if not _is_about_the_piece(error):
            raise
        lines = str(error).strip().splitlines()
        return Uncompiled(f"{type(error).__name__}: {lines[0] if lines else ''}", error)


def _why_misled(group: Group, inner: str | Callable[..., Any]) -> str | None:
    """Why a compiler would take an input for what it is not when the piece runs; or None."""
    if inner == "eager" or not group.reshaped:
        return None
    return f"the shape or the memory of {', '.join(sorted(group.reshaped))} is changed in place by the graph"


def _why_misread(group: Group) -> str | None:
    """Why AOTAutograd, in front of torch's compilers, would take other memory than eager for a value; or None."""
    if not group.overwrites:
        return None
    placed: dict[int | None, dict[int, tuple[str, torch.Tensor]]] = {}
    written = set()
    for node, fake in zip(group.gm.graph.nodes, group.fakes, strict=False):
        for tensor in tensors(fake):
            placed.setdefault(storage_id(tensor), {})[id(tensor)] = node.name, tensor
            if node.name in group.overwrites:
                written.add(storage_id(tensor))
    inputs = {storage: list(named.values()) for storage, named in placed.items() if storage in written - {None}}
    results = {storage_id(t) for n in group.gm.graph.output_node().all_input_nodes for t in tensors(example(n))}
    return _why_writes_misread(group.gm.graph, inputs) or _why_inputs_misread(inputs, results)


Placed = Mapping[int | None, Sequence[tuple[str, torch.Tensor]]]  # inputs that are written: name and fake, by storage


def _why_inputs_misread(inputs: Placed, results: Collection[int | None]) -> str | None:
    """Where inputs overlap and one of them is written, AOTAutograd puts their common base in their place. While it
    compiles that is the tensor that autograd says they are views of; in a recording they are views of nothing, so it is
    their whole storage then, and of another shape. The program would read sizes off it that are none of its inputs'.
    It refuses those that autograd doesn't know for views of one tensor; but where none is known for a view, their whole
    storage is their base, and views of an input that the piece returns are made of that as if it were the input.

    Args:
        inputs: see `Placed`.
        results: the storages of what the piece returns.
    """
    for storage, named in inputs.items():
        bases = {id(tensor if tensor._base is None else tensor._base) for _, tensor in named}
        if (len(bases) == 1 or storage in results) and any(
            not _apart(a, b) for (_, a), (_, b) in itertools.combinations(named, 2)
        ):
            return f"it writes to one of inputs that overlap ({', '.join(name for name, _ in named)})"
    return None


def _why_writes_misread(graph: fx.Graph, inputs: Placed) -> str | None:
    """What a custom op writes of an input is made again: as a slice of it where it looks like one, and counted from the
    storage's begin as if the input began there; otherwise by its offset in the storage, which is another one in a
    recording: an input lies in a buffer there, or, if its address is fixed, alone at that address.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for node in graph.nodes:
        for tensor in _written_by_custom_op(node):
            for name, whole in inputs.get(storage_id(tensor), ()):
                if statically_known_true(whole.storage_offset() == 0):
                    continue
                if not _is_all(tensor, whole):
                    return f"{node.name} writes to a part of {name}, which does not begin where its storage does"
    return None


def _written_by_custom_op(node: fx.Node) -> list[torch.Tensor]:
    target = node.target
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    if not any(op._schema.is_mutable and op.namespace not in ("aten", "prims", "prim") for op in overloads):
        return []
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), example)
    return [t for op in overloads for t in written(op, args, kwargs)]


def _is_all(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two tensors over one storage are the same elements in the same order, whatever their sizes are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    one, other = ((*t.shape, *t.stride(), t.storage_offset()) for t in (tensor, whole))
    return tensor.dim() == whole.dim() and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors over one storage share no byte, whatever their sizes are."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    def ends(t: torch.Tensor, outer: int) -> tuple[Any, Any]:
        """The bytes from the first one to behind the last, of the part of ``t`` inside its outermost dimensions."""
        begin = t.storage_offset() * t.element_size()
        inner = zip(t.shape[outer:], t.stride()[outer:], strict=True)
        return begin, begin + (1 + sum((n - 1) * s for n, s in inner)) * t.element_size()

    for outer in range(min(one.dim(), other.dim()) + 1):
        (begin, end), (other_begin, other_end) = ends(one, outer), ends(other, outer)
        if outer:
            # Columns of one row: in the next row they come again, one step further.
            step, other_step = (t.stride(outer - 1) * t.element_size() for t in (one, other))
            within = (step == other_step, end - other_begin <= step, other_end - begin <= step)
            if not all(map(statically_known_true, within)):
                return False
        if statically_known_true(end <= other_begin) or statically_known_true(other_end <= begin):
            return True
    return False


def _is_about_the_piece(error: Exception) -> bool:
    """Not that a compiler is missing here, nor what Dynamo is to begin anew for."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return not any(
        isinstance(e, (RestartAnalysis, SkipFrame)) or type(e).__name__ in SETUP_ERRORS for e in _behind(error)
    )


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _in_backend_mode(fake: Any) -> Any:
    """A wrapped number's fake in the mode that backends trace in, with the symbol that .item() of it gives.

    Dynamo gives backends a fake mode of their own; compilers move foreign fakes into it and lose that symbol on the
    way, after which .item() looks like a host sync.
    """
    symbol = getattr(fake, "item_memo", None)
    context = torch._guards.TracingContext.try_get()
    if symbol is None or context is None or context.fake_mode is None:
        return fake
    moved = context.fake_mode.from_tensor(fake)
    moved.item_memo = symbol
    return moved


def compile_whole(gm: fx.GraphModule, examples: Sequence[Any], inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """A graph that stays whole, by the inner compiler as torch.compile would call it; gradients included."""
    if inner == "eager":
        return gm.forward
    if callable(inner):
        compiled = inner(gm, list(examples))
        if not callable(compiled):
            raise OptionError(f"inner={inner!r} returned {compiled!r}; expected a callable, as Dynamo backends return")
        return compiled
    from torch._dynamo.backends.registry import (
        lookup_backend,  # torch._dynamo is loaded by now; we are its backend
    )

    return lookup_backend(inner)(gm, list(examples))


def _inductor(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    from torch._inductor import standalone_compile

    return _flat(standalone_compile(gm, list(fakes), dynamic_shapes="from_tracing_context"))


def _flat(fn: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any) -> tuple[Any, ...]:
        out = fn(*args)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    return call
