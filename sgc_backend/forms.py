"""What tells two values of a traced graph apart: their forms. Whatever is computed of values, forms compare it.

A form says nothing of where a tensor lies; who has to know which tensors share memory asks for `storage_id`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def expression(value: Any) -> Any:
    """``value`` (int, float, bool or a torch.Sym*) as a sympy expression, or itself where it is a plain number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return value


def number_form(value: Any) -> Hashable:
    """A number, or anything else that is no tensor. Numbers by text: 0.0 and -0.0 are equal ones, 1 and True as well.

    What can't be hashed is returned as it is.
    """
    value = expression(value)
    return (type(value).__name__, repr(value)) if isinstance(value, (int, float, complex)) else value


def tensor_form(fake: torch.Tensor) -> Hashable | None:
    """A fake tensor's; None where more than this tells it apart: it is of a class of its own, or isn't strided."""
    if fake.layout is not torch.strided or type(fake).__name__ != "FakeTensor":
        return None
    # .item() of a wrapped number gives a symbol of its own: the program reads another number.
    number = getattr(fake, "item_memo", None)
    shape = (*fake.shape, *fake.stride(), fake.storage_offset())
    flags = (fake.requires_grad, fake.is_conj(), fake.is_neg(), fake.is_inference())
    return (fake.dtype, fake.device, fake.dim(), tuple(map(number_form, shape)), flags, number_form(number))


def storage_id(tensor: torch.Tensor) -> int | None:
    """What the fakes of one storage have in common while they live; None where a tensor has no storage to show."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # inside torch.func transforms tensors have no storage to show
        return None
