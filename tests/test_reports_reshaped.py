"""Tensors whose shape or memory a model changes in place: `t_`, `unsqueeze_`, `set_`, `.data = ...`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from aliasing import calls_as_eager
from models import D, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from torch import nn

import sgc_backend
from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, eager_on_graph
from sgc_backend.errors import CaptureError

__all__ = ["only_graphs_of_this_test"]

inners = pytest.mark.parametrize("inner", ["eager", "aot_eager"])


def unsqueezed(x: torch.Tensor) -> Any:
    y = ops.double(x)
    y.unsqueeze_(0)
    return y, y + 1


def transposed_behind_another_cut(x: torch.Tensor) -> Any:
    y = ops.double(x)
    z = y * 2
    y.t_()
    w = ops.double(y)
    y.add_(1)
    return y, w + 1, z


def transposed_and_back(x: torch.Tensor) -> Any:
    y = ops.double(x) + 1
    view = y[1:]
    y.t_()
    w = ops.double(y)
    y.add_(1)
    y.t_()
    z = ops.double(y)
    view.add_(1)
    return y, w + 1, z, view


def of_several_results(x: torch.Tensor) -> Any:
    a, b, c = ops.three(x)
    a.t_()
    b.unsqueeze_(1)
    return a, b, c, a * 2, b * 2, ops.double(a)


def moved_to_other_memory(x: torch.Tensor) -> Any:
    a, b = ops.double(x), ops.double(x + 1)
    h = a + b
    a.set_(b)
    a.add_(1)
    return a + h, b


BODIES = [unsqueezed, transposed_behind_another_cut, transposed_and_back, of_several_results, moved_to_other_memory]


@device
@inners
@pytest.mark.parametrize("rows", [4, D])  # at D the two shapes are one, and strides alone tell
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_a_cuts_result_that_changes_its_shape_in_place(
    body: Callable[..., Any], rows: int, inner: str, device: str
) -> None:
    call = compiled(body, inner=inner, dynamic=False)
    calls_as_eager(call, body, lambda k: (torch.randn(rows, D, device=device),))
    assert total("replayed") == 4


@inners
def test_the_graph_stays_one_for_all_sizes(inner: str) -> None:
    body = transposed_behind_another_cut
    call = compiled(body, inner=inner, dynamic=True, capture_sizes=[8, 16])
    sizes = [5, 8, 16, 16, 8, 7, 3]
    calls_as_eager(call, body, lambda k: (torch.randn(sizes[k], D),), times=len(sizes))
    assert len(graphs()) == 1
    assert total("replayed") == 2


@inners
@pytest.mark.parametrize("pad", ["auto", "trust"])
def test_sizes_that_are_gone_by_the_end_of_the_graph_are_part_of_the_key(pad: str, inner: str) -> None:
    def body(x: torch.Tensor) -> Any:
        y = ops.double(x)
        ops.add_one_(y)
        y.as_strided_((2, D), (D, 1))
        return y + 1, y

    call = compiled(body, inner=inner, dynamic=True, capture_sizes=[4, 8, 16], pad=pad)
    sizes = [5, 8, 8, 16, 16, 7, 8]
    calls_as_eager(call, body, lambda k: (torch.randn(sizes[k], D),), times=len(sizes))
    (graph,) = graphs()
    assert graph.not_padded == "the shape or the memory of y is changed in place"


def test_pieces_that_get_such_a_tensor_are_not_compiled_and_it_is_told_why() -> None:
    call = compiled(unsqueezed, inner="aot_eager", dynamic=False)
    with torch.no_grad():
        call(torch.randn(4, D))
    (graph,) = graphs()
    assert [found.cause for found in graph.uncompiled.values()] == [
        "the shape or the memory of y is changed in place by the graph"
    ]


# -- what the caller or the model owns ---------------------------------------------------------------------------------


class Merging(nn.Module):
    """Exchanges the data of its weight inside forward, as adapters do that are merged on the fly."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.a, self.delta, self.restores = lin(), nn.Parameter(torch.randn(D, D)), restores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.a.weight.data
        self.a.weight.data = plain + self.delta
        y = self.a(ops.double(x))
        if self.restores:
            self.a.weight.data = plain
        return y


@device
@pytest.mark.parametrize("restores", [True, False])
def test_a_weight_whose_data_forward_exchanges(restores: bool, device: str) -> None:
    model = Merging(restores).to(device)
    reference = copy.deepcopy(model)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, D, device=device)
            same(call(x), reference(x))
            same(model.a.weight, reference.a.weight)
    (graph,) = graphs()
    assert list(graph.counters.uncaptured) == [
        "not captured: the shape or the memory of L['self']._modules['a']._parameters['weight'] is changed in place "
        "(.data = or set_)"
    ]


@device
def test_an_argument_whose_data_the_model_exchanges(device: str) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x * 2
        x.data = y
        return ops.double(x) + before

    call = compiled(body, dynamic=False)
    calls_as_eager(call, body, lambda k: (torch.randn(4, D, device=device), torch.randn(4, D, device=device)))


# -- wrappers, whose replays run no Python -----------------------------------------------------------------------------

wrappers = pytest.mark.parametrize("kind", [FullCudaGraphBackend, BreakableCudaGraphBackend], ids=lambda k: k.kind)
marked = eager_on_graph(lambda x: x * 2)


def gives_its_weight_other_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.weight.data = m.weight.data + 1
    return marked(m(x))


def resizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.bias.data.resize_(0)
    m.bias.set_(m.bias.data.new_zeros(D))
    return marked(m(x))


def turns_its_argument(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.t_()
    return marked(m(x))


@wrappers
@pytest.mark.parametrize(
    ("body", "label"), [(gives_its_weight_other_data, "weight"), (resizes, "bias"), (turns_its_argument, "x")]
)
def test_a_callable_that_moves_what_it_reads_is_refused(kind: Any, body: Callable[..., Any], label: str) -> None:
    m, x = lin(), torch.randn(D, D)
    backend = kind(sgc_backend.emulated)
    seen: list[Any] = []

    def forward() -> torch.Tensor:
        seen[:] = [(t.data_ptr(), t.stride()) for t in (m.weight, m.bias, x)]
        return body(m, x)

    with backend.capture_session():
        with pytest.raises(CaptureError, match=rf"key 4: the callable gives {label} other memory or another shape"):
            backend.capture_one(4, forward)
        # Nothing of the refused capture stays: no tensor lies in the pool.
        assert [(t.data_ptr(), t.stride()) for t in (m.weight, m.bias, x)] == seen
        assert not backend.can_run(4)
        backend.capture_one(4, lambda: marked(m(x)))
    with torch.no_grad():
        same(backend.replay(4), m(x) * 2)
    backend.cleanup()


@wrappers
def test_a_callable_that_gives_back_what_it_moved_is_captured(kind: Any) -> None:
    m, x, delta = lin(), torch.randn(4, D), torch.randn(D, D)
    backend = kind(sgc_backend.emulated)

    def forward() -> torch.Tensor:
        plain = m.weight.data
        m.weight.data = plain + delta
        y = marked(m(x))
        m.weight.data = plain
        return y

    with backend.capture_session():
        backend.capture_one(4, forward)
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(4, D))
            delta.copy_(torch.randn(D, D))
            same(backend.replay(4), forward())
    backend.cleanup()
