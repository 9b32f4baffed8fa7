"""When ops that compute are prefix-safe: pointwise, contractions, reductions, scans, norms, lookups.

Rules for views, writes and what only moves or makes elements are in prefix_views.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .interpret import tensors
from .prefix_values import ONE, Call, Layout, Layouts, Rule, UnsafeError, shown

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
    if call.name.endswith("_"):
        for own, layout in zip(lists[0], layouts, strict=True):
            if call.layout(own) != layout:
                raise UnsafeError(f"writes rows of {shown(layout)} into a tensor of {shown(call.layout(own))}")
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
    if add and call.broadcast((call.layout(names[0]), product)) != product:
        raise UnsafeError(f"adds a product of {shown(product)} to a tensor of {shown(call.layout(names[0]))}")
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


def linear(call: Call) -> Layouts:
    given, weight = call.layout("input"), call.layout("weight")
    _contract(call, given, weight, len(given) - 1, len(weight) - 1)
    product = (*given[:-1], *weight[:-1])
    if call.args["bias"] is not None:
        call.broadcast((product, call.layout("bias")))
    return [product]


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
    if call.args.get("dropout_p"):
        raise UnsafeError("draws random numbers for the rows")
    if not query[:-2] == key[:-2] == value[:-2]:
        call.static(query, range(1, len(query) - 2), "shares heads over")
        call.static(key, range(1, len(key) - 2), "shares heads over")
        if not query[:1] == key[:1] == value[:1]:
            raise UnsafeError(f"attends from {shown(query)} to {shown(key)}, whose rows lie differently")
    if call.args.get("is_causal") and call.symbolic(query[-2]):
        raise UnsafeError("counts the rows from one end of the keys or the other")
    for name in ("attn_mask", "attn_bias"):
        if call.args.get(name) is not None:
            scores = (*query[:-1], key[-2])
            if call.broadcast((scores, call.layout(name))) != scores:
                raise UnsafeError(f"masks scores of {shown(scores)} with {shown(call.layout(name))}")
    rest = [call.padded.plain(t.shape) for t in call.out[1:]]
    return [(*query[:-1], value[-1]), *rest]


# -- along dimensions --------------------------------------------------------------------------------------------------


def _dims(call: Call, layout: Layout) -> list[int]:
    dims = call.args.get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(len(layout)))
    return [int(d) % max(len(layout), 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def reduction(call: Call) -> Layouts:
    given = call.layout(call.operands()[0])
    dims = _dims(call, given) if given else []
    call.static(given, dims, "reduces")
    keep = call.args.get("keepdim", False)
    layout = tuple(ONE if d in dims else dim for d, dim in enumerate(given) if keep or d not in dims)
    return [layout] * len(call.out)


def within(what: str) -> Callable[[Call], Layouts]:
    """Ops that mix the elements of one or some dimensions and keep the shape."""

    def judge(call: Call) -> Layouts:
        given = call.layout(call.operands()[0])
        call.static(given, _dims(call, given) if given else [], what)
        return [given] * len(call.out)

    return judge


def topk(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    if given:
        call.static(given, (d,), "chooses among")
    return [(*given[:d], *call.padded.plain(t.shape)[d : d + 1], *given[d + 1 :]) for t in call.out]


def scan(call: Call) -> Layouts:
    given = call.layout("self")
    if given:
        d = call.dim("dim", given)
        call.prefix(given, d, "scans")
        call.wild |= call.symbolic(given[d])  # sums go on growing
    return [given] * len(call.out)


def roll(call: Call) -> Layouts:
    given = call.layout("self")
    call.static(given, [d % len(given) for d in call.args["dims"]] or range(len(given)), "moves")
    return [given]


# -- norms, windows in space -------------------------------------------------------------------------------------------


def layer_norm(call: Call) -> Layouts:
    given = call.layout("input")
    k = len(call.args["normalized_shape"])
    call.static(given, range(len(given) - k, len(given)), "normalises over")
    statistics = (*given[: len(given) - k], *(ONE,) * k)
    return [given, *[statistics] * (len(call.out) - 1)]


def batch_norm(call: Call) -> Layouts:
    given = call.layout("input")
    if call.args.get("training"):
        raise UnsafeError("normalises over the rows, as in training")
    call.static(given, (1,), "takes weights for")
    return [given, *[call.padded.plain(t.shape) for t in call.out[1:]]]


def group_norm(call: Call) -> Layouts:
    given = call.layout("input")
    call.static(given, range(1, len(given)), "normalises over")
    return [given, *[(given[0], *call.padded.plain(t.shape)[1:]) for t in call.out[1:]]]


def spatial(k: int) -> Callable[[Call], Layouts]:
    """Ops whose results read around in the last ``k`` dimensions."""

    def judge(call: Call) -> Layouts:
        given = call.layout(call.operands()[0])
        lead = len(given) - k
        call.static(given, range(lead, len(given)), "reads around in")
        return [(*given[:lead], *call.padded.plain(t.shape)[lead:]) for t in call.out]

    return judge


def convolution(call: Call) -> Layouts:
    given, weight = call.layout("input"), call.layout("weight")
    if len(given) != len(weight):
        raise UnsafeError("convolves a tensor that isn't batched")
    call.static(weight, range(len(weight)), "takes weights for")
    call.static(given, (1,), "sums over")
    # By what they read, outputs of an unpadded convolution are a prefix. But Winograd's and Fourier's algorithms let
    # neighbours cancel out, which NaN doesn't.
    call.static(given, range(2, len(given)), "reads around in")
    return [(given[0], *call.padded.plain(call.out[0].shape)[1:])]


def glu(call: Call) -> Layouts:
    given = call.layout("self")
    d = call.dim("dim", given)
    call.static(given, (d,), "halves")
    return [(*given[:d], *call.padded.plain(call.out[0].shape)[d : d + 1], *given[d + 1 :])]


def lower_or_upper(call: Call) -> Layouts:
    given = call.layout("self")
    for d in (len(given) - 2, len(given) - 1):
        call.prefix(given, d, "counts the elements of")
    return [given]


def bucketize(call: Call) -> Layouts:
    call.static(call.layout("boundaries"), (0,), "searches among")
    return [call.layout(t) for t in tensors(call.args["self"])] or None


# -- the table ---------------------------------------------------------------------------------------------------------


def _rules(judge: Callable[[Call], Layouts], names: str, shapes: Iterable[str] = ()) -> dict[str, Rule]:
    rule = Rule(judge, frozenset(shapes))
    return {f"aten::{name}": rule for name in names.split()}


POINTWISE = Rule(pointwise)
FOREACH = Rule(foreach)

COMPUTES: dict[str, Rule] = {
    # Beside what is tagged as pointwise: ops and overloads that bear no tag.
    **_rules(
        pointwise,
        "where copy_ copy fill_ fill zero_ zero _to_copy clone masked_fill _prelu_kernel complex polar rsub "
        "floor_divide hardtanh hardswish threshold log_sigmoid_forward _conj_physical",
    ),
    **_rules(mm, "mm bmm addmm baddbmm mv addmv dot vdot _int_mm _scaled_mm"),
    **_rules(linear, "linear"),
    **_rules(packed_mm, "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu"),
    **_rules(
        attention,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    **_rules(
        reduction,
        "sum nansum mean amax amin aminmax var var_mean std std_mean prod any all argmax argmin norm "
        "linalg_vector_norm logsumexp max min median nanmedian mode kthvalue count_nonzero",
    ),
    **_rules(within("normalises over"), "_softmax _log_softmax _safe_softmax softmax log_softmax"),
    **_rules(within("sorts"), "sort argsort"),
    **_rules(topk, "topk"),
    **_rules(scan, "cumsum cumprod cummax cummin logcumsumexp"),
    **_rules(roll, "flip roll"),
    **_rules(layer_norm, "native_layer_norm _fused_rms_norm"),
    **_rules(
        batch_norm,
        "_native_batch_norm_legit_no_training native_batch_norm cudnn_batch_norm miopen_batch_norm "
        "_batch_norm_no_update",
    ),
    **_rules(group_norm, "native_group_norm", ["N"]),
    **_rules(
        spatial(1),
        "avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d reflection_pad1d replication_pad1d "
        "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    ),
    **_rules(
        spatial(2),
        "avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices reflection_pad2d "
        "replication_pad2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    **_rules(
        spatial(3),
        "avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices reflection_pad3d "
        "replication_pad3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
    ),
    **_rules(convolution, "convolution _convolution"),
    **_rules(glu, "glu"),
    **_rules(lower_or_upper, "tril triu"),
    **_rules(bucketize, "bucketize"),
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
