"""When graphs that nobody holds any more are destroyed."""

from __future__ import annotations

import gc
from typing import Any

import torch
from test_pool import device, module

import sgc_backend
from sgc_backend.capture import record
from sgc_backend.devices import device_of
from sgc_backend.held_graphs import HeldGraphs, owned_by
from sgc_backend.pools import pool_of


@device
def test_recordings_that_the_collector_finds_inside_a_capture_are_destroyed_behind_it(device: str) -> None:

    pool = pool_of(device_of(module(device)))
    x = torch.randn(64, 64, device=device)

    def leave_garbage() -> None:
        wrapper: Any = sgc_backend.FullCudaGraphBackend(module(device))
        with wrapper.capture_session():
            wrapper.capture_one(4, lambda: x + 1)
        wrapper.itself = wrapper

    waiting: list[int] = []

    def body() -> torch.Tensor:
        y = x @ x
        gc.collect()
        waiting.append(len(pool.doomed))
        return y + torch.rand_like(y)

    leave_garbage()
    graph, out = record(pool, body, "test")
    assert waiting == [1]  # dropped by its owner's death, and not destroyed while the capture was open
    assert not pool.doomed
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    pool.drop(graph)


def test_an_owners_death_lets_go_of_what_is_still_held_and_of_nothing_twice() -> None:
    class Owner:
        pass

    class Graph:
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    held, owner, other = HeldGraphs(), Owner(), Owner()
    owned = owned_by(owner, held.doom)
    owned_by_other = owned_by(other, held.doom)
    graphs = [Graph() for _ in range(4)]
    for graph in graphs[:3]:
        held.add(graph, owned)
    held.add(graphs[3], owned_by_other)
    assert held.doom(graphs[1])
    assert not held.doom(graphs[1])
    held.destroy_doomed()
    del owner
    assert list(held.doomed) == [graphs[0], graphs[2]]
    held.destroy_doomed()
    assert [graph.resets for graph in graphs] == [1, 1, 1, 0]
    assert held
    held.destroy_all()
    del other
    assert not held
    assert not held.doomed
    assert [graph.resets for graph in graphs] == [1, 1, 1, 1]


def test_an_owner_that_dies_while_all_graphs_are_destroyed_is_no_error() -> None:
    class Graph:
        def reset(self) -> None:
            pass

    held, graphs = HeldGraphs(), [Graph(), Graph()]

    class Owned(list[Any]):  # as where the collector of garbage, or another thread, comes in between
        def clear(self) -> None:
            super().clear()
            held._held.clear()
            held._owned.pop(id(graphs[1]), None)

    for graph in graphs:
        held.add(graph, Owned())
    held.destroy_all()
    assert not held
    assert not held._owned
