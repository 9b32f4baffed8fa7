"""Regions that Dynamo calls as one operator are taken apart, so that a cut may lie inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from torch import fx, nn
from torch._guards import detect_fake_mode

from sgc_backend.forms import storage_id
from sgc_backend.interpret import example
from sgc_backend.marks import Marks
from sgc_backend.regions import inline_regions

__all__ = ["only_graphs_of_this_test"]

region = torch.compiler.nested_compile_region


class Layer(nn.Module):
    """A layer with a cut in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = lin(), lin()
        self.register_buffer("seen", torch.zeros(D))

    @region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = ops.double(F.silu(self.up(x)))
        return x + self.down(h)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + 1)


def cuts() -> list[str]:
    (graph,) = graphs()
    return [group.target for group in graph.split.cuts]


def run_all(model: nn.Module, device: str, sizes: tuple[int, ...] = (4, 12, 4, 12, 12, 4), **options: Any) -> None:
    """Call a model of one argument [n, D] at these sizes, and compare with eager."""
    model = model.to(device)
    call = compiled(model, dynamic=None, **options)
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(n, D, device=device)
            torch._dynamo.mark_dynamic(x, 0)
            same(call(x), model(x))
    assert not any(graph.counters.failures for graph in graphs())


@device
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_cut_in_a_marked_layer_leaves_the_rest_captured(inner: str, device: str) -> None:
    run_all(Deep(5), device, inner=inner)
    (graph,) = graphs()
    assert len(graph.split.pieces) == 6 and len(graph.split.cuts) == 5
    assert total("replayed") >= 2


def test_more_marked_layers_take_no_more_programs() -> None:
    counts = []
    for layers in (4, 12):
        run_all(Deep(layers), "cpu", inner="aot_eager", sizes=(4,))
        (graph,) = graphs()
        counts.append(len(graph.layout.programs))
        torch._dynamo.reset()
        graph.release()
        del graph
    assert counts[0] == counts[1]


def test_regions_in_regions_are_taken_apart_as_well() -> None:
    @region
    def inner(x: torch.Tensor) -> torch.Tensor:
        return ops.double(x.sin()) + 1

    @region
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x * 2) + inner(x * 2)

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outer(outer(x).cos())

    run_all(Nested(), "cpu", inner="eager")
    (graph,) = graphs()
    assert len(graph.split.cuts) == 4
    assert total("replayed") >= 2


def test_a_cut_in_a_checkpoint_leaves_the_rest_captured() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        body = lambda h: ops.double(m.a(h)).relu()  # noqa: E731
        return torch.utils.checkpoint.checkpoint(body, x + 1, use_reentrant=False) * 2

    run_all(Model(fn, a=lin()), "cpu", inner="eager")
    (graph,) = graphs()
    assert len(graph.split.cuts) == 1 and len(graph.split.pieces) == 2
    assert total("replayed") >= 2


@pytest.mark.parametrize("where", ["around", "inside", "around_checkpoint"])
def test_a_cut_in_a_region_under_autocast_leaves_the_rest_captured(where: str) -> None:
    def cast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = lin(), lin()

        @region
        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return ops.double(self.a(x)).float()

        @region
        def switching(self, x: torch.Tensor) -> torch.Tensor:
            with cast():
                y = ops.double(self.a(x))
            return self.b(y.float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "inside":
                return self.switching(self.switching(x))
            with cast():
                if where == "around":
                    return self.plain(self.plain(x)) * 2
                body = lambda h: ops.double(self.a(h)).float()  # noqa: E731
                return self.b(torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))

    run_all(Under(), "cpu", inner="eager")
    (graph,) = graphs()
    assert len(graph.split.cuts) == (1 if where == "around_checkpoint" else 2)
    assert {cut.reason.rule for group in graph.split.cuts for cut in group.cuts} == {"cut_ops"}
    assert total("replayed") >= 2


def test_a_region_that_was_traced_without_autocast_stays_whole_under_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = lin()

        @region
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).relu()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one = self.body(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                two = self.body(x).float()
            return one, two

    run_all(Twice(), "cpu", inner="eager")
    assert total("replayed") >= 2


@device
def test_a_cache_that_a_region_writes_to_is_written(device: str) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(64, D))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return self.body(x, at, self.cache)

        @region
        def body(self, x: torch.Tensor, at: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(0, at, x.sin())
            return ops.double(cache[at]) + x

    model, other = Cached().to(device), Cached().to(device)
    call = compiled(model, inner="eager", dynamic=None)
    with torch.no_grad():
        for n in (4, 12, 4, 12, 4):
            x, at = torch.randn(n, D, device=device), torch.randperm(64, device=device)[:n]
            for tensor in (x, at):
                torch._dynamo.mark_dynamic(tensor, 0)
            same(call(x, at), other(x, at))
            same(model.cache, other.cache)


def test_caches_that_are_parts_of_one_tensor_leave_regions_alike() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 64, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in range(3):
                x = self.body(x, self.cache[layer])
            return x

        @region
        def body(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache[: x.shape[0]].copy_(x.sin())
            return ops.double(x) + cache.sum(0)

    model = Layers()
    other = copy.deepcopy(model)
    call = compiled(model, inner="eager", dynamic=None)
    with torch.no_grad():
        for n in (4, 12, 4, 12, 4):
            x = torch.randn(n, D)
            torch._dynamo.mark_dynamic(x, 0)
            same(call(x), other(x))
            same(model.cache, other.cache)
    (graph,) = graphs()
    assert [cut.reason.rule for group in graph.split.cuts for cut in group.cuts] == ["cut_ops"] * 3
    assert not any("subgraph" in name for name in names(graph.layout.gm))
    assert total("replayed") >= 2


def test_a_region_that_the_user_names_stays_whole() -> None:
    run_all(Deep(2), "cpu", inner="eager", cut_ops=[torch._higher_order_ops.invoke_subgraph])
    (graph,) = graphs()
    assert {cut.reason.rule for group in graph.split.cuts for cut in group.cuts} == {"cut_ops"}
    assert len(graph.split.pieces) <= 1


@device
def test_a_region_that_the_user_wants_captured_is_captured_whole(device: str) -> None:
    run_all(Deep(2), device, inner="eager", cut_ops=[], capturable_ops=[torch._higher_order_ops.invoke_subgraph])
    (graph,) = graphs()
    assert len(graph.split.pieces) == 1 and not graph.split.cuts
    assert total("replayed") >= 2


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_a_region_in_a_region_that_stays_whole_writes_is_written(inner: str) -> None:
    @region
    def write(x: torch.Tensor, at: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[at] = x
        return ops.double(x) + cache[at]

    @region
    def both(x: torch.Tensor, at: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return write(write(x, at, one), at, two)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(64, D))
            self.register_buffer("layers", torch.zeros(2, 64, D))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            one, two = self.layers[0], self.layers[1]
            return both(both(x, at, self.cache, one), at, one, two)

    model, other = Layers(), Layers()
    call = compiled(model, inner=inner, dynamic=None, capturable_ops=[torch._higher_order_ops.invoke_subgraph])
    with torch.no_grad():
        for n in (4, 12, 4, 12, 4):
            x, at = torch.randn(n, D), torch.randperm(64)[:n]
            for tensor in (x, at):
                torch._dynamo.mark_dynamic(tensor, 0)
            torch.testing.assert_close(call(x, at), other(x, at))
            torch.testing.assert_close(model.layers, other.layers)
            torch.testing.assert_close(model.cache, other.cache)
    (graph,) = graphs()
    assert [cut.reason.rule for group in graph.split.cuts for cut in group.cuts] == ["cut_ops"] * 2


def test_a_region_with_sizes_that_depend_on_data_is_right() -> None:
    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1

    class Found(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(x[x > 0]).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run_all(Found(), "cpu", inner="eager")


def test_gradients_of_a_region_are_right() -> None:
    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    class Once(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(x + 1)

    model = Once()
    call = compiled(model, inner="aot_eager", dynamic=None)  # torch runs no region eagerly where gradients are wanted
    x = torch.randn(4, D, requires_grad=True)
    with pytest.warns(UserWarning, match="captures inference only"):
        call(x).sum().backward()
    got, x.grad = x.grad, None
    model(x).sum().backward()
    same(got, x.grad)


def test_gradients_that_a_body_turns_on_are_seen() -> None:
    class On(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = lin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def body(h: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    return self.a(h)

            return torch.utils.checkpoint.checkpoint(body, x + 1, use_reentrant=False)

    model = On()
    call = compiled(model, inner="eager")
    with torch.no_grad():
        with pytest.warns(UserWarning, match="captures inference only"):
            call(torch.randn(4, D))
        for _ in range(3):
            x = torch.randn(4, D)
            same(call(x), model(x))
            assert call(x).requires_grad and model(x).requires_grad


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_body_that_changes_the_form_of_its_argument_is_right(inner: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x) + 1
        z = torch.utils.checkpoint.checkpoint(lambda h: (h.t_(), h * 2)[1], y, use_reentrant=False)
        return z, y

    run_all(Model(fn, a=lin()), "cpu", inner=inner)
    (graph,) = graphs()
    assert "t_ in the body of a region" in graph.cause


def test_a_body_that_changes_the_form_of_its_own_values_is_taken_apart() -> None:
    def fn(m: Any, x: torch.Tensor) -> Any:
        body = lambda h: ops.double((h * 2).unsqueeze_(0).squeeze_(0))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(body, m.a(x), use_reentrant=False) + 1

    run_all(Model(fn, a=lin()), "cpu", inner="eager")
    (graph,) = graphs()
    assert len(graph.split.pieces) == 2
    assert total("replayed") >= 2


# -- the graph ---------------------------------------------------------------------------------------------------------


def taken_apart(fn: Callable[..., Any], *args: torch.Tensor, marks: Marks | None = None) -> fx.GraphModule:
    """Dynamo's graph of ``fn``, its regions taken apart."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        inline_regions(gm, marks or Marks())
        gm.graph.lint()
        found.append(gm)
        return gm.forward

    for tensor in args:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        same(torch.compile(fn, backend=backend, fullgraph=True)(*args), fn(*args))
    return found[0]


def names(gm: fx.GraphModule) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def test_values_of_two_calls_lie_in_memory_of_their_own_and_views_in_what_they_are_of() -> None:
    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).view(-1) * x.view(-1)

    gm = taken_apart(lambda x, y: (body(x), body(y)), torch.ones(4, 3), torch.ones(4, 3))
    memory: dict[Any, list[str]] = {}
    for node in gm.graph.nodes:
        if isinstance(example(node), torch.Tensor):
            memory.setdefault(storage_id(example(node)), []).append(str(node.target).split()[-1].rstrip(">"))
    assert sorted(map(len, memory.values())) == [1, 1, 2, 2, 2, 2], memory
    assert detect_fake_mode([example(n) for n in gm.graph.nodes]) is not None


def test_a_result_that_is_an_argument_is_that_argument() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y * 2, x

    def fn(x: torch.Tensor) -> torch.Tensor:
        doubled, same = torch.utils.checkpoint.checkpoint(body, x + 1, x, use_reentrant=False)
        return same.sin() + doubled

    assert names(taken_apart(fn, torch.ones(4, 3)))[-2:] == ["sin", "add"]


def test_constants_of_a_body_come_along() -> None:
    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)

    gm = taken_apart(lambda x: body(body(x)), torch.ones(4, 3))
    assert not any("subgraph" in name for name in names(gm))


def test_a_graph_without_regions_is_left_as_it_is() -> None:
    gm = taken_apart(lambda x: x.sin() + x.shape[0], torch.ones(4, 3))
    assert "sin" in names(gm)
