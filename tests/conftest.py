"""Every test runs on the emulated device unless it is marked gpu, and leaves no recording and no pool behind."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import sgc_backend
from sgc_backend.pools import pools
from sgc_backend.recorders import recorders


def freeze_modules(known: list[int] = []) -> None:  # noqa: B006  # how many there were is to be remembered
    # What is imported lives to the end; walking it in the collection behind every test takes 0.2 s each time.
    if known != [len(sys.modules)]:
        known[:] = [len(sys.modules)]
        gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.collect()
    freeze_modules()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_slate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("SGC_DEVICE", "emulated")
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    sgc_backend.reset()
    gc.collect()
    leaked = [r.name for r in recorders() if holds_recordings(r)]
    assert not leaked, f"recordings outlived the test: {leaked}"
    assert not pools(), "a pool outlived the test"
    freeze_modules()


def holds_recordings(recorder: object) -> bool:
    """Whether a compiled graph or a wrapper still holds a recording."""
    return bool(getattr(recorder, "plans", None) or getattr(recorder, "_recordings", None))
