"""ShapeKey: what a wrapper files a recording under."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from .errors import OptionError


@dataclass(frozen=True, eq=False)
class ShapeKey:
    """Key of one recording of a wrapper. Without a variant it equals its size, so that a bare int finds it.

    Args:
        size: the bucket: tokens or batch rows that the recording runs, an int ≥ 0.
        variant: anything hashable that selects another recording at the same size (a LoRA id, a draft length).

    Raises:
        OptionError: ``size`` is not a non-negative int, or ``variant`` is not hashable or not equal to itself (NaN).
    """

    size: int
    variant: Hashable = None

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0:
            raise OptionError(f"ShapeKey.size must be an int >= 0, got {self.size!r}")
        # An int is found without a call into Python: the key to count under.
        object.__setattr__(self, "plain", self.size if self.variant is None else self)
        try:
            found = hash(self.size if self.variant is None else (self.size, self.variant))
        except TypeError:
            raise OptionError(
                f"ShapeKey.variant must be hashable, got {type(self.variant).__name__}; use a tuple or an id"
            ) from None
        try:
            same = bool(self.variant == self.variant)
        except Exception:  # arrays are compared element by element
            same = False
        if not same:
            raise OptionError(
                f"ShapeKey.variant must be equal to itself, or nothing is found under it, got {self.variant!r}; use a "
                f"tuple or an id"
            )
        object.__setattr__(self, "_hash", found)  # every replay looks keys up

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShapeKey):
            return self.size == other.size and self.variant == other.variant
        if isinstance(other, int) and not isinstance(other, bool):
            return self.variant is None and self.size == other
        return NotImplemented

    def __reduce__(self) -> Any:  # hashes of strings differ between processes
        return ShapeKey, (self.size, self.variant)

    @staticmethod
    def of(key: ShapeKey | int) -> ShapeKey:
        """``key`` itself, or ``ShapeKey(key)`` for a bare int."""
        return key if isinstance(key, ShapeKey) else ShapeKey(key)

    def __str__(self) -> str:
        return str(self.size) if self.variant is None else f"{self.size}/{_text(self.variant)}"


def _text(variant: Hashable) -> str:
    """``variant`` as reports count by it: no other reads so. A text is quoted where it may be something else."""
    if not isinstance(variant, str):
        return repr(variant)
    plain = variant.isidentifier() and variant not in ("None", "True", "False", "nan", "inf")
    return str.__str__(variant) if plain else str.__repr__(variant)
