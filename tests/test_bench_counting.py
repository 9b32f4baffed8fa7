"""What the benchmarks count on the emulated device."""

from __future__ import annotations

import torch

from sgc_backend import FullCudaGraphBackend, emulated
from sgc_backend.bench.attention import attend
from sgc_backend.bench.counting import Counts, count


def test_a_replay_counts_as_one_graph_and_its_launches_not_as_ops() -> None:
    full, x = FullCudaGraphBackend(emulated), torch.randn(4)
    with full.capture_session():
        full.capture_one(4, lambda: (x * 2).relu() + 1)
    assert count(lambda: full.replay(4)) == Counts(graphs=1, launches=3, copies=0, clones=0, ops=0)


def test_copies_are_counted_by_tensor_and_apart_from_clones_and_other_ops() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))

    def call() -> torch.Tensor:
        a.copy_(b)
        torch._foreach_copy_([a, b], [c, c])
        return (a + b).view(1, 2).detach().clone()

    assert count(call) == Counts(graphs=0, launches=0, copies=3, clones=1, ops=1)


def test_a_custom_op_is_one_op_whatever_it_copies_inside() -> None:
    q, k, v, out = (torch.randn(3, 2, 4) for _ in range(4))
    assert count(lambda: attend(q, k, v, out)) == Counts(graphs=0, launches=0, copies=0, clones=0, ops=1)
