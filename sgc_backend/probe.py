"""Whether a piece that runs at a bucket's size gives the real rows as it does at their own size: tried, not argued.

The rules of prefix.py have said so first; both must agree before a piece is padded. The rows behind the real ones are
filled with what does the most harm: in floating point NaN, then the lowest finite number (sorting puts NaN last); in
integers, which may be indices, other valid values: the last real row, then the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .extents import Compact, Geometry, buffer_for, copy_elements, in_factors, poison, prefix, tails
from .groups import Group, HostRef, Ref, Split
from .spans import copy_of

# Between a size and another, kernels may add up in another order. A leak of what the rows behind hold is far larger.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Probe:
    """Runs the pieces of a call a second and third time, at a bucket's sizes.

    Args:
        real, wide: each value's geometry at the real sizes and at the bucket's.
        real_number, wide_number: what a size or number is at either.
        generator: what pieces draw random numbers from.
        split: what the pieces are of.
        compare: whether results are compared; otherwise the pieces run once at the bucket's sizes, so that kernels are
            loaded before they are recorded.
        given_wide: the calls to `run` have the bucket's sizes, and the real ones are cut out of them; otherwise they
            have the real sizes.

    Attributes:
        disagreed: what came out otherwise, a sentence each.
    """

    def __init__(
        self,
        real: Mapping[str, Geometry],
        wide: Mapping[str, Geometry],
        real_number: Callable[[HostRef], Any],
        wide_number: Callable[[HostRef], Any],
        generator: torch.Generator,
        split: Split,
        *,
        compare: bool,
        given_wide: bool,
    ) -> None:
        self.real, self.wide, self.compare, self.given_wide = real, wide, compare, given_wide
        self.split = split
        self.real_number, self.wide_number = real_number, wide_number
        self.generator = generator
        self.disagreed: list[str] = []

    def run(self, group: Group, fn: Callable[..., Any], given: Sequence[Any]) -> Any:
        """The piece's results for ``given``, as if nothing else were done."""
        if not self.compare and self.given_wide:
            return fn(*given)
        try:
            exact = [self._exact(group, r, v) for r, v in zip(group.inputs, given, strict=True)]
            tries = [
                [self._wide(group, r, v, k) for r, v in zip(group.inputs, exact, strict=True)]
                for k in range(1 + self.compare)
            ]
        except Exception as error:
            self.disagreed.append(f"piece {group.index} could not be tried at another size: {error}")
            return fn(*given)
        drawn_from = self.generator.get_state() if group.draws else None
        results = fn(*given)
        left = self.generator.get_state() if group.draws else None
        try:
            if not self.compare:
                self._from(drawn_from, fn, tries[0])
                return results
            kept = [self._copied(group, r, v) for r, v in zip(group.inputs, exact, strict=True)]
            wanted = self._from(drawn_from, fn, exact)
            for wide in tries:
                again = [self._copied(group, r, v) for r, v in zip(group.inputs, wide, strict=True)]
                found = self._different(group, wanted, self._from(drawn_from, fn, wide), exact, wide)
                if found is not None:
                    self.disagreed.append(self._report(group, found, kept, again))
                    break
        except Exception as error:
            self.disagreed.append(f"piece {group.index} failed at another size: {type(error).__name__}: {error}")
        finally:
            if left is not None:
                self.generator.set_state(left)
        return results

    def _from(self, state: torch.Tensor | None, fn: Callable[..., Any], given: Sequence[Any]) -> Any:
        """``fn(*given)`` with the random numbers that the answer was given with."""
        if state is not None:
            self.generator.set_state(state)
        return fn(*given)

    def _exact(self, group: Group, ref: Ref | HostRef, value: Any) -> Any:
        if isinstance(ref, HostRef):
            return self.real_number(ref)
        if not isinstance(value, torch.Tensor) or not self._has_rows(ref.name):
            return self._copied(group, ref, value)
        if not self.given_wide:
            return self._copied(group, ref, value)
        return Compact(value, self.real[ref.name], self.wide[ref.name], written=False).fetch()

    def _wide(self, group: Group, ref: Ref | HostRef, exact: Any, attempt: int) -> Any:
        if isinstance(ref, HostRef):
            return self.wide_number(ref)
        if not isinstance(exact, torch.Tensor) or not self._has_rows(ref.name):
            return self._copied(group, ref, exact)
        real, wide = self.real[ref.name], self.wide[ref.name]
        out = buffer_for(wide, exact.dtype, exact.device)
        copy_elements(prefix(out, real, wide), in_factors(exact, real))
        if exact.dtype.is_floating_point or exact.dtype.is_complex:
            poison(out, real, wide, torch.finfo(exact.dtype).min if attempt else float("nan"))
        else:
            for behind, last in tails(out, real, wide, first=bool(attempt)):
                behind.copy_(last)
        return out

    def _copied(self, group: Group, ref: Ref | HostRef, value: Any) -> Any:
        """``value``, or a copy where the piece may write to it: what is tried must leave no trace."""
        if not isinstance(ref, Ref) or not isinstance(value, torch.Tensor) or not group.mutates:
            return value
        # What lies in inputs alone is written where they are; what a group made, may be by any name it goes by. Weights
        # and caches that are only read are never copied: they fill the device.
        roots = self.split.roots.get(ref.name)
        return copy_of(value) if not roots or roots & group.writes or self._has_rows(ref.name) else value

    def _has_rows(self, name: str) -> bool:
        if name not in self.real:
            raise ValueError(f"the size of {name} is not known for other calls than this one")
        return self.real[name].size != self.wide[name].size

    def _different(
        self, group: Group, wanted: Sequence[Any], got: Sequence[Any], exact: Sequence[Any], wide: Sequence[Any]
    ) -> str | None:
        """The name of a result, or of an input that was written, whose real rows differ; None: of none."""
        names = [*group.outputs, *(r.name for r in group.inputs if isinstance(r, Ref) and group.mutates)]
        ins = [
            (e, w) for r, e, w in zip(group.inputs, exact, wide, strict=True) if isinstance(r, Ref) and group.mutates
        ]
        pairs = [*zip(wanted, got, strict=True), *ins]
        unequal = [(n, self._unequal(n, a, b)) for n, (a, b) in zip(names, pairs, strict=True)]
        flags = [(n, f) for n, f in unequal if f is not None]
        if flags and bool(torch.stack([f for _, f in flags]).any()):  # one wait for the device a piece, not a value
            return next(name for name, flag in flags if flag)
        return None

    def _unequal(self, name: str, wanted: Any, got: Any) -> torch.Tensor | None:
        if not isinstance(wanted, torch.Tensor) or not wanted.numel() or name in self.split.uninitialised:
            return None
        rows = got
        if self._has_rows(name):
            rows, wanted = prefix(got, self.real[name], self.wide[name]), in_factors(wanted, self.real[name])
        return unequal(wanted, rows)

    def _report(self, group: Group, name: str, exact: Sequence[Any], wide: Sequence[Any]) -> str:
        """Which op is to blame: the first of the piece's whose value differs."""
        try:
            op = _first_to_differ(group.gm, self, exact, wide) or "no op of it by itself"
        except Exception as error:
            op = f"which op is not known: {type(error).__name__}"
        return f"piece {group.index}: {name} differs with other rows behind the real ones ({op})"


def unequal(wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Whether two tensors differ, as a bool tensor without dimensions: beyond rounding, or in NaN."""
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return (wanted != got).any()
    if wanted.dtype.is_complex:
        return unequal(torch.view_as_real(wanted.resolve_conj()), torch.view_as_real(got.resolve_conj()))
    a, b = wanted.double(), got.double()
    finite = torch.where(a.isfinite(), a.abs(), 0.0).max()
    close = (a - b).abs() <= TOLERANCE.get(wanted.dtype, 0.25) * finite
    return ~((a == b) | close | (a.isnan() & b.isnan())).all()


def _first_to_differ(gm: fx.GraphModule, probe: Probe, exact: Sequence[Any], wide: Sequence[Any]) -> str | None:
    """Runs a piece's own graph at both sizes, node by node, and names the first whose values differ."""
    values: dict[str, Any] = {}
    found: list[str] = []

    class Run(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            out = super().run_node(node)
            if node.op.startswith("call") and isinstance(out, torch.Tensor):
                if node.name not in values:
                    values[node.name] = out.clone()
                elif not found and _differs(values[node.name], out, probe, node.name):
                    found.append(f"{node.name} = {node.target}")
            return out

    Run(gm).run(*exact)
    Run(gm).run(*wide)
    return found[0] if found else None


def _differs(wanted: torch.Tensor, got: torch.Tensor, probe: Probe, name: str) -> bool:
    if name in probe.real:
        flag = probe._unequal(name, wanted, got)
        return flag is not None and bool(flag)
    if wanted.shape == got.shape:
        return bool(unequal(wanted, got))
    if wanted.dim() != got.dim() or any(n > m for n, m in zip(wanted.shape, got.shape, strict=True)):
        return False
    return bool(unequal(wanted, got.as_strided(wanted.shape, got.stride())))
