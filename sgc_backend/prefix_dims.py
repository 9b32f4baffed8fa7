"""When ops that go along dimensions are prefix-safe: reductions, scans, norms, and what reads around in space."""

from __future__ import annotations

from collections.abc import Callable

from .interpret import tensors
from .prefix_call import Call, Layouts, Rule, rules
from .prefix_layouts import ONE, Layout, UnsafeError

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
    # Rows among the normalised dimensions would be sizes in normalized_shape, which are values to this rule.
    statistics = (*given[: len(given) - k], *(ONE,) * k)
    return [given, *[statistics] * (len(call.out) - 1)]


def batch_norm(call: Call) -> Layouts:
    given = call.layout("input")
    call.static(given, (1,), "takes weights for")
    return [given, *[call.padded.plain(t.shape) for t in call.out[1:]]]


def group_norm(call: Call) -> Layouts:
    given = call.layout("input")
    # Rows anywhere but in the first dimension would be in C or HxW, which are values to this rule.
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


ALONG: dict[str, Rule] = {
    **rules(
        reduction,
        "sum nansum mean amax amin aminmax var var_mean std std_mean prod any all argmax argmin norm "
        "linalg_vector_norm logsumexp max min median nanmedian mode kthvalue count_nonzero",
    ),
    **rules(within("normalises over"), "_softmax _log_softmax _safe_softmax"),
    **rules(within("sorts"), "sort"),
    **rules(topk, "topk"),
    **rules(scan, "cumsum cumprod cummax cummin logcumsumexp"),
    **rules(roll, "flip roll"),
    **rules(layer_norm, "native_layer_norm _fused_rms_norm"),
    **rules(batch_norm, "_native_batch_norm_legit_no_training"),
    **rules(group_norm, "native_group_norm", ["N"]),
    **rules(spatial(1), "reflection_pad1d replication_pad1d upsample_linear1d"),
    **rules(
        spatial(2),
        "avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices reflection_pad2d "
        "replication_pad2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    **rules(
        spatial(3),
        "avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices reflection_pad3d "
        "replication_pad3d upsample_trilinear3d",
    ),
    **rules(convolution, "convolution"),
    **rules(glu, "glu"),
    **rules(lower_or_upper, "tril triu"),
    **rules(bucketize, "bucketize"),
}
