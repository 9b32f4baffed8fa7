"""What warm-ups leave behind for the recordings to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import D, Model, lin
from test_backend import compiled, graphs, only_graphs_of_this_test
from torch.overrides import TorchFunctionMode

from sgc_backend.devices import device_of

__all__ = ["only_graphs_of_this_test"]


def test_keys_seen_once_do_not_grow_the_bookkeeping() -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    call = compiled(model, max_recordings=1)
    with torch.no_grad():
        for n in range(2, 400):
            call(torch.randn(n, D))
    (graph,) = graphs()
    assert len(graph._warm_ups.observed) <= 300


class Watched(TorchFunctionMode):
    """Collects whose memory is kept for another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "record_stream":
            self.kept.append(args[0])
        return func(*args, **(kwargs or {}))


# torch's record_stream of such a view writes behind the end of a list (seen with 2.11), and the heap is broken.
@pytest.mark.gpu
@pytest.mark.parametrize("view", ["neg", "conj"])
def test_memory_of_a_view_read_with_another_sign_is_kept_without_the_sign(view: str) -> None:
    device = device_of(torch.cuda)
    value = torch.randn(4, dtype=torch.complex64, device="cuda").conj()
    tensor = value if view == "conj" else value.imag
    assert tensor.is_conj() or tensor.is_neg()
    with Watched() as watched:
        device.keep_for(tensor, torch.cuda.Stream())
    (kept,) = watched.kept
    assert not kept.is_neg() and not kept.is_conj()
    assert kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
