"""How long plans are kept: a bounded number of address sets a key, and no longer than their model."""

from __future__ import annotations

import gc

import torch
from models import D, Model, lin
from test_backend import compiled, graphs, only_graphs_of_this_test, same
from test_by_address import Layer, plans, square

import sgc_backend
from sgc_backend.kept_plans import ADDRESS_SETS

__all__ = ["only_graphs_of_this_test"]


def test_a_model_that_dies_takes_its_recordings_along() -> None:
    pool = sgc_backend.pools.pool_of(sgc_backend.devices.device_of(sgc_backend.emulated))
    empty = pool.reserved_bytes()
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            call(torch.randn(8192, D))
    assert pool.reserved_bytes() > empty
    del model, call
    gc.collect()
    assert not [g for g in graphs() if g.plans]
    assert pool.reserved_bytes() <= empty


def test_plans_of_layers_that_all_live_are_bounded() -> None:
    layers = [Layer(square("cpu"), square("cpu")) for _ in range(ADDRESS_SETS + 3)]
    one = compiled(lambda layer, x: layer(x), dynamic=False)
    x = torch.randn(3, D)
    with torch.no_grad():
        for layer in (*layers, layers[0]):
            same(one(layer, x), layer(x))
    assert len(plans()) == ADDRESS_SETS
