"""What a callable finds for itself, without being given it: tensors, and floats, in modules and objects.

Looked at are functions with what they close over, the parameters and buffers of modules, and those attributes of
objects (and of modules, where they are plain tensors) that the code names, lists of tensors among them, and dicts under
those keys that the code spells out. Not looked at are variables themselves, which loops and notebooks use again for
other things, and what only breaks read, which run at every replay. Of numbers, only floats: what engines count and
switch by are ints and bools.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .device import Device

Place = tuple[Any, Any, str]  # a dict or list, a key in it, and what users call it
LARGE = 64  # containers of more entries are data, and not looked into; lists of tensors are


def is_list_of_tensors(value: Any) -> bool:
    """Whether ``value`` is a list or tuple of tensors."""
    return type(value) in (list, tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _has_address(value: Any, device: Device) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and value.layout is torch.strided and device.owns(value) and value.numel() > 0


class Finds:
    """Follows a callable to the modules and objects that it finds.

    Args:
        fn: the callable.

    Attributes:
        quiet: dicts of modules, which are seldom written to, by id.
        variables: tensors that lie in variables, arguments and containers, and what users call them, by id.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.variables: dict[int, tuple[str, torch.Tensor]] = {}
        self.names: set[str] = set()  # what the code that was seen calls attributes and globals
        self.of_breaks: set[str] = set()  # what the code of breaks calls them
        self.modules: dict[int, torch.nn.Module] = {}
        self.objects: dict[int, Any] = {}
        self.classes: dict[int, type] = {}
        self.lists: dict[int, tuple[Any, str]] = {}  # lists and tuples of tensors, and what users call them
        self.texts: set[str] = set()  # what the code spells out: keys of dicts may be among it
        self.dicts: dict[int, tuple[dict[Any, Any], str]] = {}  # dicts, and what users call them
        self.quiet: dict[int, dict[str, Any]] = {}  # dicts of modules, which are seldom written to, by id
        self._of_classes: dict[int, Mapping[str, Any]] = {}  # their attributes, by id
        self._seen: dict[int, Any] = {}
        self._visit(fn)
        known = -1
        while known != len(self._seen) + len(self.names) + len(self.classes):  # more code names more attributes
            known = len(self._seen) + len(self.names) + len(self.classes)
            for holder in [*self.objects.values(), *self.modules.values()]:
                self._follow_names(vars(holder), type(holder).__name__)
                self._visit_classes(holder)
            for cls in list(self.classes.values()):
                self._follow_names(vars(cls), cls.__name__)

    def tensors(self, device: Device) -> Iterator[Place]:
        """Where tensors of ``device`` were found."""
        yield from (p for p in self._places() if _has_address(p[0][p[1]], device))

    def objects_that_are_tensors(self, device: Device) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of ``device`` that the callable can get hold of, by whatever name, and what users call them."""
        yield from ((place[2], place[0][place[1]]) for place in self.tensors(device))
        yield from (
            (label, tensor)
            for label, tensor in self.variables.values()
            if _has_address(tensor, device) and label not in self.of_breaks
        )

    def floats(self) -> Iterator[Place]:
        """Where floats were found."""
        yield from (p for p in self._places() if isinstance(p[0][p[1]], (float, complex)))

    def integers(self) -> Iterator[Place]:
        """Where ints and bools were found."""
        yield from (p for p in self._places() if isinstance(p[0][p[1]], int))

    def holders(self) -> Iterator[Place]:
        """Where modules and objects were found that hold such tensors, or may."""
        known = {id(m) for root in self.modules.values() for m in root.modules()} | self.objects.keys()
        known |= self.lists.keys() | {id(held) for held, _ in self.dicts.values() if any(self._keys_of(held))}
        yield from (p for p in self._places() if id(p[0][p[1]]) in known)

    def unset(self, places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
        """Where an object, or a class, has no attribute of its own in front of that of a class which is among
        ``places``, and the latter. One that is set there takes its place."""
        classes = {id(attributes): key for key, attributes in self._of_classes.items()}
        own: dict[int, dict[str, Place]] = {}
        for place in places:
            if id(place[0]) in classes:
                own.setdefault(classes[id(place[0])], {})[place[1]] = place
        if not own:
            return
        modules = [m for root in self.modules.values() for m in root.modules()]
        holders = [(holder, type(holder).__mro__) for holder in (*self.objects.values(), *modules)]
        holders += [(cls, cls.__mro__[1:]) for cls in self.classes.values()]
        done: set[tuple[int, str]] = set()
        for holder, mro in holders:
            for k, cls in enumerate(mro):
                for key, place in own.get(id(cls), {}).items():
                    in_front = (holder, *mro[:k])
                    if any(key in vars(other) for other in in_front):
                        continue
                    for other in in_front:
                        if (id(other), key) not in done:
                            done.add((id(other), key))
                            name = (other if isinstance(other, type) else type(other)).__name__
                            yield (vars(other), key, f"{name}.{key}"), place

    def _places(self) -> Iterator[Place]:
        found: set[tuple[int, str]] = set()
        for root in self.modules.values():
            for path, module in root.named_modules():
                if self.of_breaks.isdisjoint(path.split(".")):
                    yield from self._in(module, f"{path}." if path else "", found)
        for holder in self.objects.values():
            yield from self._in(holder, f"{type(holder).__name__}.", found)
        for cls in self.classes.values():
            # The dict of a class comes in a wrapper that is new each time.
            held = self._of_classes.setdefault(id(cls), vars(cls))
            names = (key for key in list(held) if key in self.names and key not in self.of_breaks)
            yield from ((held, key, f"{cls.__name__}.{key}") for key in names)
        for held, label in self.lists.values():
            if label.rpartition(".")[2] not in self.of_breaks:
                yield from ((held, k, f"{label}[{k}]") for k in range(len(held)))
        for held, label in self.dicts.values():
            if label.rpartition(".")[2] not in self.of_breaks:
                yield from ((held, key, f"{label}[{key!r}]") for key in self._keys_of(held))

    def _keys_of(self, held: dict[Any, Any]) -> Iterator[str]:
        """The keys of a dict that the code spells out."""
        return (key for key in list(held) if isinstance(key, str) and key in self.texts and key not in self.of_breaks)

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
        if isinstance(value, torch.Tensor):
            self.variables.setdefault(id(value), (label or "an argument", value))
        if id(value) in self._seen or isinstance(value, (torch.Tensor, types.ModuleType, str, int, float)):
            return
        if isinstance(value, type):
            if not _is_torchs(value):
                self.classes[id(value)] = value
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
                self._visit_classes(module)
        elif label and is_list_of_tensors(value):
            self.lists[id(value)] = value, label
        elif isinstance(value, dict):
            if len(value) <= LARGE:
                if label and type(value) is dict:
                    self.dicts[id(value)] = value, label
                for key, item in list(value.items()):
                    self._visit(item, f"{label}[{key!r}]" if label else "")
        elif isinstance(value, (list, tuple, set)):
            if len(value) <= LARGE:
                self._visit_all(list(value))
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
            code = getattr(fn.body, "__code__", None)
            self.of_breaks |= _names_in(code) | _texts_in(code) if code is not None else set()
            return
        named = _names_in(fn.__code__)
        self.names |= named
        self.texts |= _texts_in(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self._visit(cell.cell_contents, name)
            except ValueError:  # not filled yet
                continue
        self._visit_all([*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()])
        for name in named & fn.__globals__.keys():
            found = fn.__globals__[name]
            if not _is_torchs(found if isinstance(found, (types.FunctionType, type)) else type(found)) or isinstance(
                found, torch.nn.Module
            ):
                self._visit(found, name)

    def _visit_classes(self, holder: Any) -> None:
        for cls in type(holder).__mro__:
            self._visit(cls)

    def _follow_names(self, held: Mapping[str, Any], label: str) -> None:
        for name in list(self.names):
            value = held.get(name)
            if isinstance(value, (staticmethod, classmethod, property)):
                value = value.fget if isinstance(value, property) else value.__func__
            if isinstance(value, types.FunctionType):
                self._visit_own(value)
            elif value is not None:
                self._visit(value, f"{label}.{name}")


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


def _texts_in(code: types.CodeType) -> set[str]:
    texts: set[str] = set()
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            texts |= _texts_in(const)
        else:
            texts |= {
                text for text in (const if isinstance(const, (tuple, frozenset)) else (const,)) if type(text) is str
            }
    return texts
