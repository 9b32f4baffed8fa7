"""Custom ops without what torch puts in front of them for gradients.

Note [Below autograd]
    Between the call of an op of torch.library.custom_op and its body stand kernels that torch writes for it in Python:
    one for autograd and, where the op writes to its arguments, one that counts up their versions. Where nothing wants
    gradients they exclude their own dispatch keys for the thread and call on, which takes 13 µs of the 17 that an op
    around one small copy takes (torch 2.13, no GPU). The arguments of a cut that are tensors over a recording's bytes
    want no gradients and their versions are nobody's. So a cut that is such an op alone is called with these keys
    excluded beforehand: its body sees what it would see, and everything else that dispatches on the way (modes,
    autocast, the profiler) still does. One exclusion around all steps of a plan costs less than one for each.

    torch calls these kernels for the sake of an argument that is a tensor, and not an inference tensor. An op that gets
    none is called with nothing excluded, and its body can differentiate; so it is called as it is.

    Versions of torch differ in whether a body that writes is called with the counting excluded, or counts what it
    writes itself; so that is tried out, once a process. An op whose kernels for these keys are not torch's own is
    called as it is; such kernels that are registered later are called by what is recorded from then on.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

Exclusion = Callable[[], AbstractContextManager[Any]]

# One line a kernel: its key, where it was registered, its schema. The inactive ones were replaced.
_KERNEL = re.compile(r"^(?P<key>\w+)(?:\[alias\])?: registered at (?P<file>.*):\d+ :: ", re.MULTILINE)
_VERSIONS = "ADInplaceOrView"
_trying = threading.Lock()


def overload_of(target: Any) -> Any:
    """The overload that a call of ``target`` comes to: of an op that has no other one; anything else as it is."""
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target


def plain_call(target: Any) -> Any:
    """What does what a call of ``target`` does, and less besides. A packet of overloads stays one: a mode or a tensor
    class that takes calls of functions over may tell it from an overload."""
    return overload_of(target) if isinstance(target, torch._library.custom_ops.CustomOpDef) else target


def exclusion(target: Any, given: Iterable[Any], *, counted: bool = False) -> Exclusion | None:
    """What excludes the keys that have nothing to do in a call of ``target`` whose arguments want no gradients.

    Args:
        target: what is called; see `overload_of`.
        given: what it is called with; tensors in containers as well, one by one.
        counted: somebody may ask for the version of a tensor that it writes to.

    Returns:
        None: nothing is known to be superfluous: it is no op of torch.library.custom_op, someone else has registered
        kernels for these keys, or it gets no tensor for which torch calls its own.
    """
    if not isinstance(target, torch._ops.OpOverload) or not any(map(is_differentiable, given)):
        return None
    concerned = _torchs_own(torch._C._dispatch_dump(target.name()))
    if "Autograd" not in concerned:
        return None
    if _VERSIONS in concerned and not counted and _uncounted_inside():
        return torch._C._AutoDispatchBelowADInplaceOrView
    return torch._C._AutoDispatchBelowAutograd


@functools.lru_cache(256)
def _torchs_own(dump: str) -> frozenset[str]:
    """The keys for gradients and versions that torch's own kernels of an op are registered for; none where another's
    is among them. ``dump``: what the dispatcher says of the op."""
    kernels = _KERNEL.findall(dump)
    concerned = {key: file for key, file in kernels if key.startswith("Autograd") or key == _VERSIONS}
    files = {file.replace("\\", "/") for file in concerned.values()}
    return frozenset(concerned if all(file.endswith("torch/_library/custom_ops.py") for file in files) else ())


def prepare(targets: Iterable[Any]) -> None:
    """Find out what `exclusion` will have to know about ``targets``. It may wait for a thread, in which a collection of
    garbage may begin that gives recordings back to a pool; so call this where no pool is held."""
    ops = [op for op in map(overload_of, targets) if isinstance(op, torch._ops.OpOverload)]
    if any(op._schema.is_mutable and op.namespace != "aten" for op in ops):
        _uncounted_inside()


def is_differentiable(value: Any) -> bool:
    """Whether torch may have to keep account of ``value`` for gradients."""
    if not isinstance(value, torch.Tensor):
        return False
    # In inference mode nothing is, whatever the arguments.
    return torch.is_inference_mode_enabled() or not value.is_inference()


def _uncounted_inside() -> bool:
    """Whether a custom op's body that writes is called with the counting of versions excluded."""
    with _trying:  # an op that two threads define at once is gone for one of them
        return _try_out()


@functools.cache
def _try_out() -> bool:
    found: list[bool] = []

    def look(x: torch.Tensor) -> None:
        found.append(torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.ADInplaceOrView))

    op = torch.library.custom_op("sgc_backend::look", look, mutates_args=("x",))

    def call() -> None:
        with torch.no_grad():
            op(torch.empty(0, device="cpu"))

    # In a thread of its own: the caller may be capturing, or under modes that would see the op.
    thread = threading.Thread(target=call, name="sgc_backend: a look at custom ops")
    thread.start()
    thread.join()
    return found == [True]
