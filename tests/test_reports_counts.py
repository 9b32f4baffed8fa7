"""What stats(), memory_report() and explain() tell is what happened."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import graphs, only_graphs_of_this_test, total

import sgc_backend
from sgc_backend import (
    BreakableCudaGraphBackend,
    FullCudaGraphBackend,
    OptionError,
    ShapeKey,
    emulated,
    explain,
    memory_report,
    stats,
)
from sgc_backend.pools import pools
from sgc_backend.stats import Counters

__all__ = ["only_graphs_of_this_test"]

EAGER = {"inner": "eager", "capture_sizes": None}


def test_variants_that_read_alike_are_counted_apart() -> None:
    backend, x = FullCudaGraphBackend(emulated), torch.ones(4, 4)
    with backend.capture_session():
        for k, variant in enumerate((1, "1", 1.5, "1.5"), 1):
            backend.capture_one(ShapeKey(4, variant), lambda k=k: x * k)
    for times, variant in enumerate((1, "1", 1.5, "1.5"), 1):
        for _ in range(times):
            backend.replay(ShapeKey(4, variant))
    assert stats()["full"]["replayed"] == {"4/1": 1, "4/'1'": 2, "4/1.5": 3, "4/'1.5'": 4}
    (pool,) = memory_report().pools
    assert [row.recordings for row in pool.owners] == [1, 1, 1, 1]


def test_variants_with_one_repr_lose_no_counts() -> None:
    class Adapter:
        def __repr__(self) -> str:
            return "an adapter"

    backend, x, variants = FullCudaGraphBackend(emulated), torch.ones(4, 4), [Adapter(), Adapter()]
    with backend.capture_session():
        for variant in variants:
            backend.capture_one(ShapeKey(4, variant), lambda: x * 2)
    for variant in variants:
        backend.replay(ShapeKey(4, variant))
    assert stats()["full"]["replayed"] == {"4/an adapter": 2}


def test_numbers_that_differ_in_late_digits_are_counted_apart() -> None:
    compiled = torch.compile(lambda x, a: (x * a).relu(), backend="sgc_piecewise", dynamic=True, options=EAGER)
    numbers = (0.1, 0.1000000001, 0.1000000002)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=False):
        compiled(torch.randn(6, D), 0.5)
        for number in numbers:
            for _ in range(3):
                x = torch.randn(6, D)
                torch.testing.assert_close(compiled(x, number), x.mul(number).relu(), rtol=0, atol=0)
    (counted,) = (stats()[g.name]["captured"] for g in graphs() if len(g.counters.captured) > 1)
    assert {f"[{number}]" for number in numbers} <= {text.rpartition(" ")[2] for text in counted}


def test_the_bytes_of_a_piece_are_those_of_all_layers() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(ops.double(m.a(x)))

    layers = [Model(forward, a=lin(), b=lin()) for _ in range(3)]
    options = {**EAGER, "cut_ops": ["sgc_test::double"]}
    compiled = torch.compile(lambda m, x: m(x), backend="sgc_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        compiled(layers[0], torch.randn(64, D))
        for layer in layers:
            for _ in range(3):
                compiled(layer, torch.randn(4096, D))
    ledger = pools()[0].ledger
    for graph, entry in ledger.items():  # as if each had found no room in what was there
        ledger[graph] = dataclasses.replace(entry, added=512)
    (pool,) = memory_report().pools
    (row,) = pool.owners
    assert row.recordings == 6
    assert row.added == 6 * 512
    assert row.parts == {"piece 0": 3 * 512, "piece 2": 3 * 512}


def test_stats_may_be_read_while_others_count() -> None:
    counters, stop = Counters(), threading.Event()

    def count() -> None:
        for k in range(10**9):
            counters.replayed[(k % 5000,)] += 1
            if k % 5000 == 0:
                counters.replayed.clear()
            if stop.is_set():
                return

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(200):
            counters.as_dict()
    finally:
        stop.set()
        thread.join()


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compile", "forward", "wrapped"])
def test_explain_tells_of_what_is_compiled_in_place(how: str) -> None:
    model = Model(lambda m, x: ops.double(m.a(x)) + 1, a=lin())
    settings: dict[str, Any] = {
        "backend": "sgc_piecewise",
        "options": {**EAGER, "cut_ops": ["sgc_test::double"]},
        "dynamic": True,
    }
    called: Any = model
    if how == "compile":
        model.compile(**settings)
    elif how == "forward":
        model.forward = torch.compile(model.forward, **settings)
    else:
        called = torch.compile(model, **settings)
    found = explain(called, torch.randn(6, D))
    assert "2 pieces, 1 cuts" in str(found)  # and not those of the default options
    with torch.no_grad():
        called(torch.randn(6, D))
    assert total("replayed") == 2  # by what the explanation told of


@pytest.mark.parametrize("wrong", [None, 3, "model", torch.ones(2)])
def test_explain_refuses_what_cannot_be_called(wrong: Any) -> None:
    with pytest.raises(OptionError, match="explain: fn must be a model or function, got"):
        sgc_backend.explain(wrong, torch.ones(2))


def test_a_warning_of_a_capture_without_breaks_names_the_line_that_captured() -> None:
    backend, x = BreakableCudaGraphBackend(emulated), torch.ones(4, 4)
    with backend.capture_session(), pytest.warns(UserWarning, match="broke nowhere") as warned:
        backend.capture_one(4, lambda: x * 2)
    assert warned[0].filename == __file__
