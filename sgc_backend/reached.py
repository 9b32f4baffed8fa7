"""What a callable reaches without being given it, in modules and objects, and whether that has moved.

A recording reads a tensor at the address that it had; Python, which would find another tensor in its place, does not
run again. So what the callable can find is looked up when it is recorded, and looked up again at each replay: weights
that were swapped, and metadata rebound in a context object, are an error then and no stale values.

Looked at are functions with what they close over, the parameters and buffers of modules, and those attributes of
objects (and of modules, where they are plain tensors) that the code names, lists of tensors among them. Not looked at
are variables themselves, which loops and notebooks use again for other things, tensors in dicts, and what only breaks
read, which run at every replay.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .device import Device
from .dict_versions import DictVersions

Place = tuple[Any, Any, str]  # a dict or list, a key in it, and what users call it
FEW = 16  # so many look-ups take less than 1 µs, and are not worth the loading of Dynamo
LARGE = 64  # containers of more entries are data, and not looked into; lists of tensors are


class Reached:
    """Tensors that ``fn`` finds in modules and objects, with their addresses.

    The modules and objects are kept alive with the recording.

    Args:
        fn: the callable, as it is recorded.
        device: tensors elsewhere are not looked at.
        check: look up everything at each replay; False: notice only memory that was given back, which costs nothing.
    """

    def __init__(self, fn: Callable[..., Any], device: Device, *, check: bool = True) -> None:
        self.lost: list[str] = []  # whose memory was given back
        self.looks = check
        walker = _Walker(fn)
        self._tensors = [(place, place[0][place[1]].data_ptr()) for place in walker.tensors(device)]
        self._holders = [(place, place[0][place[1]]) for place in walker.holders()]
        self._quiet = walker.quiet if check else {}
        self._versions: DictVersions | None = None
        self._seal()

    def settle(self) -> None:
        """Once ``fn`` was recorded: what it rebinds itself, such as a result that it remembers, is nothing to check."""
        self._tensors = [(place, at) for place, at in self._tensors if _address(place) == at]
        self._holders = [(place, held) for place, held in self._holders if _at(place) is held]
        if not self.looks:
            self._watch()
        elif len(self._tensors) + len(self._holders) > FEW and _versions_told():
            held_in = {id(place[0]) for place, _ in (*self._tensors, *self._holders)}
            self._quiet = {key: held for key, held in self._quiet.items() if key in held_in}
            self._versions = DictVersions(list(self._quiet.values())) if self._quiet else None
        self._seal()

    def _watch(self) -> None:
        """Have each tensor's memory say when it goes; nothing else of what was found is kept."""
        lost = self.lost
        self._storages = [
            weakref.ref(place[0][place[1]].untyped_storage(), lambda _, label=place[2]: lost.append(label))
            for place, _ in self._tensors
        ]
        self._tensors, self._holders, self._quiet = [], [], {}

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

    def keeps(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of ``tensors`` live as long as this, because each look asks them where they lie."""
        kept = set(map(id, self._bound))
        return self.looks and all(id(tensor) in kept for tensor in tensors)

    def addresses(self) -> set[int | None]:
        """Where the tensors lie that each look compares."""
        return {at for _, at in self._tensors}

    def moved(self) -> str | None:
        """What lies elsewhere now, or is gone; None where all is as it was."""
        if not self.looks:
            return self.lost[0] if self.lost else None
        unwritten = self._unwritten
        try:
            if (
                (unwritten is None or unwritten())
                and list(map(_data_ptr, self._bound)) == self._bound_at
                # By identity: another object may say that it is equal, and hold other tensors.
                and all(map(_is, map(_getitem, self._in[1], self._keys[1]), self._held))
                and list(map(_data_ptr, map(_getitem, self._in[0], self._keys[0]))) == self._at
            ):
                return None
        except (LookupError, TypeError, AttributeError, RuntimeError):  # gone, or no tensor any more
            pass
        return self._search()

    def _search(self) -> str | None:
        for place, held in self._holders:
            now = _at(place)
            if now is not held and not (_is_list_of_tensors(held) and _same_tensors(now, held)):
                return place[2]
        moved = next((place[2] for place, at in self._tensors if _address(place) != at), None)
        if moved is None and self._versions is not None and not self._versions.unwritten():
            self._look_up(self._versions.written())
        return moved

    def _look_up(self, noisy: list[dict[str, Any]]) -> None:
        """Look up what lies in these dicts from now on, which are written to although nothing moves."""
        for held in noisy:
            self._quiet.pop(id(held), None)
        self._versions = DictVersions(list(self._quiet.values())) if self._quiet else None
        self._seal()


_data_ptr, _getitem, _is = torch.Tensor.data_ptr, operator.getitem, operator.is_


@functools.cache
def _versions_told() -> bool:
    return DictVersions.available()


def _at(place: Place) -> Any:
    try:
        return place[0][place[1]]
    except LookupError:
        return None


def _is_list_of_tensors(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _same_tensors(now: Any, held: Any) -> bool:
    """Whether a list or tuple that took another's place holds tensors at the same addresses."""
    if type(now) is not type(held) or len(now) != len(held):
        return False
    return all(_address((now, k, "")) == _address((held, k, "")) is not None for k in range(len(held)))


def _address(place: Place) -> int | None:
    value = _at(place)
    return value.data_ptr() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _has_address(value: Any, device: Device) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and value.layout is torch.strided and device.owns(value) and value.numel() > 0


class _Walker:
    """Follows a callable to the modules and objects that it finds."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.names: set[str] = set()  # what the code that was seen calls attributes and globals
        self.of_breaks: set[str] = set()  # what the code of breaks calls them
        self.modules: dict[int, torch.nn.Module] = {}
        self.objects: dict[int, Any] = {}
        self.lists: dict[int, tuple[Any, str]] = {}  # lists and tuples of tensors, and what users call them
        self.quiet: dict[int, dict[str, Any]] = {}  # dicts of modules, which are seldom written to, by id
        self._seen: dict[int, Any] = {}
        self._visit(fn)
        known = -1
        while known != len(self._seen) + len(self.names):  # more code names more attributes
            known = len(self._seen) + len(self.names)
            for holder in [*self.objects.values(), *self.modules.values()]:
                self._follow_names(holder)

    def tensors(self, device: Device) -> Iterator[Place]:
        """Where tensors of ``device`` were found."""
        yield from (p for p in self._places() if _has_address(p[0][p[1]], device))

    def holders(self) -> Iterator[Place]:
        """Where modules and objects were found that hold such tensors, or may."""
        known = {id(m) for root in self.modules.values() for m in root.modules()} | self.objects.keys()
        known |= self.lists.keys()
        yield from (p for p in self._places() if id(p[0][p[1]]) in known)

    def _places(self) -> Iterator[Place]:
        found: set[tuple[int, str]] = set()
        for root in self.modules.values():
            for path, module in root.named_modules():
                if self.of_breaks.isdisjoint(path.split(".")):
                    yield from self._in(module, f"{path}." if path else "", found)
        for holder in self.objects.values():
            yield from self._in(holder, f"{type(holder).__name__}.", found)
        for held, label in self.lists.values():
            if label.rpartition(".")[2] not in self.of_breaks:
                yield from ((held, k, f"{label}[{k}]") for k in range(len(held)))

    def _in(self, holder: Any, prefix: str, found: set[tuple[int, str]]) -> Iterator[Place]:
        dicts = [(vars(holder), self.names)]
        if isinstance(holder, torch.nn.Module):
            own = (holder._parameters, holder._buffers, holder._modules)
            dicts += [(d, set(d)) for d in own]
            self.quiet.update((id(d), d) for d in own if type(d) is dict)
        for held, wanted in dicts:
            for key in list(held):
                if key in wanted and key not in self.of_breaks and (id(held), key) not in found:
                    found.add((id(held), key))
                    yield held, key, prefix + key

    def _visit(self, value: Any, label: str = "") -> None:
        if id(value) in self._seen or isinstance(value, (torch.Tensor, type, types.ModuleType, str, int, float)):
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            self._visit_all([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, types.MethodType):
            self._visit_all([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, torch.nn.Module):
            self.modules[id(value)] = value
            for module in value.modules():
                self._visit_own(getattr(type(module), "forward", None))
        elif label and _is_list_of_tensors(value):
            self.lists[id(value)] = value, label
        elif isinstance(value, (list, tuple, set, dict)):
            if len(value) <= LARGE:
                self._visit_all(list(value.values()) if isinstance(value, dict) else list(value))
        elif hasattr(value, "__dict__") and not _is_torchs(type(value)):
            self.objects[id(value)] = value
            if callable(value):
                self._visit_own(type(value).__call__)

    def _visit_all(self, values: list[Any]) -> None:
        for value in values:
            self._visit(value)

    def _visit_own(self, value: Any) -> None:
        if isinstance(value, types.FunctionType) and not _is_torchs(value):
            self._visit(value)

    def _visit_function(self, fn: types.FunctionType) -> None:
        if hasattr(fn, "stub") and hasattr(fn, "body"):  # a break
            self.of_breaks |= _names_in(fn.body.__code__) if hasattr(fn.body, "__code__") else set()
            return
        named = _names_in(fn.__code__)
        self.names |= named
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self._visit(cell.cell_contents, name)
            except ValueError:  # not filled yet
                continue
        self._visit_all([*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()])
        for name in named & fn.__globals__.keys():
            found = fn.__globals__[name]
            if not _is_torchs(found if isinstance(found, types.FunctionType) else type(found)) or isinstance(
                found, torch.nn.Module
            ):
                self._visit(found, name)

    def _follow_names(self, holder: Any) -> None:
        for name in list(self.names):
            self._visit_own(getattr(type(holder), name, None))
            value = vars(holder).get(name)
            if value is not None:
                self._visit(value, f"{type(holder).__name__}.{name}")


def _is_torchs(value: Any) -> bool:
    """Whether a class or function is torch's, Python's or this package's own."""
    module = str(getattr(value, "__module__", None) or "builtins")
    ours = module.startswith("sgc_backend.") and not module.startswith(("sgc_backend.demo", "sgc_backend.bench"))
    return ours or module.partition(".")[0] in ("torch", "builtins", "functools", "collections", "threading")


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names_in(const)
    return names
