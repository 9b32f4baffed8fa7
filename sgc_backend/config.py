"""Options of ``torch.compile(model, backend="sgc_piecewise", options={...})``, checked once at the edge.

Lower layers get plain values; nothing below `backend` reads the environment.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionError

INNER_COMPILERS = ("inductor", "aot_eager", "eager")
AUTO_LIMIT = 65536  # sizes beyond this are not in the automatic ladder


def auto_sizes(limit: int = AUTO_LIMIT) -> tuple[int, ...]:
    """The automatic ladder up to ``limit``, ascending: every size to 8, then four steps an octave (60 up to 65536)."""
    sizes = list(range(1, 9))
    base = 8
    while sizes[-1] < limit:
        sizes.extend(base + base * k // 4 for k in range(1, 5))
        base *= 2
    return tuple(s for s in sizes if s <= limit)


def batch_sizes(limit: int) -> tuple[int, ...]:
    """The automatic ladder of batch rows up to ``limit``, ascending, which ends with it (51 up to 2048).

    1, 2, 4, then eights up to 64, then eight steps an octave.
    """
    sizes, step = [1, 2, 4, 8], 8
    while sizes[-1] < limit:
        if sizes[-1] >= 128 and sizes[-1] % (16 * step) == 0:
            step *= 2
        sizes.append(sizes[-1] + step)
    return (*(s for s in sizes if s < limit), limit)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may set. See the README's table for each option's meaning.

    Raises:
        OptionError: naming the option, what was expected and what came.
    """

    capture_sizes: str | Sequence[int] | None = "auto"
    max_recordings: int = 64
    cut_ops: Sequence[Any] = ()
    capturable_ops: Sequence[Any] = ()
    inner: str | Callable[..., Any] = "inductor"
    pad: str = "auto"
    max_padding_ratio: float = 2.0
    outputs: str = "clone"
    capture: str = "lazy"
    share_executables: bool = False
    strict: bool = False
    device_module: Any = None
    lane: str | None = None

    def __post_init__(self) -> None:
        sizes = self.capture_sizes
        if isinstance(sizes, str):
            if sizes != "auto":
                raise OptionError(f'capture_sizes must be "auto", None or a list of ints, got {sizes!r}')
        elif sizes is not None:
            object.__setattr__(self, "capture_sizes", checked_sizes("capture_sizes", sizes, '"auto", None or '))
        if not _is_int(self.max_recordings) or self.max_recordings < 0:
            raise OptionError(f"max_recordings must be an int >= 0, got {self.max_recordings!r}")
        for name in ("cut_ops", "capturable_ops"):
            ops = getattr(self, name)
            if isinstance(ops, str) or not isinstance(ops, (Sequence, set, frozenset)):
                raise OptionError(f"{name} must be a list of op names, OpOverloads or functions, got {ops!r}")
            for op in ops:
                if not (isinstance(op, str) or callable(op)):
                    raise OptionError(f"{name} holds {op!r}; expected 'ns::op', an OpOverload or a function")
            # a copy: a caller's list may change later, ours must not
            object.__setattr__(self, name, tuple(ops))
        if not (self.inner in INNER_COMPILERS if isinstance(self.inner, str) else callable(self.inner)):
            raise OptionError(f"inner must be one of {INNER_COMPILERS} or a callable, got {self.inner!r}")
        check_one_of("pad", self.pad, ("auto", "never", "trust"))
        if isinstance(self.max_padding_ratio, bool) or not isinstance(self.max_padding_ratio, (int, float)):
            raise OptionError(f"max_padding_ratio must be a number >= 1, got {self.max_padding_ratio!r}")
        if not self.max_padding_ratio >= 1:
            raise OptionError(f"max_padding_ratio must be a number >= 1, got {self.max_padding_ratio!r}")
        check_one_of("outputs", self.outputs, ("clone", "static"))
        check_one_of("capture", self.capture, ("lazy", "session"))
        for name in ("share_executables", "strict"):
            check_bool(name, getattr(self, name))
        if self.lane is not None and (not isinstance(self.lane, str) or not self.lane):
            raise OptionError(f"lane must be None or a non-empty str, got {self.lane!r}")
        object.__setattr__(self, "device_module", named_module(self.device_module))
        if self.device_module is not None and not hasattr(self.device_module, "graph_pool_handle"):
            raise OptionError(
                f"device_module must offer graph_pool_handle() like torch.cuda or sgc_backend.emulated, "
                f"got {self.device_module!r}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Checked options from what ``torch.compile`` passes on; None means the defaults."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise OptionError(f"options must be a dict, got {type(options).__name__}")
        valid = [f.name for f in fields(cls)]
        unknown = sorted(str(name) for name in options if name not in valid)
        if unknown:
            raise OptionError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; valid: {', '.join(valid)}"
            )
        return cls(**options)

    def ladder(self) -> tuple[int, ...]:
        """The sizes of a dynamic dimension that are recorded, ascending; empty where exact sizes are."""
        if self.capture_sizes is None:
            return ()
        return _AUTO_LADDER if self.capture_sizes == "auto" else tuple(self.capture_sizes)

    def is_capture_size(self, size: int) -> bool:
        """Whether ``size`` of a dynamic dimension is one that these options record."""
        if self.capture_sizes is None:
            return True
        if self.capture_sizes == "auto":
            return size <= AUTO_LIMIT and size in _AUTO
        return size in self.capture_sizes


def named_module(given: Any) -> Any:
    """A device module that is given by its name, which can be copied and pickled with what holds it; or as it is.

    Raises:
        OptionError: there is no module of that name.
    """
    if not isinstance(given, str):
        return given
    try:
        return importlib.import_module(given)
    except (ImportError, TypeError, ValueError) as error:
        raise OptionError(
            f"device_module must be torch.cuda or sgc_backend.emulated (it must offer graph_pool_handle()), or its "
            f"name, got {given!r}: {error}"
        ) from error


def emulation_asked_for() -> bool:
    """Whether ``SGC_DEVICE=emulated`` is set; any other non-empty value is an error."""
    value = os.environ.get("SGC_DEVICE", "")
    if value not in ("", "emulated"):
        raise OptionError(f"SGC_DEVICE must be 'emulated' or unset, got {value!r}")
    return value == "emulated"


_AUTO_LADDER = auto_sizes()
_AUTO = frozenset(_AUTO_LADDER)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def checked_sizes(name: str, sizes: Any, others: str = "") -> tuple[int, ...]:
    """``sizes`` ascending and each once. ``others``: what else the error says may be given.

    Raises:
        OptionError: it is no list of ints >= 1.
    """
    if isinstance(sizes, (str, bytes, bytearray)) or not isinstance(sizes, (Sequence, set, frozenset, range)):
        raise OptionError(f"{name} must be {others}a list of ints, got {sizes!r}")
    if not sizes:
        raise OptionError(f"{name} is empty; it must be {others}a list of at least one size")
    for size in sizes:
        if not _is_int(size) or size < 1:
            raise OptionError(f"{name} holds {size!r}; every size must be an int >= 1")
    return tuple(sorted(set(sizes)))


def checked_name(name: Any) -> str:
    """``name``; raises OptionError where it is no text, or empty."""
    if not isinstance(name, str) or not name:
        raise OptionError(f"name must be None or a non-empty str, got {name!r}")
    return name


def check_one_of(name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raises OptionError where ``value`` is none of the ``valid`` texts."""
    if not isinstance(value, str) or value not in valid:  # an array is compared element by element
        raise OptionError(f"{name} must be one of {valid}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raises OptionError where ``value`` is no bool: what else is true or false is likely meant for something else."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, got {value!r}")
