"""What warm-ups leave behind for the recordings to come."""

from __future__ import annotations

import torch
from models import D, Model, lin
from test_backend import compiled, graphs, only_graphs_of_this_test

__all__ = ["only_graphs_of_this_test"]


def test_keys_seen_once_do_not_grow_the_bookkeeping() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, max_recordings=1)
    with torch.no_grad():
        for n in range(2, 400):
            call(torch.randn(n, D))
    (graph,) = graphs()
    assert len(graph._warm_ups.observed) <= 300
