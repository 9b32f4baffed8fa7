"""When ops that place, make, look up or overwrite elements are prefix-safe."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from .interpret import tensors
from .prefix_call import Call, Layouts, Rule, rules
from .prefix_layouts import ONE, Layout, UnsafeError, shown

# -- placing -----------------------------------------------------------------------------------------------------------


def cat(call: Call) -> Layouts:
    # An empty vector is skipped, whatever the shape of the others.
    given = [layout for layout in map(call.layout, call.args["tensors"]) if layout != ((sympy.Integer(0),),)]
    d = call.dim("dim", given[0])
    for layout in given:
        if (*layout[:d], *layout[d + 1 :]) != (*given[0][:d], *given[0][d + 1 :]):
            raise UnsafeError(f"joins tensors whose rows lie differently: {shown(given[0])} and {shown(layout)}")
    parts = [layout[d] for layout in given if layout[d] != (sympy.Integer(0),)]
    for position, part in enumerate(parts):
        if call.symbolic(part):
            call.prefix((part,), 0, "joins tensors at")
            if position < len(parts) - 1:
                raise UnsafeError(f"puts something behind the rows (dimension {d} of size {part[0]})")
    total = call.padded.sized(sum(sympy.prod(part) for part in parts))
    return [(*given[0][:d], (total,), *given[0][d + 1 :])]


def stack(call: Call) -> Layouts:
    given = [call.layout(t) for t in call.args["tensors"]]
    for layout in given:
        if layout != given[0]:
            raise UnsafeError(f"stacks tensors whose rows lie differently: {shown(given[0])} and {shown(layout)}")
    d = int(call.args["dim"]) % (len(given[0]) + 1)
    return [(*given[0][:d], (sympy.Integer(len(given)),), *given[0][d:])]


def repeat(call: Call) -> Layouts:
    given = call.layout("self")
    times = call.args["repeats"]
    given = (*(ONE,) * (len(times) - len(given)), *given)
    for d, (dim, count) in enumerate(zip(given, times, strict=True)):
        if call.padded.sized(count) != 1 and call.symbolic(dim):
            raise UnsafeError(f"puts something behind the rows (dimension {d} of size {sympy.prod(dim)})")
    plain = call.padded.plain(call.out[0].shape)
    return [tuple(old if call.symbolic(old) else new for old, new in zip(given, plain, strict=True))]


def pad(call: Call) -> Layouts:
    given = call.layout("self")
    amounts = call.args["pad"]
    found = list(given)
    for i, (left, right) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        d = len(given) - 1 - i
        if call.padded.sized(left) == 0 and call.padded.sized(right) == 0:
            continue
        if call.symbolic(left):
            raise UnsafeError(f"puts {left} elements in front, which depends on the number of rows")
        if call.symbolic(given[d]):
            call.prefix(given, d, "pads")
            if call.symbolic(right) or not call.padded.sized(right).is_nonpositive:
                raise UnsafeError(f"puts something behind the rows (dimension {d} of size {given[d][0]})")
        found[d] = (call.padded.sized(call.out[0].shape[d]),)
    return [tuple(found)]


def make(call: Call) -> Layouts:
    return None


def make_like(call: Call) -> Layouts:
    call.wild = False
    return [call.layout("self")]


def arange(call: Call) -> Layouts:
    call.wild = True  # it goes on counting
    return None


# -- looking up --------------------------------------------------------------------------------------------------------


def embedding(call: Call) -> Layouts:
    weight, indices = call.layout("weight"), call.layout("indices")
    call.prefix(weight, 0, "looks up rows of")
    call.index(call.args["indices"])
    return [(*indices, weight[1])]


def index_select(call: Call) -> Layouts:
    given, index = call.layout("self"), call.layout("index")
    call.index(call.args["index"])
    if not given:
        return [given]
    d = call.dim("dim", given)
    call.prefix(given, d, "looks up rows of")
    return [(*given[:d], *(index or (ONE,)), *given[d + 1 :])]


def gather(call: Call) -> Layouts:
    given, index = call.layout("self"), call.layout("index")
    call.index(call.args["index"])
    if given and index:
        d = call.dim("dim", given)
        call.prefix(given, d, "looks up rows of")
        _row_by_row(call, index, given, d, "reads")
    return [index]


def _row_by_row(call: Call, small: Layout, large: Layout, but: int, does: str) -> None:
    """Raises UnsafeError unless each element of the one is at the same place in the other, but for one dimension."""
    for d, (a, b) in enumerate(zip(small, large, strict=True)):
        if d != but and a != b and len(a) + len(b) > 2:
            raise UnsafeError(f"{does} rows of {shown(large)} by indices of {shown(small)}")


def take(call: Call) -> Layouts:
    given = call.layout("self")
    call.static(given, range(len(given)), "counts the elements of")
    call.index(call.args["index"])
    return [call.layout("index")]


def indexed(call: Call) -> Layout:
    """The layout of ``self[indices]``, or UnsafeError."""
    given = call.layout("self")
    indices = [*call.args["indices"], *(None,) * (len(given) - len(call.args["indices"]))]
    chosen = [d for d, index in enumerate(indices) if index is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors(indices)):
        raise UnsafeError("selects by a mask, so that sizes depend on data")
    # An index may be negative and so count from the end.
    call.static(given, chosen, "may count from the end of")
    for index in tensors(indices):
        call.index(index)
    inner = call.broadcast(map(call.layout, tensors(indices)))
    adjacent = bool(chosen) and chosen == list(range(chosen[0], chosen[-1] + 1))
    front = chosen[0] if adjacent else 0
    rest = [dim for d, dim in enumerate(given) if indices[d] is None]
    return (*rest[:front], *inner, *rest[front:])


def index(call: Call) -> Layouts:
    return [indexed(call)]


# -- writing -----------------------------------------------------------------------------------------------------------


def _no_rows(call: Call, tree: Any, what: str) -> None:
    """Writes at places that rows name: those of garbage rows would be written as well."""
    for t in tensors(tree):
        if call.symbolic(t):
            raise UnsafeError(f"{what} that its indices of {shown(call.layout(t))} name, also those beyond the rows")


def index_put(call: Call) -> Layouts:
    given = call.layout("self")
    _no_rows(call, call.args["indices"], "writes to places")
    place = indexed(call)
    call.broadcast((place, call.layout("values")))
    return [given]


def index_add(call: Call) -> Layouts:
    given = call.layout("self")
    _no_rows(call, call.args["index"], "writes to places")
    d = call.dim("dim", given)
    call.prefix(given, d, "writes to rows of")
    if call.args.get("source") is not None:
        source = call.layout("source")
        if (*source[:d], *source[d + 1 :]) != (*given[:d], *given[d + 1 :]):
            raise UnsafeError(f"writes values of {shown(source)} to rows of {shown(given)}")
    return [given]


def scatter(call: Call) -> Layouts:
    given, index = call.layout("self"), call.layout("index")
    if not given or not index:
        return [given]
    d = call.dim("dim", given)
    call.index(call.args["index"])
    call.prefix(given, d, "writes to rows of")
    if call.symbolic(index[d]):
        raise UnsafeError(f"writes to places that its indices of {shown(index)} name, also those beyond the rows")
    for at, (a, b) in enumerate(zip(index, given, strict=True)):
        if at != d and a != b and (call.symbolic(a) or len(b) > 1):
            raise UnsafeError(f"writes to rows of {shown(given)} by indices of {shown(index)}")
    source = call.args.get("src")
    if source is not None:
        _row_by_row(call, index, call.layout("src"), -1, "reads")
    return [given]


def select_scatter(call: Call) -> Layouts:
    given, source = call.layout("self"), call.layout("src")
    d = call.dim("dim", given)
    if call.symbolic(given[d]):
        call.prefix(given, d, "writes to")
        call.from_front("index", given, d)
    if source != (*given[:d], *given[d + 1 :]):
        raise UnsafeError(f"writes values of {shown(source)} to rows of {shown(given)}")
    return [given]


PLACES: dict[str, Rule] = {
    **rules(cat, "cat"),
    **rules(stack, "stack"),
    **rules(repeat, "repeat", ["repeats"]),
    **rules(pad, "constant_pad_nd", ["pad"]),
    **rules(
        make,
        "zeros ones empty full new_zeros new_ones new_empty new_full empty_strided new_empty_strided empty_permuted "
        "eye",
        ["size", "stride", "n", "m"],
    ),
    **rules(make_like, "zeros_like ones_like empty_like full_like"),
    **rules(arange, "arange", ["end"]),
    **rules(embedding, "embedding"),
    **rules(index_select, "index_select"),
    **rules(gather, "gather"),
    **rules(take, "take"),
    **rules(index, "index _unsafe_index"),
    **rules(index_put, "index_put _index_put_impl _unsafe_index_put"),
    **rules(index_add, "index_add index_copy index_fill"),
    **rules(scatter, "scatter scatter_add scatter_reduce"),
    **rules(select_scatter, "select_scatter"),
}
