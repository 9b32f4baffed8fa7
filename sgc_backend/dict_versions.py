"""Whether any of many dicts was written to, asked in one C call.

CPython counts what is written to a dict, and Dynamo's guards compare those counts: about 10 ns for a dict, where a
look-up and a comparison of one entry take 40. Only Python can tell the count of a plain dict right: instances keep
attributes outside of their dicts, so what is watched must be dicts of their own, such as the three of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class DictVersions:
    """Remembers how far some dicts were written, from the moment that it is made.

    Args:
        dicts: of class dict, and no instance's ``__dict__``. They are kept alive.

    Attributes:
        unwritten: ``() -> bool``, whether none was written to since. A write of what was there already may count.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = tuple(dicts)
        self._versions = [_version(d) for d in self._dicts]
        check, dicts = _check_of(self._dicts), self._dicts
        self.unwritten: Callable[[], bool] = lambda: check(dicts)

    def written(self) -> list[dict[Any, Any]]:
        """The dicts that were written to."""
        return [d for d, version in zip(self._dicts, self._versions, strict=True) if _version(d) != version]

    @staticmethod
    def available() -> bool:
        """Whether this build of torch can tell."""
        try:
            probe: dict[str, int] = {}
            versions = DictVersions([{}, probe])
            before = versions.unwritten()
            probe["key"] = 1
            return before and not versions.unwritten() and versions.written() == [probe]
        except (ImportError, AttributeError, TypeError, RuntimeError):  # Dynamo's own business, and may change
            return False


def _version(held: dict[Any, Any]) -> int:
    from torch._C._dynamo.guards import dict_version

    return dict_version(held)


def _check_of(dicts: tuple[dict[Any, Any], ...]) -> Callable[[Any], bool]:
    """What compares their versions with those of now, given ``dicts`` again."""
    from torch._C._dynamo.guards import RootGuardManager
    from torch._dynamo.guards import GuardManagerType  # loads Dynamo: not for those who never record

    root = RootGuardManager()
    for k, held in enumerate(dicts):
        place = root.tuple_getitem_manager(k, f"dicts[{k}]", held, GuardManagerType.GUARD_MANAGER)
        place.add_dict_version_guard(held, [f"dicts[{k}] was not written to"], None)
    return root.check
