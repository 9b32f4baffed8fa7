"""What a runner is made of: its ladder of buckets, its variants, its wrapper."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .breakable import BreakableCudaGraphBackend
from .config import check_bool, check_one_of, checked_sizes
from .errors import OptionError
from .full import FullCudaGraphBackend
from .input_spec import InputSpec
from .shape_key import ShapeKey
from .tc_piecewise import TcPiecewiseCudaGraphBackend
from .wrapper import CudaGraphBackend

BACKENDS = ("full", "piecewise", "breakable")


def check_settings(name: str, fn: Any, outputs: Any, options: Any, strict: Any, max_padding_ratio: Any) -> None:
    """Refuse settings of a runner that are none. Raises: see `Runner`."""
    if not callable(fn):
        raise OptionError(f"{name}: fn must be a module or function, got {type(fn).__name__}")
    check_one_of(f"{name}: outputs", outputs, ("clone", "static"))
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"{name}: options must be None or a dict, got {options!r}")
    check_bool(f"{name}: strict", strict)
    number = isinstance(max_padding_ratio, (int, float)) and not isinstance(max_padding_ratio, bool)
    if max_padding_ratio is not None and not (number and max_padding_ratio >= 1):
        raise OptionError(f"{name}: max_padding_ratio must be None or a number >= 1, got {max_padding_ratio!r}")


def ladder_of(
    name: str,
    sizes: Sequence[int] | str,
    max_size: int | None,
    kind: str,
    auto: Callable[[int], Sequence[int]],
) -> tuple[int, ...]:
    """The buckets, ascending; ``auto(max_size)`` are those that "auto" stands for. Raises: see `Runner`."""
    if max_size is not None and (isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1):
        raise OptionError(f"{name}: max_size must be None or an int >= 1, got {max_size!r}")
    if isinstance(sizes, str):
        if sizes != "auto":
            raise OptionError(f'{name}: sizes must be a list of ints, or "auto" with max_size, got {sizes!r}')
        if max_size is None:
            raise OptionError(f"{name}: give max_size, the most rows that a call has, or sizes, a list of buckets")
        ladder = tuple(auto(max_size))
        # Dynamo makes a length of 1 a constant: another compilation, in which attention has no dynamic length and
        # is recorded instead of cut.
        return ladder[1:] if kind == "piecewise" and len(ladder) > 1 else ladder
    ladder = checked_sizes("sizes", sizes)
    if max_size is not None and ladder[-1] < max_size:
        raise OptionError(
            f"{name}: the largest bucket is {ladder[-1]} and does not cover max_size {max_size}; add a bucket, or "
            f"leave max_size out to run larger calls eagerly"
        )
    return ladder


def wrapper_of(
    kind: str,
    fn: Callable[..., Any],
    sizes: Sequence[int],
    options: Mapping[str, Any] | None,
    common: dict[str, Any],
) -> CudaGraphBackend:
    """The wrapper that records ``fn``; ``common``: what each takes. Raises: see `Runner`."""
    name = common["name"]
    check_one_of(f"{name}: backend", kind, BACKENDS)
    if kind == "piecewise":
        return TcPiecewiseCudaGraphBackend(fn, capture_sizes=sizes, options=options, **common)
    wrapper = FullCudaGraphBackend if kind == "full" else BreakableCudaGraphBackend
    try:
        return wrapper(**common, **(options or {}))
    except TypeError as error:
        names = sorted(map(str, options or {}))
        raise OptionError(f"{name}: options {names} do not suit backend {kind!r}: {error}") from None


def checked_variants(name: str, variants: Sequence[Hashable] | None) -> tuple[Hashable, ...]:
    """The variants, (None,) where there are none. Raises: see `Runner`."""
    if variants is None:
        return (None,)
    if isinstance(variants, (str, bytes, torch.Tensor)) or not isinstance(variants, Iterable):
        raise OptionError(f"{name}: variants must be a list, got {variants!r}; one variant is [{variants!r}]")
    found = tuple(variants)
    if not found:
        raise OptionError(f"{name}: variants is empty; leave it out, or give at least one")
    for variant in found:
        ShapeKey(0, variant)  # says what is not hashable
    if len(set(found)) != len(found):
        raise OptionError(f"{name}: variants holds the same value twice: {found!r}")
    return found


def mark_buffer(view: torch.Tensor, spec: InputSpec) -> None:
    """Tell Dynamo that the buffer stays where it is, and that only the rows change."""
    torch._dynamo.mark_static_address(view, guard=False)
    for dim, length in enumerate(spec.shape):
        if isinstance(length, int):
            torch._dynamo.mark_static(view, dim)
