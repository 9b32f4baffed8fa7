"""What a callable reaches without being given it, in modules and objects, and whether that has moved.

A recording reads a tensor at the address that it had; Python, which would find another tensor in its place, does not
run again. So what the callable can find is looked up when it is recorded, and looked up again at each replay: weights
that were swapped, metadata rebound in a context object, and another scale are an error then and no stale values.

What is looked at, finds.py says.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .device import Device
from .dict_versions import DictVersions
from .errors import CaptureError
from .finds import Finds, Place, is_list_of_tensors

FEW = 16  # so many look-ups take less than 1 µs, and are not worth the loading of Dynamo


class Reached:
    """Tensors that ``fn`` finds in modules and objects, with their addresses; and floats, with their values.

    The modules and objects are kept alive with the recording.

    Args:
        fn: the callable, as it is recorded.
        device: tensors elsewhere are not looked at.
        check: look up everything at each replay; False: notice only storages that are gone, which costs nothing.
    """

    def __init__(self, fn: Callable[..., Any], device: Device, *, check: bool = True) -> None:
        self.lost: list[str] = []  # whose memory was given back
        self.looks = check
        finds = Finds(fn)
        self._tensors = [(place, place[0][place[1]].data_ptr()) for place in finds.tensors(device)]
        self._holders = [(place, place[0][place[1]]) for place in finds.holders()]
        self._floats = [(place, place[0][place[1]]) for place in finds.floats()]
        self._integers = [(place, place[0][place[1]]) for place in finds.integers()]
        found = [place for place, _ in (*self._tensors, *self._holders, *self._floats)]
        self._unset = list(finds.unset(found))
        self._quiet = finds.quiet if check else {}
        # What they were: another tensor object over the same memory.
        self._before = [(label, t, t.detach()) for label, t in finds.objects_that_are_tensors(device)]
        self._versions: DictVersions | None = None
        self._seal()

    def settle(self, what: str) -> list[tuple[str, int, int]]:
        """Once ``fn`` was recorded: what it rebinds itself, such as a result that it remembers, is nothing to check.

        Args:
            what: what was recorded, for the error.

        Returns:
            The ints that ``fn`` changed: what users call each, and its values before and behind. A replay goes on as if
            they were still what they were, as it does of everything that Python computes.

        Raises:
            CaptureError: ``fn`` gave a tensor that it found other memory or another shape in place, which a replay
                would not do again. The tensor has what it had before.
        """
        before, self._before = self._before, []
        changed = [(label, tensor, old) for label, tensor, old in before if not _lies_as(tensor, old)]
        for _, tensor, old in changed:
            tensor.data = old
        if changed:
            labels = ", ".join(sorted({label for label, _, _ in changed}))
            raise CaptureError(
                f"{what}: the callable gives {labels} other memory or another shape in place (.data =, set_, t_), and "
                f"a replay does not run it; write into it (copy_, add_), or give it back what it had before returning"
            )
        self._tensors = [(place, at) for place, at in self._tensors if _address(place) == at]
        self._holders = [(place, held) for place, held in self._holders if _at(place) is held]
        self._floats = [(place, number) for place, number in self._floats if [_at(place)] == [number]]
        now = [(place[2], number, _at(place)) for place, number in self._integers]
        self._integers = []
        known = {id(place) for place, _ in (*self._tensors, *self._holders, *self._floats)}
        self._unset = [(p, behind) for p, behind in self._unset if p[1] not in p[0] and id(behind) in known]
        if not self.looks:
            self._watch()
        elif len(self._tensors) + len(self._holders) > FEW and _versions_told():
            held_in = {id(place[0]) for place, _ in (*self._tensors, *self._holders)}
            self._quiet = {key: held for key, held in self._quiet.items() if key in held_in}
            self._versions = DictVersions(list(self._quiet.values())) if self._quiet else None
        self._seal()
        return [(label, old, new) for label, old, new in now if isinstance(new, int) and new != old]

    def _watch(self) -> None:
        """Have each tensor's memory say when it goes; nothing else of what was found is kept."""
        lost = self.lost
        self._storages = [
            weakref.ref(place[0][place[1]].untyped_storage(), lambda _, label=place[2]: lost.append(label))
            for place, _ in self._tensors
        ]
        self._tensors, self._holders, self._floats, self._unset, self._quiet = [], [], [], [], {}

    def _seal(self) -> None:
        # Laid out for the check, whose loops all run in C. What lies in dicts that nobody writes to need not be looked
        # up again: those objects are still found there, and tensors among them have only to lie where they lay.
        quiet = self._quiet if self._versions is not None else {}
        self._unwritten = self._versions.unwritten if self._versions is not None else None
        bound = [(place, at) for place, at in self._tensors if id(place[0]) in quiet]
        self._bound = [place[0][place[1]] for place, _ in bound]
        self._bound_at = [at for _, at in bound]
        loose = [(place, at) for place, at in self._tensors if id(place[0]) not in quiet]
        holders = [(place, held) for place, held in self._holders if id(place[0]) not in quiet]
        self._in = [place[0] for place, _ in loose], [place[0] for place, _ in holders]
        self._keys = [place[1] for place, _ in loose], [place[1] for place, _ in holders]
        self._at = [at for _, at in loose]
        self._held = [held for _, held in holders]
        self._floats_in = [place[0] for place, _ in self._floats], [place[1] for place, _ in self._floats]
        self._numbers = [number for _, number in self._floats]
        self._unset_in = [place[0] for place, _ in self._unset], [place[1] for place, _ in self._unset]

    def keeps(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of ``tensors`` live as long as this, because each look asks them where they lie."""
        kept = set(map(id, self._bound))
        return self.looks and all(id(tensor) in kept for tensor in tensors)

    def finders(self) -> dict[int, Callable[[], Any]]:
        """By the id of each tensor that is looked up at each look: what finds it, or what took its place; a LookupError
        where nothing did."""
        places = [place for place, _ in self._tensors] if self.looks else []
        return {id(_at(place)): functools.partial(_getitem, place[0], place[1]) for place in places}

    def addresses(self) -> set[int | None]:
        """Where the tensors lie that each look compares."""
        return {at for _, at in self._tensors}

    def moved(self) -> str | None:
        """What lies elsewhere now, is gone, or is another number: "model.weight moved"; None where all is as it was."""
        if not self.looks:
            return f"{self.lost[0]} moved" if self.lost else None
        unwritten = self._unwritten
        try:
            if (
                (unwritten is None or unwritten())
                and list(map(_data_ptr, self._bound)) == self._bound_at
                # By identity: another object may say that it is equal, and hold other tensors.
                and all(map(_is, map(_getitem, self._in[1], self._keys[1]), self._held))
                and list(map(_data_ptr, map(_getitem, self._in[0], self._keys[0]))) == self._at
                # In a list, where a NaN is equal to itself.
                and (not self._numbers or list(map(_getitem, *self._floats_in)) == self._numbers)
                and (not self._unset or True not in map(_contains, *self._unset_in))
            ):
                return None
        except (LookupError, TypeError, AttributeError, RuntimeError):  # gone, or no tensor any more
            pass
        return self._search()

    def _search(self) -> str | None:
        for place, held in self._holders:
            now = _at(place)
            if now is not held and not self._stands_in(now, held):
                return f"{place[2]} moved"
        moved = next((f"{place[2]} moved" for place, at in self._tensors if _address(place) != at), None)
        for place, number in self._floats:
            if moved is None and [_at(place)] != [number]:
                moved = f"{place[2]} changed from {number!r} to {_at(place)!r}"
        for place, behind in [pair for pair in self._unset if pair[0][1] in pair[0][0]]:
            if moved is None:
                moved = self._set_now(place, behind)
        if moved is None and self._versions is not None and not self._versions.unwritten():
            self._look_up(self._versions.written())
        return moved

    def _set_now(self, place: Place, behind: Place) -> str | None:
        """What is to be said of an attribute that was set in front of one of a class; the same is looked at from now
        on."""
        now, was = _at(place), _at(behind)
        if _address(place) != _address(behind) or not (isinstance(was, (torch.Tensor, float, complex)) or now is was):
            return f"{place[2]} moved"
        if isinstance(was, (float, complex)) and [now] != [was]:
            return f"{place[2]} changed from {was!r} to {now!r}"
        known = (self._tensors, self._floats, self._holders)
        for places in known:
            places += [(place, value) for other, value in places if other is behind]
        self._unset = [pair for pair in self._unset if pair[0] is not place]
        self._seal()
        return None

    def _stands_in(self, now: Any, held: Any) -> bool:
        """Whether a list or dict that took another's place holds the same in the places that count."""
        if is_list_of_tensors(held):
            return _same_tensors(now, held)
        if type(held) is not dict or type(now) is not dict:
            return False

        def at(place: Place) -> Place:
            return now, place[1], ""

        return (
            all(_address(at(place)) == address for place, address in self._tensors if place[0] is held)
            and all([_at(at(place))] == [number] for place, number in self._floats if place[0] is held)
            and all(_at(at(place)) is value for place, value in self._holders if place[0] is held)
        )

    def _look_up(self, noisy: list[dict[str, Any]]) -> None:
        """Look up what lies in these dicts from now on, which are written to although nothing moves."""
        for held in noisy:
            self._quiet.pop(id(held), None)
        self._versions = DictVersions(list(self._quiet.values())) if self._quiet else None
        self._seal()


_data_ptr, _getitem, _is, _contains = torch.Tensor.data_ptr, operator.getitem, operator.is_, operator.contains


@functools.cache
def _versions_told() -> bool:
    return DictVersions.available()


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.size(), one.stride()) == (other.data_ptr(), other.size(), other.stride())


def _at(place: Place) -> Any:
    try:
        return place[0][place[1]]
    except LookupError:
        return None


def _same_tensors(now: Any, held: Any) -> bool:
    """Whether a list or tuple that took another's place holds tensors at the same addresses."""
    if type(now) is not type(held) or len(now) != len(held):
        return False
    return all(_address((now, k, "")) == _address((held, k, "")) is not None for k in range(len(held)))


def _address(place: Place) -> int | None:
    value = _at(place)
    return value.data_ptr() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
