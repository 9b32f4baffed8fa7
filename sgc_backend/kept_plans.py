"""The plans that a compiled graph keeps, of all its keys: until they are replaced, unwanted, or their model dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from .buckets import Key
from .by_address import PlansByAddress
from .plan import Plan
from .stats import Counters

ADDRESS_SETS = 128  # plans kept for one key, each for static inputs at other addresses (layers that share their code)


class KeptPlans:
    """A compiled graph's plans. Of one key there may be several, one for each set of addresses of the static inputs.

    Args:
        counters: the graph's.
        trim_when_dead: whether plans that die with their model give their memory back at once: not where results
            lie in it that may still be read.

    Attributes:
        by_key: the plans. The same dict for good, so that calls may look plans up in it without asking here.
        wasted: by key, recordings in a row that were let go after one replay at most.
    """

    def __init__(self, counters: Counters, *, trim_when_dead: bool) -> None:
        self.by_key: dict[Key, PlansByAddress] = {}
        self.wasted: dict[Key, int] = {}
        self.trim_when_dead = trim_when_dead
        self._counters = counters

    def keep(self, key: Key, plan: Plan) -> None:
        """Keep ``plan`` for ``key``, instead of one at the same addresses, or of the oldest where there are many."""
        before = self.by_key.get(key, PlansByAddress(()))
        outdated = [p for p in before if p.static_addresses == plan.static_addresses]
        kept = [*before.without(*outdated), plan]
        outdated += kept[:-ADDRESS_SETS]
        after = self.by_key[key] = PlansByAddress(kept[-ADDRESS_SETS:])
        for old in outdated:
            self._let_go(key, old)
        for watched in after if after.telling != before.telling else (plan,):
            self._watch(key, watched, after.telling)
        self._counters.captured[key] += 1

    def forget(self, key: Key, plan: Plan, *, trim: bool = True, wasted: bool = True) -> None:
        """Let go of one plan of ``key``; ``wasted``: if it was hardly replayed, that counts."""
        plans = self.by_key.get(key, ())
        if not any(p is plan for p in plans):
            return
        left = plans.without(plan)
        if left:
            self.by_key[key] = PlansByAddress(left)
        else:
            self.by_key.pop(key, None)
        if wasted:
            self._let_go(key, plan, trim=trim)
        else:
            plan.release(trim=trim)

    def drop_dead(self) -> None:
        """Let go of plans whose static inputs are gone: they can never match again."""
        dead = _dead_looked_up()
        for key, plans in list(self.by_key.items()):
            for plan in plans:
                if dead(plan):
                    self.forget(key, plan)

    def clear(self) -> list[Plan]:
        """Forget everything, and return the plans: they are the caller's to release."""
        plans = [plan for by_address in self.by_key.values() for plan in by_address]
        self.by_key.clear()
        self.wasted.clear()
        return plans

    def alive(self) -> int:
        """How many keys have a plan that could still match."""
        dead = _dead_looked_up()
        return sum(not all(map(dead, plans)) for plans in self.by_key.values())

    def runs(self, key: Key) -> int:
        """How often the plans of ``key`` were replayed."""
        return sum(plan.runs for plan in self.by_key.get(key, ()))

    def _let_go(self, key: Key, plan: Plan, *, trim: bool = True) -> None:
        self.wasted[key] = self.wasted.get(key, 0) + 1 if plan.runs <= 1 else 0
        plan.release(trim=trim)

    def _watch(self, key: Key, plan: Plan, index: int | None) -> None:
        """Have a model that dies take its recordings along, although Dynamo keeps its compiled code.

        It is the static input that tells its plan from others' which must die: it may share the rest with models that
        live on.
        """
        memory = None if index is None else plan.static_memory[index]()
        if memory is not None:
            plan.watch(weakref.finalize(memory, _forget, weakref.ref(self), key, weakref.ref(plan)))


def _dead_looked_up() -> Callable[[Plan], bool]:
    """Tells whether a static input of a plan is gone, as of now; looks once for all plans of one model, which share
    their hundreds of references."""
    known: dict[int, bool] = {}

    def dead(plan: Plan) -> bool:
        found = known.get(id(plan.storages))
        if found is None:
            found = known[id(plan.storages)] = any(storage.expired() for storage in plan.storages)
        return found

    return dead


def _forget(plans: weakref.ref[KeptPlans], key: Key, plan: weakref.ref[Plan]) -> None:
    alive, dead = plans(), plan()
    if alive is not None and dead is not None:
        # A weight may die between a call and the reading of its static results.
        alive.forget(key, dead, trim=alive.trim_when_dead)
