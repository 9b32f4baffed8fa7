"""Which bytes a tensor takes, and copies that can stand in its place."""

from __future__ import annotations

from typing import Any

import torch

from .capture import with_bits
from .inputs import distinct_elements, has_overlap


def copy_of(tensor: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """A copy with the same strides, so that the same views can be made of it; ``whole``: and of all around it."""
    if whole:
        storage = tensor.untyped_storage().clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return with_bits(copy, tensor.is_conj(), tensor.is_neg())
    if has_overlap(tensor.size(), tensor.stride()):
        return tensor.clone()
    conj, neg = tensor.is_conj(), tensor.is_neg()
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy = with_bits(copy, conj, neg)
    distinct_elements(copy).copy_(distinct_elements(tensor))
    return copy


def tensor_span(tensor: Any) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last; nothing for what has no memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return (0, 0)
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def storage_span(tensor: Any) -> tuple[int, int]:
    """Addresses of the first byte of a tensor's storage and of the one behind its last; nothing where it has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return (0, 0)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
