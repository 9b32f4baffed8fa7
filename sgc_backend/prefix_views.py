"""When ops that view, place, look up, make or overwrite elements are prefix-safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from .interpret import tensors
from .prefix_values import ONE, Call, Dim, Layout, Layouts, Rule, UnsafeError, shown

# -- views -------------------------------------------------------------------------------------------------------------


def same(call: Call) -> Layouts:
    return [call.layout(call.operands()[0])] * len(call.out)


def view(call: Call) -> Layouts:
    given = call.layout("self")
    if "dtype" in call.args:
        old, new = call.args["self"].dtype.itemsize, call.out[0].dtype.itemsize
        if old != new:
            call.static(given[-1:], (0,), "takes bytes together or apart in")
        call.wild = True
        return [(*given[:-1], *call.padded.plain(call.out[0].shape)[-1:])]
    return [call.padded.regroup(given, call.out[0].shape)]


def permute(call: Call) -> Layouts:
    given = call.layout("self")
    if "dims" in call.args:
        order = [d % len(given) for d in call.args["dims"]]
    else:
        order = list(range(len(given)))
        a, b = (call.dim("dim0", given), call.dim("dim1", given)) if "dim0" in call.args else (0, -1)
        if given:
            order[a], order[b] = order[b], order[a]
    return [tuple(given[d] for d in order)]


def squeeze(call: Call) -> Layouts:
    given = call.layout("self")
    dims = call.args.get("dim", range(len(given)))
    chosen = {d % max(len(given), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    return [tuple(dim for d, dim in enumerate(given) if d not in chosen or dim != ONE)]


def unsqueeze(call: Call) -> Layouts:
    given = call.layout("self")
    d = int(call.args["dim"]) % (len(given) + 1)
    return [(*given[:d], ONE, *given[d:])]


def expand(call: Call) -> Layouts:
    given = call.layout("self")
    plain = call.padded.plain(call.out[0].shape)
    given = (*(ONE,) * (len(plain) - len(given)), *given)
    # Every element of an expanded dimension is the one element of its source.
    call.window = any(old == ONE and call.symbolic(new) for old, new in zip(given, plain, strict=True))
    return [tuple(new if old == ONE else old for old, new in zip(given, plain, strict=True))]


def select(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    if call.symbolic(given[d]):
        call.prefix(given, d, "picks from")
        _from_front(call, "index", given[d])
    return [(*given[:d], *given[d + 1 :])]


def _from_front(call: Call, name: str, dim: Dim) -> None:
    index = call.args[name]
    if call.symbolic(index) or not (index is None or call.padded.sized(index).is_nonnegative):
        raise UnsafeError(f"counts from the end of the rows ({name} {index} in a dimension of size {dim[0]})")


def slices(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    start, step = call.args["start"], call.padded.sized(call.args["step"])
    found = call.padded.sized(call.out[0].shape[d])
    if (start is None or start == 0) and step == 1 and found == call.padded.product(given[d]):
        return [given]
    if call.symbolic(given[d]):
        call.prefix(given, d, "takes a part of")
        _from_front(call, "start", given[d])
        whole = FloorDiv(given[d][0] - call.padded.sized(start or 0) + step - 1, step)
    elif call.symbolic(start):
        raise UnsafeError(f"begins at {start}, which depends on the number of rows")
    else:
        whole = None
    call.window = call.symbolic(found) and found != (whole if whole is None else call.padded.sized(whole))
    return [(*given[:d], (found,), *given[d + 1 :])]


def split(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    sizes = [call.padded.sized(t.shape[d]) for t in call.out]
    if call.symbolic(given[d]) or call.symbolic(tuple(sizes)):
        call.prefix(given, d, "splits")
        begin = sympy.Integer(0)
        for size in sizes:
            if call.symbolic(begin):
                raise UnsafeError(f"splits the rows (dimension {d} of size {given[d][0]}) at {begin}")
            begin = call.padded.sized(begin + size)
        call.window = call.symbolic(sizes[-1]) and not call.symbolic(given[d])
    return [(*given[:d], (size,), *given[d + 1 :]) for size in sizes]


def unbind(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    call.static(given, (d,), "takes apart")
    return [(*given[:d], *given[d + 1 :])] * len(call.out)


def diagonal(call: Call) -> Layouts:
    given = call.layout("self")
    dims = {call.dim("dim1", given), call.dim("dim2", given)}
    call.static(given, dims, "takes the diagonal of")
    return [(*(dim for d, dim in enumerate(given) if d not in dims), *call.padded.plain(call.out[0].shape)[-1:])]


def unfold(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dimension", given)
    call.static(given, (d,), "takes windows of")
    plain = call.padded.plain(call.out[0].shape)
    return [(*given[:d], plain[d], *given[d + 1 :], plain[-1])]


def as_real(call: Call) -> Layouts:
    return [(*call.layout("self"), (sympy.Integer(2),))]


def as_complex(call: Call) -> Layouts:
    return [call.layout("self")[:-1]]


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
    # Nothing was written to it yet.
    call.wild = "empty" in call.name
    return None


def make_like(call: Call) -> Layouts:
    call.wild = "empty" in call.name
    return same(call)


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
    if call.broadcast((place, call.layout("values"))) != place:
        raise UnsafeError(f"writes values of {shown(call.layout('values'))} to places of {shown(place)}")
    return [given]


def index_add(call: Call) -> Layouts:
    given = call.layout("self")
    _no_rows(call, call.args["index"], "writes to places")
    if not given:
        return [given]
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
        _from_front(call, "index", given[d])
    if source != (*given[:d], *given[d + 1 :]):
        raise UnsafeError(f"writes values of {shown(source)} to rows of {shown(given)}")
    return [given]


# -- the table ---------------------------------------------------------------------------------------------------------


def _rules(judge: Callable[[Call], Layouts], names: str, shapes: Iterable[str] = ()) -> dict[str, Rule]:
    rule = Rule(judge, frozenset(shapes))
    return {f"aten::{name}": rule for name in names.split()}


MOVES: dict[str, Rule] = {
    **_rules(same, "alias detach lift_fresh lift_fresh_copy lift _conj _neg_view resolve_conj resolve_neg"),
    **_rules(view, "view _unsafe_view reshape _reshape_alias", ["size", "stride"]),
    **_rules(permute, "permute transpose t"),
    **_rules(squeeze, "squeeze"),
    **_rules(unsqueeze, "unsqueeze"),
    **_rules(expand, "expand", ["size"]),
    **_rules(select, "select"),
    **_rules(slices, "slice", ["start", "end"]),
    **_rules(split, "split split_with_sizes unsafe_split unsafe_split_with_sizes", ["split_size", "split_sizes"]),
    **_rules(unbind, "unbind"),
    **_rules(diagonal, "diagonal"),
    **_rules(unfold, "unfold"),
    **_rules(as_real, "view_as_real"),
    **_rules(as_complex, "view_as_complex"),
    **_rules(cat, "cat"),
    **_rules(stack, "stack"),
    **_rules(repeat, "repeat", ["repeats"]),
    **_rules(pad, "constant_pad_nd", ["pad"]),
    **_rules(
        make,
        "zeros ones empty full new_zeros new_ones new_empty new_full empty_strided new_empty_strided empty_permuted "
        "eye",
        ["size", "stride", "n", "m"],
    ),
    **_rules(make_like, "zeros_like ones_like empty_like full_like"),
    **_rules(arange, "arange", ["end"]),
    **_rules(embedding, "embedding"),
    **_rules(index_select, "index_select"),
    **_rules(gather, "gather"),
    **_rules(take, "take"),
    **_rules(index, "index _unsafe_index"),
    **_rules(index_put, "index_put _index_put_impl _unsafe_index_put"),
    **_rules(index_add, "index_add index_copy index_fill index_reduce"),
    **_rules(scatter, "scatter scatter_add scatter_reduce"),
    **_rules(select_scatter, "select_scatter"),
}
