"""The first thing that a caller of the compiled program can see and that is not as in eager."""

from __future__ import annotations

from typing import Any

import torch
from program_world import World


class Difference(AssertionError):
    """What eager does and what the compiled program does are not the same.

    Attributes:
        call: in which call they differ.
    """

    call = 0


def compare_roots(eager: World, ours: World, what: str, tolerance: float) -> None:
    wanted, got = eager.roots(), ours.roots()
    for name, value in wanted.items():
        compare_tensor(value, got[name], f"{what}: the caller's {name}", tolerance)


def compare_outputs(
    eager: World,
    ours: World,
    wanted: list[Any],
    got: list[Any],
    borrowed: list[tuple[int, int]],
    what: str,
    tolerance: float,
) -> set[int]:
    """Compare what a call returned; returns which outputs were left out, because they lie in ``borrowed`` memory."""
    if len(wanted) != len(got):
        raise Difference(f"{what}: {len(wanted)} outputs expected, {len(got)} came")
    skipped = {
        i
        for i, w in enumerate(wanted)
        if isinstance(w, torch.Tensor) and any(a <= w.data_ptr() < b for a, b in borrowed)
    }
    for i, (w, g) in enumerate(zip(wanted, got, strict=True)):
        if i not in skipped:
            if isinstance(w, torch.Tensor) and isinstance(g, torch.Tensor):
                compare_tensor(w, g, f"{what}: output {i}", tolerance, layout=True)
            elif type(w) is not type(g) or w != g:
                raise Difference(f"{what}: output {i} is {g!r}, expected {w!r}")
    pairs = [(i, w, g) for i, (w, g) in enumerate(zip(wanted, got, strict=True)) if _has_bytes(w) and i not in skipped]
    for i, w, g in pairs:
        if _home(w, eager) != _home(g, ours):
            raise Difference(f"{what}: output {i} lies in {_home(g, ours)}, expected {_home(w, eager)}")
    for i, w, g in pairs:
        for j, w2, g2 in pairs:
            if j >= i:
                break
            if storage_of(w) != storage_of(w2):
                if _overlap(_span(g), _span(g2)):
                    raise Difference(f"{what}: outputs {j} and {i} share memory when compiled, and should not")
            elif g.data_ptr() - g2.data_ptr() != w.data_ptr() - w2.data_ptr():
                raise Difference(f"{what}: outputs {j} and {i} share memory, and do not when compiled")
    return skipped


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte of the memory that ``tensor`` lies in, and of the one behind its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _has_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _home(tensor: torch.Tensor, world: World) -> tuple[str, int] | None:
    """The caller's tensor that ``tensor`` lies in, and the offset of its first byte to that one's."""
    at = tensor.data_ptr()
    for name, root in world.roots().items():
        start, end = storage_of(root)
        if start <= at < end:
            return name, at - root.data_ptr()
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def compare_tensor(wanted: torch.Tensor, got: torch.Tensor, what: str, tolerance: float, layout: bool = False) -> None:
    # An empty result that requires a gradient has none to give.
    same_grad = wanted.requires_grad == got.requires_grad or not wanted.numel()
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype) or not same_grad:
        describe = [f"{tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for t in (got, wanted)]
        raise Difference(f"{what} is {describe[0]}, expected {describe[1]}")
    if wanted.numel() and wanted.is_inference() != got.is_inference():
        # What may be written outside of inference mode, and saved for a backward pass, hangs on it.
        raise Difference(f"{what} is_inference() is {got.is_inference()}, expected {wanted.is_inference()}")
    if layout and wanted.numel():
        strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (got, wanted)]
        if strides[0] != strides[1]:
            raise Difference(f"{what} has strides {got.stride()}, expected {wanted.stride()}")
        if not tolerance and (wanted.is_conj(), wanted.is_neg()) != (got.is_conj(), got.is_neg()):
            raise Difference(f"{what} has other conjugate or negative bits")
    with torch.no_grad():
        a, b = (t.detach().resolve_conj().resolve_neg() for t in (wanted, got))
        if tolerance:
            tolerance = max(tolerance, 2e-2 if a.dtype in (torch.float16, torch.bfloat16) else 0.0)
            equal = torch.allclose(a.cpu(), b.cpu(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            equal = _same_bits(a, b)
    if not equal:
        raise Difference(f"{what} is\n{got}\nexpected\n{wanted}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return not a.is_floating_point() or torch.equal(torch.signbit(a), torch.signbit(b))
    if not (a.is_floating_point() or a.is_complex()):
        return False
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])
