"""The process's pools: what the accessors give, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_pool import device, module

import sgc_backend
from sgc_backend import emulated
from sgc_backend.errors import OptionError


@device
def test_the_accessor_gives_one_handle_and_one_stream(device: str) -> None:
    handle = sgc_backend.get_or_create_global_graph_memory_pool(module(device))
    assert handle is not None
    assert sgc_backend.get_or_create_global_graph_memory_pool(module(device)) == handle
    stream = sgc_backend.get_or_create_global_capture_stream(module(device))
    assert sgc_backend.get_or_create_global_capture_stream(module(device)) is stream


def test_threads_that_race_for_the_pool_get_the_same_one() -> None:
    seen = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        seen.append(sgc_backend.get_or_create_global_graph_memory_pool(emulated))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1


@pytest.mark.parametrize("wrong", [None, "cuda", torch, 7])
def test_what_is_no_device_module_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(OptionError, match="graph_pool_handle"):
        sgc_backend.get_or_create_global_graph_memory_pool(wrong)


@device
def test_the_generation_of_static_outputs_changes_with_every_replay_and_capture_and_never_comes_again(
    device: str,
) -> None:
    where = module(device)
    full = sgc_backend.FullCudaGraphBackend(where)
    x = torch.ones(4, device=device)
    seen = [sgc_backend.static_output_generation(where)]
    with full.capture_session():
        full.capture_one(4, lambda: x * 2)
        seen.append(sgc_backend.static_output_generation(where))
        full.capture_one(2, lambda: x[:2] * 2)
    for key in (4, 4, 2):
        seen.append(sgc_backend.static_output_generation(where))
        out = full.replay(key)
        assert sgc_backend.static_output_generation(where) != seen[-1]
    current = sgc_backend.static_output_generation(where)
    out.clone()
    x.add_(1)
    assert sgc_backend.static_output_generation(where) == current
    sgc_backend.static_output_generation(where, lane="other")
    full.cleanup()
    sgc_backend.reset()
    seen += [current, sgc_backend.static_output_generation(where)]
    assert len(set(seen)) == len(seen)
