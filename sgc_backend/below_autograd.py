"""Custom ops without what torch puts in front of them for gradients.

Note [Below autograd]
    Between the call of an op of torch.library.custom_op and its body stand kernels that torch writes for it in Python:
    one for autograd and, where the op writes to its arguments, one that counts up their versions. Where nothing wants
    gradients they exclude their own dispatch keys for the thread and call on, which takes 13 µs of the 17 that an op
    around one small copy takes (torch 2.13, no GPU). The arguments of a cut that are tensors over a recording's bytes
    want no gradients and their versions are nobody's. So a cut that is such an op alone is called with these keys
    excluded beforehand: its body sees what it would see, and everything else that dispatches on the way (modes,
    autocast, the profiler) still does. One exclusion around all steps of a plan costs less than one for each.

    Versions of torch differ in whether a body that writes is called with the counting excluded, or counts what it
    writes itself; so that is tried out, once a process. An op whose kernels for these keys are not torch's own is
    called as it is.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Exclusion = Callable[[], AbstractContextManager[Any]]

# One line a kernel: its key, where it was registered, its schema. The inactive ones were replaced.
_KERNEL = re.compile(r"^(?P<key>\w+)(?:\[alias\])?: registered at (?P<file>.*):\d+ :: ", re.MULTILINE)
_VERSIONS = "ADInplaceOrView"


def overload_of(target: Any) -> Any:
    """The overload that a call of ``target`` comes to: of an op that has no other one; anything else as it is."""
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target


def exclusion(target: Any, *, counted: bool = False) -> Exclusion | None:
    """What excludes the keys that have nothing to do in a call of ``target`` whose arguments want no gradients.

    Args:
        target: what is called; see `overload_of`.
        counted: somebody may ask for the version of a tensor that it writes to.

    Returns:
        None: nothing is known to be superfluous: it is no op of torch.library.custom_op, or someone else has registered
        kernels for these keys.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    kernels = _KERNEL.findall(torch._C._dispatch_dump(target.name()))
    concerned = {key: file for key, file in kernels if key.startswith("Autograd") or key == _VERSIONS}
    files = {file.replace("\\", "/") for file in concerned.values()}
    if "Autograd" not in concerned or not all(file.endswith("torch/_library/custom_ops.py") for file in files):
        return None
    if _VERSIONS in concerned and not counted and _uncounted_inside():
        return torch._C._AutoDispatchBelowADInplaceOrView
    return torch._C._AutoDispatchBelowAutograd


@functools.cache
def _uncounted_inside() -> bool:
    """Whether a custom op's body that writes is called with the counting of versions excluded."""
    found: list[bool] = []

    def look(x: torch.Tensor) -> None:
        found.append(torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.ADInplaceOrView))

    op = torch.library.custom_op("sgc_backend::look", look, mutates_args=("x",))

    def call() -> None:
        with torch.no_grad():
            op(torch.empty(0))

    # In a thread of its own: the caller may be capturing, or under modes that would see the op.
    thread = threading.Thread(target=call, name="sgc_backend: a look at custom ops")
    thread.start()
    thread.join()
    return found == [True]
