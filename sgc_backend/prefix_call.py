"""What a rule about one op is asked with, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from .interpret import tensors
from .prefix_layouts import ONE, Layout, Padded, UnsafeError, shown


@dataclass(frozen=True)
class Value:
    """What is known of a tensor.

    Attributes:
        layout: for each dimension its factors.
        window: elements beyond its exact sizes lie among the rows of the tensor that it is a view of.
        wild: its integers beyond the exact sizes are computed, so as indices they may be out of range.
    """

    layout: Layout
    window: bool = False
    wild: bool = False


class Call:
    """One call of an op, as rules see it.

    Attributes:
        args: every argument by its name in the schema, defaults included.
        given: args and kwargs as they were passed.
        out: the tensors that it returned.
        padded: the padded symbols.
        wild: set by rules: whether integer results may be out of range beyond the rows; by default they are where an
            integer argument is.
        window: set by the rules of views: whether the results are windows.
    """

    def __init__(
        self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, padded: Padded, look: Look
    ) -> None:
        self.op, self.given, self.padded, self.value = op, (tuple(args), kwargs), padded, look
        self.args: dict[str, Any] = {}
        for position, argument in enumerate(op._schema.arguments):
            given = args[position] if position < len(args) else argument.default_value
            self.args[argument.name] = kwargs.get(argument.name, given)
        self.out = list(tensors(out))
        self.window = False
        self.wild = any(look(t).wild for t in tensors(self.args))

    @property
    def name(self) -> str:
        return self.op._schema.name.partition("::")[2]

    def operands(self) -> list[torch.Tensor]:
        """The tensors that it reads, or may read: all but those that it only writes its result to (``out=``)."""
        only = {
            a.name
            for a in self.op._schema.arguments
            if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        }
        return list(tensors({name: value for name, value in self.args.items() if name not in only}))

    def layout(self, of: Any) -> Layout:
        """The layout of a tensor, or of the argument with that name."""
        return self.value(self.args[of] if isinstance(of, str) else of).layout

    def symbolic(self, value: Any) -> bool:
        return self.padded.symbolic(value)

    def dim(self, name: str, layout: Layout) -> int:
        """The argument ``name``, a dimension of a tensor with ``layout``, from 0 upwards."""
        return int(self.args[name]) % max(len(layout), 1)

    def static(self, layout: Layout, dims: Iterable[int], what: str) -> None:
        """Raises UnsafeError, with ``what`` the op does over it, for a dimension among ``dims`` that has rows."""
        for d in dims:
            if self.symbolic(layout[d]):
                raise UnsafeError(f"{what} the rows (dimension {d} of size {self.padded.product(layout[d])})")

    def prefix(self, layout: Layout, d: int, what: str) -> None:
        """Raises UnsafeError where the rows are no prefix of dimension ``d`` because it was merged."""
        if len(layout[d]) > 1:
            raise UnsafeError(f"{what} dimension {d}, which was merged of {shown((layout[d],))[1:-2]}")

    def from_front(self, name: str, layout: Layout, d: int) -> None:
        """Raises UnsafeError where the index ``name`` along dimension ``d`` depends on how many rows that has."""
        index = self.args[name]
        if self.symbolic(index) or not (index is None or self.padded.sized(index).is_nonnegative):
            raise UnsafeError(f"counts from the end of the rows ({name} {index} in a dimension of size {layout[d][0]})")

    def broadcast(self, layouts: Iterable[Layout]) -> Layout:
        """The layout of a pointwise result.

        Raises:
            UnsafeError: the rows of two operands lie differently in one dimension.
        """
        layouts = list(layouts)
        rank = max(map(len, layouts), default=0)
        found = [ONE] * rank
        for layout in layouts:
            for d, dim in enumerate(layout, rank - len(layout)):
                if dim == ONE:
                    continue
                if found[d] not in (ONE, dim):
                    raise UnsafeError(
                        f"combines tensors whose rows lie differently in dimension {d}: "
                        f"{shown((found[d],))[1:-2]} and {shown((dim,))[1:-2]}"
                    )
                found[d] = dim
        return tuple(found)

    def index(self, tensor: torch.Tensor) -> None:
        """Raises UnsafeError where ``tensor``, which holds indices, may be out of range beyond its rows."""
        if self.symbolic(tensor) and self.value(tensor).wild:
            raise UnsafeError("takes computed indices, which may be out of range beyond the rows of a call")


Look = Callable[[torch.Tensor], Value]
Layouts = Sequence[Layout] | None  # of the results, in order; None: plain


@dataclass(frozen=True)
class Rule:
    """How an op is judged.

    Attributes:
        judge: gives the layouts of the results, or raises UnsafeError.
        shapes: arguments that are sizes of the result; in any other a padded size is used as a value.
    """

    judge: Callable[[Call], Layouts]
    shapes: frozenset[str] = frozenset()


def rules(judge: Callable[[Call], Layouts], names: str, shapes: Iterable[str] = ()) -> dict[str, Rule]:
    """The same rule for several ops of torch's, named without namespace."""
    rule = Rule(judge, frozenset(shapes))
    return {f"aten::{name}": rule for name in names.split()}
