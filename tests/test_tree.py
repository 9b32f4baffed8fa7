"""Containers are taken apart and put together again, whoever made their class, and structures keep no tensor."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from sgc_backend import FullCudaGraphBackend, emulated
from sgc_backend.pools import pool_of
from sgc_backend.tree import flatten, tensors_of, unflatten


@dataclasses.dataclass
class Data:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Rows(list):
    pass


class Named(dict):
    label = "a class's own"


class Both(collections.OrderedDict):
    """Needs an argument to be made."""

    def __init__(self, needed: int, **values: Any) -> None:
        super().__init__(**values)
        self.needed = needed


CONTAINERS = {
    "dataclass": lambda t: Data(t, [t]),
    "frozen with slots": lambda t: Frozen((t, 1)),
    "list subclass": lambda t: Rows([t, Rows([t])]),
    "dict subclass": lambda t: Named(b=t, a=Data(t)),
    "inside registered ones": lambda t: {"k": (Named(x=t), [Frozen(t)])},
}


def test_a_size_stays_a_size() -> None:
    size = torch.zeros(2, 3).shape
    leaves, spec = flatten((size, [size]))
    made = unflatten(leaves, spec)
    assert type(made[0]) is type(made[1][0]) is torch.Size
    assert made[0] == size


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_put_together_is_what_was_taken_apart_and_another_object(name: str) -> None:
    t, other = torch.ones(2), torch.zeros(2)
    value = CONTAINERS[name](t)
    leaves, spec = flatten(value)
    assert sum(leaf is t for leaf in leaves) == len(tensors_of(value)) > 0
    made = unflatten([other if leaf is t else leaf for leaf in leaves], spec)
    assert type(made) is type(value)
    assert made is not value
    assert all(leaf is t for leaf in tensors_of(value))
    assert all(leaf is other for leaf in tensors_of(made))
    assert flatten(made)[1] == spec


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_structure_keeps_no_tensor(name: str) -> None:
    t = torch.ones(2)
    spec = flatten(CONTAINERS[name](t))[1]
    gone = weakref.ref(t)
    del t
    gc.collect()
    assert gone() is None
    assert spec.num_leaves


def test_what_cannot_be_copied_or_reaches_itself_is_a_leaf() -> None:
    value = Both(1, x=torch.ones(1))
    leaves, spec = flatten(value)
    assert unflatten(leaves, spec) is value
    loop = Rows([torch.ones(1)])
    loop.append(loop)
    leaves, spec = flatten(loop)
    assert unflatten(leaves, spec)[1] is loop


MADE = {"tensor": lambda y: y, "dataclass": Data, "dict subclass": lambda y: Named(y=y)}


@pytest.mark.parametrize("name", MADE)
def test_outputs_of_all_sizes_share_memory_in_any_container(name: str) -> None:
    make = MADE[name]
    x = torch.randn(1 << 20)
    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(1 << 20, lambda: make(x * 2))
        pool = pool_of(backend.device)
        largest = pool.reserved_bytes()
        for n in ((1 << 20) - 1024, 1 << 19):
            backend.capture_one(n, lambda n=n: make(x[:n] * 2))
    assert pool.reserved_bytes() <= 1.02 * largest
    (y,) = tensors_of(backend.replay(1 << 19))
    assert torch.equal(y, x[: 1 << 19] * 2)
    backend.cleanup()
