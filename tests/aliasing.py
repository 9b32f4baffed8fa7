"""What shares memory with what, and calls that are compared with eager in every respect that a caller can see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from test_backend import same

from sgc_backend.tree import flatten
from sgc_backend.tree import tensors_of as tensors


def equal(got: Any, wanted: Any) -> None:
    """The same structure, tensors that are the same bitwise, and equal other values."""
    (mine, spec), (theirs, wanted_spec) = flatten(got), flatten(wanted)
    assert spec == wanted_spec
    same(*([v for v in leaves if isinstance(v, torch.Tensor)] for leaves in (mine, theirs)))
    assert [v for v in mine if not isinstance(v, torch.Tensor)] == [
        v for v in theirs if not isinstance(v, torch.Tensor)
    ]


def shared(tree: Any) -> list[tuple[int, int, int]]:
    """Every two tensors of ``tree`` over one storage: their positions, and the bytes between their first elements."""
    found = tensors(tree)
    return [
        (i, j, found[j].data_ptr() - found[i].data_ptr())
        for i in range(len(found))
        for j in range(i + 1, len(found))
        if found[i].numel()
        and found[j].numel()
        and found[i].untyped_storage().data_ptr() == found[j].untyped_storage().data_ptr()
    ]


def calls_as_eager(
    call: Callable[..., Any],
    model: Any,
    make: Callable[[int], tuple[Any, ...]],
    times: int = 5,
    *,
    lasting: bool = True,
) -> None:
    """Call ``times`` times; results, written arguments, state, and what shares memory with what are those of eager.

    What was handed out earlier keeps its values, and writing to a result writes what it would write without us.

    Args:
        call: what is tested.
        model: the module or function behind it.
        make: the arguments of the k-th call.
        lasting: False for outputs="static": results are valid until the next call, each over a storage of its own.
    """
    reference = copy.deepcopy(model)
    state, wanted_state = (_state(m) for m in (model, reference))
    held: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for k in range(times):
            args = make(k)
            wanted_args = copy.deepcopy(args)  # keeps what shares memory with what
            got, wanted = call(*args), reference(*wanted_args)
            mine, theirs = (args, state, got), (wanted_args, wanted_state, wanted)
            equal(mine, theirs)
            assert [t.requires_grad for t in tensors(mine)] == [t.requires_grad for t in tensors(theirs)]
            given = len(tensors(mine[:2]))
            relations, wanted_relations = shared(mine), shared(theirs)
            if not lasting:
                relations = [r for r in relations if r[0] < given]
                wanted_relations = [r for r in wanted_relations if r[0] < given]
            assert relations == wanted_relations
            same([g for g, _ in held], [w for _, w in held])
            if k == times - 1:
                _writes_to_results_agree(mine, theirs)
            if lasting and not any(r[0] < given <= r[1] for r in relations):
                held.append((copy.copy(got), wanted))


def _state(model: Any) -> list[torch.Tensor]:
    return list(model.state_dict(keep_vars=True).values()) if isinstance(model, torch.nn.Module) else []


def _writes_to_results_agree(mine: Any, theirs: Any) -> None:
    for a, b in zip(tensors(mine[-1]), tensors(theirs[-1]), strict=True):
        if a.is_floating_point() and a.numel() and 0 not in a.stride():
            a.fill_(3.0)
            b.fill_(3.0)
            equal(mine, theirs)
