"""explain and stats say what happened, in the user's terms."""

from __future__ import annotations

import json

import pytest
import torch
from models import CUTS, D, Model, lin, ops

import sgc_backend


def test_explain_names_pieces_cuts_reasons_lines_inputs_and_recordings() -> None:
    def fn(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        m.cache[:2] = h[:2]
        h = ops.double(h)  # the line that is cut
        return m.b(h)

    model = Model(fn, a=lin(), b=lin())
    options = {"inner": "eager", "cut_ops": CUTS, "capture_sizes": None}
    compiled = torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    explanation = sgc_backend.explain(compiled, torch.randn(4, D))
    text = str(explanation)
    assert "1 Dynamo graph, 0 kinds of graph break" in text
    assert "2 pieces, 1 cuts" in text
    assert "sgc_test.double is in cut_ops" in text
    assert "test_report.py" in text and "h = ops.double(h)" in text
    assert "(written)" in text
    assert "static inputs: 5" in text
    assert "staged inputs: 1" in text
    assert "recordings: 4 (1)" in text
    assert len(explanation.graphs) == 1


def test_explain_compiles_what_is_not_compiled_and_counts_graph_breaks() -> None:
    def fn(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = m.a(x)
        torch._dynamo.graph_break()
        return m.b(h)

    explanation = sgc_backend.explain(Model(fn, a=lin(), b=lin()), torch.randn(4, D))
    assert len(explanation.graphs) == 2
    assert len(explanation.breaks) == 1
    assert "2 Dynamo graphs, 1 kind of graph break" in str(explanation)


def test_explain_says_why_a_graph_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGC_DEVICE")
    options = {"inner": "eager"}
    compiled = torch.compile(lin(), backend=sgc_backend.sgc_piecewise, options=options)
    assert "whole, uncaptured: no graphs on device type cpu" in str(sgc_backend.explain(compiled, torch.randn(4, D)))


def test_stats_are_plain_data() -> None:
    backend = sgc_backend.FullCudaGraphBackend(name="decode")
    x = torch.ones(2)
    with backend.capture_session():
        backend.capture_one(2, lambda: x + 1)
    backend.replay(2)
    found = json.loads(json.dumps(sgc_backend.stats()))["decode"]
    assert found == {
        "replayed": {"2": 1},
        "captured": {"2": 1},
        "uncaptured": {},
        "failures": {},
        "uncompiled": {},
        "evicted": {},
    }


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((), "fixed"),
        ((16,), "16"),
        ((2, 8), "2 x 8"),
        ((4, (0.5).hex()), "4 [0.5]"),
        ((4, *(n.hex() for n in (1.0, 2.0, 3.0, 4.0))), "4 [1, 2, 3, 4]"),
        ((4, (0.1).hex()), "4 [0.1]"),
        ((4, (0.1000000001).hex()), "4 [0.1000000001]"),
        ((4, (-0.0).hex(), (1e-30).hex(), float("nan").hex()), "4 [-0, 1e-30, nan]"),
    ],
)
def test_keys_read_as_sizes_with_numbers_behind(key: tuple[object, ...], text: str) -> None:
    assert sgc_backend.report.key_text(key) == text
