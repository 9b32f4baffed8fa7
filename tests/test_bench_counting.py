"""What the benchmarks count on the emulated device."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import sgc_backend
from sgc_backend import FullCudaGraphBackend, emulated
from sgc_backend.bench.attention import attend, attention
from sgc_backend.bench.counting import Counts, count, functions


def test_a_replay_counts_as_one_graph_and_its_launches_not_as_ops() -> None:
    full, x = FullCudaGraphBackend(emulated), torch.randn(4)
    with full.capture_session():
        full.capture_one(4, lambda: (x * 2).relu() + 1)
    assert count(lambda: full.replay(4)) == Counts(graphs=1, launches=3, copies=0, clones=0, ops=0, allocations=0)


def test_copies_are_counted_by_tensor_and_apart_from_clones_and_other_ops() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))

    def call() -> torch.Tensor:
        a.copy_(b)
        torch._foreach_copy_([a, b], [c, c])
        return (a + b).view(1, 2).detach().clone()

    assert count(call) == Counts(graphs=0, launches=0, copies=3, clones=1, ops=1, allocations=2)


def test_a_custom_op_is_one_op_whatever_it_copies_inside() -> None:
    q, k, v, out = (torch.randn(3, 2, 4) for _ in range(4))
    assert count(lambda: attend(q, k, v, out)) == Counts(0, 0, copies=0, clones=0, ops=1, allocations=0)
    assert count(lambda: attention(q, k, v)) == Counts(0, 0, copies=0, clones=0, ops=1, allocations=1)


def test_functions_of_the_package_are_counted_and_no_others() -> None:
    full, x = FullCudaGraphBackend(emulated), torch.randn(4)
    with full.capture_session():
        full.capture_one(4, lambda: x * 2)
    before = sys.getprofile()
    found = functions(lambda: [full.replay(4) for _ in range(3)])
    assert sys.getprofile() is before
    assert found["full: replay"] == 3
    files = {path.stem for path in Path(sgc_backend.__file__).parent.glob("*.py")}
    assert {name.split(":")[0] for name in found} <= files
    assert not any(name.startswith(("emulated", "_")) for name in found)
    assert functions(lambda: torch.ones(3).sum()) == {}
