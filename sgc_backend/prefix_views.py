"""When views are prefix-safe, and which of them are windows."""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv

from .prefix_call import Call, Layouts, Rule, rules
from .prefix_layouts import ONE, UnsafeError


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
        call.from_front("index", given, d)
    return [(*given[:d], *given[d + 1 :])]


def slices(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    start, step = call.args["start"], call.padded.sized(call.args["step"])
    found = call.padded.sized(call.out[0].shape[d])
    if (start is None or start == 0) and step == 1 and found == call.padded.product(given[d]):
        return [given]
    if call.symbolic(given[d]):
        call.prefix(given, d, "takes a part of")
        call.from_front("start", given, d)
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
        # No windows: the parts share out all rows, and parts of what has none would have to shrink.
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


VIEWS: dict[str, Rule] = {
    **rules(same, "alias detach _conj _neg_view"),
    **rules(view, "view _unsafe_view _reshape_alias", ["size", "stride"]),
    **rules(permute, "permute transpose t"),
    **rules(squeeze, "squeeze"),
    **rules(unsqueeze, "unsqueeze"),
    **rules(expand, "expand", ["size"]),
    **rules(select, "select"),
    **rules(slices, "slice", ["start", "end"]),
    **rules(split, "split split_with_sizes unsafe_split unsafe_split_with_sizes", ["split_size", "split_sizes"]),
    **rules(unbind, "unbind"),
    **rules(diagonal, "diagonal"),
    **rules(unfold, "unfold"),
    **rules(as_real, "view_as_real"),
    **rules(as_complex, "view_as_complex"),
}
