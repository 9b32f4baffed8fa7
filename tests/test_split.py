"""Splitting: which nodes make a group, what crosses between groups, and that running them is running the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_facts import fake
from test_walk import Walked, rows, same, walked
from torch import fx

import sgc_backend
from sgc_backend.capturable import Reason, why_not_capturable
from sgc_backend.facts import gather_facts
from sgc_backend.groups import HostRef, Ref, Split
from sgc_backend.marks import Marks
from sgc_backend.split import NotSplittableError, split_graph
from sgc_backend.symbols import Symbols
from sgc_backend.walk import Walk

relu = torch.relu  # the op that is cut here


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGC_DEVICE", "emulated")
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    sgc_backend.reset()


def names_in(graph: Walked) -> list[str]:
    return [name for group in graph.split.groups for name in group.nodes]


def crossing(graph: Walked) -> set[str]:
    """Values that leave a group and enter another."""
    made = {name for g in graph.split.groups for name in g.outputs}
    return {r.name for g in graph.split.groups for r in g.inputs if isinstance(r, Ref)} & made


# -- which groups ------------------------------------------------------------------------------------------------------


LAYOUTS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "no cut": ("P", lambda x: (x * 2).sin() + 1),
    "first": ("CP", lambda x: relu(x) + 1),
    "last": ("PC", lambda x: relu(x * 2)),
    "only": ("C", relu),
    "in the middle": ("PCP", lambda x: relu(x * 2) + 1),
    "adjacent": ("PCP", lambda x: relu(relu(relu(x * 2))) + 1),
    "only, repeated": ("C", lambda x: relu(relu(x))),
    "repeated": ("PCPCP", lambda x: relu(relu(x * 2) + 1) + 1),
    "side by side": ("PCP", lambda x: _side_by_side(x)),
    "views between cuts": ("PCP", lambda x: relu(relu(x * 2).t()[1:].unsqueeze(0)) + 1),
    "views in front of a cut": ("CP", lambda x: relu(x.t()) + 1),
    "views behind a cut": ("PC", lambda x: relu(x * 2).t()[1:]),
    "views before a piece": ("CP", lambda x: relu(x).t()[1:] + 1),
    "views alone": ("V", lambda x: x.t()[1:]),
    "sizes between cuts": ("CP", lambda x: relu(relu(x)[: x.shape[0] // 2]) + 1),
}


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return relu(y) + relu(y.t()).t()


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_groups_of_a_graph(case: str) -> None:
    layout, fn = LAYOUTS[case]
    graph = walked(fn, *rows(6, 9, 14))
    assert graph.layout == layout


def test_a_graph_of_sizes_alone_has_no_piece() -> None:
    def look(x: torch.Tensor) -> Any:
        return x.shape[0] * 2, x.view(-1)

    graph = walked(look, *rows(6, 3))
    assert graph.split.pieces == ()


def test_every_node_is_in_one_group_and_in_order() -> None:
    graph = walked(lambda x: relu(relu(x * 2) + 1).chunk(2, -1)[1] * x.shape[0], *rows(6))
    names = names_in(graph)
    calls = [n.name for n in graph.gm.graph.nodes if n.op.startswith("call")]
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=calls.index)


def test_a_group_is_numbered_and_frozen_and_lints() -> None:
    graph = walked(lambda x: relu(relu(x * 2) + 1) + 1, *rows(6))
    assert [g.index for g in graph.split.groups] == list(range(5))
    for group in graph.split.groups:
        group.gm.graph.lint()
        assert len(group.fakes) == len(group.inputs)
        assert len([n for n in group.gm.graph.nodes if n.op == "placeholder"]) == len(group.inputs)
        with pytest.raises(AttributeError):
            group.kind = "other"  # type: ignore[misc]


def test_kernels_count_what_launches() -> None:
    graph = walked(lambda x: relu((x * 2).t().sin()[1:]) + 1, *rows(6))
    assert [g.kernels for g in graph.split.groups] == [2, 1, 1]


def test_a_cut_has_its_reason_and_the_users_line() -> None:
    graph = walked(lambda x: relu(x * 2) + 1, *rows(6))
    (cut,) = graph.split.cuts[0].cuts
    assert cut.reason == Reason("cut_ops", "relu is in cut_ops")
    assert cut.name == "relu"
    assert "test_split.py:" in cut.source and "relu(x * 2) + 1" in cut.source


def test_the_original_graph_is_left_as_it_was() -> None:
    before: list[str] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        before.append(str(gm.graph))
        Walked(gm, [relu])
        before.append(str(gm.graph))
        return gm.forward

    with torch.no_grad():
        torch.compile(lambda x: relu(x * 2).chunk(2)[0] + 1, backend=backend)(torch.ones(4, 4))
    assert before[0] == before[1]


# -- what crosses ------------------------------------------------------------------------------------------------------


def _two_later(x: torch.Tensor) -> Any:
    values, indices = torch.topk(x * 2, 2)
    y = relu(values + 1)
    z = relu(y + 2)
    return z + indices


def _chunk_later(x: torch.Tensor) -> Any:
    first, second = (x * 2).chunk(2, -1)
    y = relu(first)
    return relu(y + 1) + second


def _list_of_cut(x: torch.Tensor) -> Any:
    parts = relu(x * 2).split([1, 3], -1)
    return parts[1] + 1, parts[0], parts


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tuple's parts used in the next piece": lambda x: [t * 2 for t in torch.topk(x + 1, 2)],
    "a tuple's parts used two pieces later": _two_later,
    "a tuple's parts returned": lambda x: torch.topk(x + 1, 2),
    "a tuple's part not used": lambda x: torch.topk(x + 1, 2)[0] * 2,
    "a tuple not used": lambda x: (torch.topk(x + 1, 2), x * 2)[1],
    "a named tuple picked by name": lambda x: torch.topk(x + 1, 2).indices * 2,
    "a chunk picked later": _chunk_later,
    "a list returned": lambda x: relu(x * 2).split(2, -1),
    "a list of a cut": _list_of_cut,
    "parts of a split, each cut": lambda x: [relu(t) + 1 for t in (x * 2).unbind(-1)],
    "a size": lambda x: relu(x * 2) * x.shape[0],
    "a whole shape": lambda x: relu(x * 2).reshape(x.shape).expand(2, *x.shape) + 1,
    "a shape reversed": lambda x: relu(x * 2).reshape(x.shape[::-1]) + 1,
    "a slice of a size": lambda x: relu(x * 2)[: x.shape[0] // 2] + x[: x.shape[0] // 2],
    "a slice with a size and a step": lambda x: relu(x * 2)[x.shape[0] // 3 : x.shape[0] - 1 : 2] + 1,
    "an index by a size": lambda x: relu(x * 2)[x.shape[0] // 2] + 1,
    "a derived size": lambda x: torch.full((x.shape[0] * 2 + 1,), 1.5) + relu(x * 2).sum(),
    "sizes of what a cut made": lambda x: relu(x[1:]).sum() * relu(x[1:]).shape[0],
    "strides and an offset": lambda x: relu(x).as_strided(x.size(), x.stride()) * 2,
    "a size as a float": lambda x: relu(x * 2) * (x.shape[0] ** -0.5) * math.sqrt(x.shape[1]),
    "numbers returned": lambda x: (relu(x * 2), x.shape[0], x.shape, x.shape[0] // 2),
    "a constant": lambda x: relu(torch.tensor([1.0, 2.0, 3.0, 4.0]) * x) + torch.tensor(2.0),
    "an input returned": lambda x: (relu(x * 2), x),
    "an output twice": lambda x: (lambda y: (y, y, y + 1))(relu(x * 2)),
    "nested outputs": lambda x: {"a": [relu(x * 2), (x + 1, None)], "b": x.shape[0], "c": "text"},
    "a view of an input": lambda x: (relu(x * 2), x[1:], x.t()),
    "views of one output": lambda x: (lambda y: (y[1:], y.t(), y))(x * 2),
    "a view of what a cut made": lambda x: (lambda y: (y[1:], relu(y.t()), y))(relu(x * 2)),
    "none": lambda x: (None, relu(x * 2)),
    "random numbers in order": lambda x: F.dropout(torch.rand_like(x) + relu(torch.randn(4)) + torch.rand(4), 0.5),
    "two dynamic sizes": lambda x: (x @ relu(x).t())[: x.shape[0] - 1] * 2,
    "a cut without a tensor argument": lambda x: torch.zeros(x.shape[0], 4) + relu(torch.ones(x.shape[0], 4)) + x,
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_running_the_groups_is_running_the_graph(case: str) -> None:
    cut = ["aten::topk", "aten::relu"] if "tuple" in case else [relu]
    walked(PROGRAMS[case], *rows(6, 9, 14, 6), cut=cut)


def test_tensors_cross_and_not_the_tuples_that_hold_them() -> None:
    graph = walked(_two_later, *rows(6), cut=["aten::topk", relu])
    assert "topk" not in crossing(graph)
    for group in graph.split.groups:
        assert not any(isinstance(value, (tuple, list)) for value in group.fakes)


def test_a_part_that_nobody_uses_does_not_cross() -> None:
    graph = walked(PROGRAMS["a tuple's part not used"], *rows(6), cut=["aten::topk"])
    (cut,) = graph.split.cuts
    assert len(cut.outputs) == 1


def test_sizes_never_cross() -> None:
    graph = walked(PROGRAMS["a slice with a size and a step"], *rows(6, 9))
    for group in graph.split.groups:
        for ref, value in zip(group.inputs, group.fakes, strict=True):
            assert isinstance(ref, HostRef) == (not isinstance(value, torch.Tensor))
    assert any(isinstance(ref, HostRef) for g in graph.split.groups for ref in g.inputs)


def test_a_size_that_depends_on_data_does_cross() -> None:
    def fn(x: torch.Tensor) -> Any:
        kept = torch.nonzero(x[:, 0] > 0)[:, 0]
        return x[kept].sum(0) * 2, kept.shape[0] + x.shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        walked(fn, *rows(6, 3, 9))


def test_a_group_takes_each_input_once() -> None:
    graph = walked(lambda x: relu(x * 2) * x.shape[0] + x.shape[0] + x + x, *rows(6))
    for group in graph.split.groups:
        assert len(set(group.inputs)) == len(group.inputs)


def test_outputs_keep_their_nesting_only_where_they_are_nested() -> None:
    flat = walked(lambda x: (relu(x * 2), x + 1), *rows(6))
    assert flat.split.spec is None


def test_a_float_that_crosses_is_bitwise_the_same() -> None:
    # Computed in another order than the graph's, its last bits differ; see the floats of test_symbols.py.
    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        factor = scale * 0.3 * 0.7
        y = relu(x * factor)
        return y + factor

    calls = [(torch.randn(4, 3, dtype=torch.float64), scale) for scale in (0.0725, 0.26, 0.385, 0.5725)]
    walked(fn, *calls)


def test_a_zero_that_crosses_stays_a_float() -> None:
    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        factor = scale * 2.0
        y = relu(x * factor)
        return torch.full((2,), factor) + y.sum().to(torch.int32)

    walked(fn, (torch.ones(3), 0.25), (torch.ones(3), 0.0))


# -- by hand -----------------------------------------------------------------------------------------------------------


def cut_at(gm: fx.GraphModule, *names: str) -> Split:
    reason = Reason("cut_ops", "by hand")
    return split_graph(gm, gather_facts(gm, "cpu"), lambda node: reason if node.name in names else None)


def run(gm: fx.GraphModule, split: Split, *args: Any) -> list[Any]:
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    return Walk(split, [g.gm.forward for g in split.groups], Symbols(gm), names).run(args)


def module_with(**attributes: Any) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return root


def test_a_constant_of_the_module_is_taken_along_by_each_group() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    c = graph.get_attr("c")
    a = graph.call_function(operator.mul, (x, c))
    b = graph.call_function(torch.relu, (a,))
    d = graph.call_function(operator.add, (b, c))
    graph.output((d,))
    for node in (x, a, b, d):
        node.meta["example_value"] = fake(3, device="cpu")
    gm = fx.GraphModule(module_with(c=torch.tensor([1.0, 2.0, 3.0])), graph)
    split = cut_at(gm, "relu")
    assert [g.kind for g in split.groups] == ["piece", "cut", "piece"]
    value = torch.tensor([-1.0, 0.5, 2.0])
    same([gm(value)[0]], run(gm, split, value))


def test_a_constant_that_is_returned_as_it_is() -> None:
    # No group makes a constant, and no input brings it.
    graph = fx.Graph()
    x = graph.placeholder("x")
    c = graph.get_attr("c")
    a = graph.call_function(torch.relu, (x,))
    graph.output((a, c))
    for node in (x, a):
        node.meta["example_value"] = fake(3, device="cpu")
    gm = fx.GraphModule(module_with(c=torch.ones(3)), graph)
    assert run(gm, cut_at(gm, "relu"), torch.ones(3))[1] is gm.c


def test_a_tuple_that_is_used_whole_crosses_leaf_by_leaf() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_method("chunk", (x, 2))
    joined = graph.call_function(torch.cat, (parts,))
    graph.output((joined,))
    x.meta["example_value"] = joined.meta["example_value"] = fake(4, device="cpu")
    parts.meta["example_value"] = (fake(2, device="cpu"), fake(2, device="cpu"))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    split = cut_at(gm, "chunk")
    assert split.groups[0].outputs == ("chunk__0", "chunk__1")
    value = torch.randn(4)
    same(list(gm(value)), run(gm, split, value))


def test_a_module_call_keeps_the_graph_whole() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_module("layer", (x,))
    graph.output((node,))
    x.meta["example_value"] = node.meta["example_value"] = fake(3, device="cpu")
    gm = fx.GraphModule(module_with(layer=torch.nn.ReLU()), graph)
    with pytest.raises(NotSplittableError, match="layer"):
        cut_at(gm)


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.vmap(torch.sin)(x),
        lambda x: torch.func.grad(lambda a: (a**2).sum())(x),
    ],
    ids=["vmap", "grad"],
)
def test_a_transform_of_torch_func_keeps_the_graph_whole(transform: Callable[[torch.Tensor], Any]) -> None:
    refused: list[str] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        facts = gather_facts(gm, "cpu")
        with pytest.raises(NotSplittableError, match=r"torch\.func") as caught:
            split_graph(gm, facts, lambda node: why_not_capturable(node, facts, Marks()))
        refused.append(str(caught.value))
        return gm.forward

    x = torch.randn(3, 4)
    with torch.no_grad():
        same([transform(x)], [torch.compile(transform, backend=backend)(x)])
    assert len(refused) == 1


def test_memory_that_nothing_has_been_written_to_is_known() -> None:
    def fn(x: torch.Tensor) -> Any:
        blank, half, filled = torch.empty_like(x), x.new_empty(x.shape), torch.empty(x.shape)
        half[:, :2] = 0
        filled.fill_(1)
        view = blank.view(-1)
        y = relu(x * 2)
        blank.copy_(y)
        return blank + 1, half[:, :2] + 0, filled + 0, view

    graph = walked(fn, *rows(6, 9), cut=[relu])
    first = graph.split.pieces[0]
    assert {n for n in first.nodes if n in graph.split.uninitialised} == {"blank", "view"}
    assert not {n for g in graph.split.groups[1:] for n in g.nodes} & graph.split.uninitialised
