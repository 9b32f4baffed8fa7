"""When pointwise ops, products of matrices and attention are prefix-safe."""

from __future__ import annotations

from typing import Any

import torch

from .interpret import tensors
from .prefix_call import Call, Layouts, Rule, rules
from .prefix_layouts import Layout, UnsafeError, shown

# -- pointwise ---------------------------------------------------------------------------------------------------------


def pointwise(call: Call) -> Layouts:
    operands = call.operands()
    layout = call.broadcast(map(call.layout, operands))
    if call.name.rstrip("_") in DIVIDE and any(call.value(t).wild for t in tensors(call.args["other"])):
        raise UnsafeError("divides by computed integers, which may be 0 beyond the rows of a call")
    call.wild = _wild(call, operands)
    return [layout] * len(call.out)


def _wild(call: Call, operands: list[torch.Tensor]) -> bool:
    """Whether integers that a pointwise op makes of garbage may be other than a real row's would be."""
    if call.name.rstrip("_") in ("clamp", "clip") and None not in (call.args["min"], call.args["max"]):
        return any(isinstance(call.args[bound], torch.Tensor) for bound in ("min", "max"))
    if call.name.rstrip("_") == "remainder" and isinstance(call.args["other"], int):
        return False
    given = [t for t in operands if call.symbolic(t) and t.dtype is not torch.bool]
    if any(t.dtype.is_floating_point or call.value(t).wild for t in given):
        return True
    # Integers of two tensors are rows of different calls there; a choice between them is one of them.
    return call.name not in CHOOSE and len([t for t in operands if t.dtype is not torch.bool]) > 1


DIVIDE = ("div", "floor_divide", "remainder", "fmod")
CHOOSE = ("where", "masked_fill", "masked_fill_", "copy_", "fill_", "fill")


def foreach(call: Call) -> Layouts:
    lists = [v for v in call.args.values() if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)]
    common = [v for v in call.args.values() if isinstance(v, torch.Tensor)]
    layouts = [call.broadcast(map(call.layout, (*group, *common))) for group in zip(*lists, strict=True)]
    call.wild = True
    return layouts if call.out else []


# -- contractions ------------------------------------------------------------------------------------------------------


def _contract(call: Call, left: Layout, right: Layout, over: int, behind: int) -> None:
    call.static(left, (over,), "sums over")
    call.static(right, (behind,), "sums over")


def mm(call: Call) -> Layouts:
    names = list(call.args)
    add = names[1] in ("mat1", "batch1", "mat")  # addmm, baddbmm, addmv: a first argument that is added
    left, right = call.layout(names[add]), call.layout(names[add + 1])
    _contract(call, left, right, len(left) - 1, 0 if len(right) == 1 else len(right) - 2)
    batch = left[:-2]
    if len(right) == 3 and batch != right[:1]:
        raise UnsafeError(f"multiplies batches that lie differently: {shown(batch)} and {shown(right[:1])}")
    product = (*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))
    if add:
        call.broadcast((call.layout(names[0]), product))
    if call.name == "_scaled_mm":
        _scales(call, product)
    call.wild = True
    return [product]


def _scales(call: Call, product: Layout) -> None:
    for name, d in (("scale_a", 0), ("scale_b", 1)):
        layout = call.layout(name)
        if any(
            call.symbolic(dim) and not (len(layout) == 2 and at == d and dim == product[d])
            for at, dim in enumerate(layout)
        ):
            raise UnsafeError(f"scales rows by {name} of {shown(layout)}, which has no row for each of them")
    others = (call.args.get("bias"), call.args.get("scale_result"))
    for extra in tensors(others):
        call.broadcast((product, call.layout(extra)))


def packed_mm(call: Call) -> Layouts:
    """A product with weights packed in a layout of their own."""
    given = call.layout("self")
    call.static(given, range(1, len(given)), "sums over")
    for weight in call.operands()[1:]:
        call.static(call.layout(weight), range(weight.dim()), "multiplies with weights over")
    return [(*given[:1], *call.padded.plain(call.out[0].shape)[1:])]


def attention(call: Call) -> Layouts:
    query, key, value = map(call.layout, ("query", "key", "value"))
    # Where a mask weighs a key with 0, 0 times NaN is still NaN: also a causal mask doesn't keep garbage out.
    call.static(key, (len(key) - 2,), "attends over")
    call.static(value, (len(value) - 2,), "attends over")
    call.static(query, (len(query) - 1,), "sums over")
    call.static(value, (len(value) - 1,), "mixes")
    if call.op._overloadname != "default":
        raise UnsafeError("scales what it attends to")
    if call.args.get("dropout_p"):
        raise UnsafeError("draws random numbers for the rows")
    for d, (q, k, v) in enumerate(zip(query[:-2], key[:-2], value[:-2], strict=True)):
        if not q == k == v and call.symbolic((q, k, v)):
            raise UnsafeError(f"attends from {shown(query)} to {shown(key)}, which differ in dimension {d}")
    if call.args.get("is_causal") and call.symbolic(query[-2]):
        raise UnsafeError("counts the rows from one end of the keys or the other")
    for name in ("attn_mask", "attn_bias"):
        if call.args.get(name) is not None:
            call.broadcast(((*query[:-1], key[-2]), call.layout(name)))
    rest = [call.padded.plain(t.shape) for t in call.out[1:]]
    return [(*query[:-1], value[-1]), *rest]


# -- the table ---------------------------------------------------------------------------------------------------------


POINTWISE = Rule(pointwise)
FOREACH = Rule(foreach)

PRODUCTS: dict[str, Rule] = {
    # Beside what is tagged as pointwise: ops and overloads that bear no tag.
    **rules(
        pointwise,
        "where copy_ copy fill_ fill zero_ zero _to_copy clone masked_fill _prelu_kernel complex polar rsub "
        "floor_divide hardtanh hardswish threshold log_sigmoid_forward",
    ),
    **rules(mm, "mm bmm addmm baddbmm mv addmv dot vdot _int_mm _scaled_mm"),
    **rules(packed_mm, "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu"),
    **rules(
        attention,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}


def of_pointwise_kind(op: Any) -> Rule | None:
    """The rule of an op that torch tags as pointwise, or of a foreach op over such."""
    if torch.Tag.pointwise in op.tags:
        return POINTWISE
    name = op._schema.name
    if name.startswith("aten::_foreach_"):
        base = name.removeprefix("aten::_foreach_").rstrip("_")
        packet = getattr(torch.ops.aten, base, None)
        if base in ("copy", "zero") or (packet is not None and base not in ("max", "min") and _tagged(packet)):
            return FOREACH
    return None


def _tagged(packet: Any) -> bool:
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
