"""The plans of one key, each for static inputs at other addresses: layers that share code bring their own weights.

A call finds its plan by the address of one static input, the telling one, and then compares all of them. Layers may
share some of their static inputs (a table of positions, tied weights, empty buffers, which all lie at address 0), so
the telling one is chosen by the plans that are there: the first that tells them all apart, or the one that comes
closest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .device import pointer_check
from .plan import Plan


class PlansByAddress:
    """Plans of one key. Immutable: threads look plans up while another one makes a changed copy.

    Attributes:
        plans: oldest first.
        telling: the argument index of the static input that they are found by; None where there is no static input.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.telling = _telling(self.plans)
        self._same_addresses = pointer_check()
        self._at: dict[int | None, list[Plan]] = {}
        for plan in self.plans:
            self._at.setdefault(self._address(plan), []).append(plan)

    def find(self, args: Sequence[Any]) -> Plan | None:
        """The plan whose static inputs lie where those of ``args`` lie."""
        index = self.telling
        for plan in self._at.get(None if index is None else args[index].data_ptr(), ()):
            if self._same_addresses(list(args), plan.static_addresses, plan.static_indices):
                return plan
        return None

    def addresses(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Where the static inputs of ``args`` lie."""
        return tuple(args[index].data_ptr() for index in self.plans[0].static_indices)

    def unproven_like(self, args: Sequence[Any]) -> int:
        """How many plans that share a static input with ``args`` were replayed once at most.

        A static input that moves at every call leaves such plans behind; so do the first calls of layers that share
        something.
        """
        here = list(zip(self.plans[0].static_indices, self.addresses(args), strict=True))
        return sum(
            plan.runs <= 1 and any(at and plan.static_addresses[index] == at for index, at in here)
            for plan in self.plans
        )

    def without(self, *others: Plan) -> list[Plan]:
        """The plans but for ``others``."""
        return [plan for plan in self.plans if not any(plan is other for other in others)]

    def _address(self, plan: Plan) -> int | None:
        return None if self.telling is None else plan.static_addresses[self.telling]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)


def _telling(plans: Sequence[Plan]) -> int | None:
    best, most = None, 0
    for index in plans[0].static_indices if plans else ():
        addresses = len({plan.static_addresses[index] for plan in plans})
        if addresses == len(plans):
            return index
        if addresses > most:
            best, most = index, addresses
    return best
