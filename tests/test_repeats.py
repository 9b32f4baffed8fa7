"""Nodes like an earlier one: what was found of that one is what running them would find."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prefix_cases import CASES, Case
from prefix_oracle import N, program
from test_facts import fake, hand_graph, ones, seen_by_backend
from torch import fx, nn

from sgc_backend import facts as facts_file
from sgc_backend import prefix as prefix_file
from sgc_backend.facts import GraphFacts, gather_facts, is_wrapped_number
from sgc_backend.forms import tensor_form
from sgc_backend.interpret import example
from sgc_backend.interpreter import Interpreter, interpreted


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


Make = Callable[[bool], Interpreter[Any]]


def facts_walk(gm: fx.GraphModule, device: str = "cpu") -> Make:
    numbers = {n.name for n in gm.graph.nodes if is_wrapped_number(n)}
    return lambda repeats: facts_file._Walker(gm, GraphFacts({}, device, numbers), repeats=repeats)


def prefix_walk(gm: fx.GraphModule, padded: Any, cut: Callable[[fx.Node], bool] = lambda node: False) -> Make:
    return lambda repeats: prefix_file._Judge(gm, padded, cut, repeats=repeats)


def found_by(walker: Any) -> Any:
    """What a walker found, with storages numbered in the order in which they are met."""
    if isinstance(walker, prefix_file._Judge):
        return walker.found.blame, walker.found.layouts
    numbers: dict[Any, int] = {}
    facts = walker.facts
    storages = {
        name: sorted(numbers.setdefault(s, len(numbers)) for s in sorted(held, key=lambda s: numbers.get(s, s)))
        for name, held in facts.storages.items()
    }
    nodes = {
        name: {**vars(node), "touches": sorted(numbers.setdefault(s, len(numbers)) for s in node.touches)}
        for name, node in facts.nodes.items()
    }
    return nodes, facts.roots, storages


def ran(walker: Interpreter[Any]) -> int:
    """How many nodes were run or looked at, and not known by another."""
    return len(walker.fakes._values) - len(walker.like)


def both_ways(make: Make) -> Interpreter[Any]:
    """The walk that knows repeated nodes, which must find what the one finds that runs every node."""
    plain, walker = make(False), interpreted(make)
    plain.interpret()
    assert found_by(walker) == found_by(plain)
    return walker


def repeated(gm: fx.GraphModule, times: int = 3, seed: int = 0) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A graph whose body comes so many times, with the original of each node: the later ones take the same inputs, or
    values of the same form that came before."""
    graph, origin, choose = fx.Graph(), {}, random.Random(seed)
    inputs = {node: graph.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}
    origin |= {copy: node for node, copy in inputs.items()}
    feed, last = dict(inputs), None
    for _ in range(times):
        made = dict(feed)
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                last = made[node] = graph.node_copy(node, made.__getitem__)
                origin[last] = node
        for node in inputs:
            form = tensor_form(example(node)) if isinstance(example(node), torch.Tensor) else None
            like = [m for n, m in made.items() if isinstance(example(n), torch.Tensor) and _form(n) == form is not None]
            feed[node] = choose.choice(like) if like and choose.random() < 0.7 else feed[node]
    graph.output((last,))
    return fx.GraphModule(gm, graph), origin


def _form(node: fx.Node) -> Any:
    return tensor_form(example(node))


def layers_of(count: int) -> tuple[nn.Module, torch.Tensor]:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.up(self.norm(x)).chunk(2, dim=-1)
            return x + self.down(torch.cat([one.sigmoid() * two, two], dim=-1))

    return nn.Sequential(*[Layer() for _ in range(count)]), torch.randn(6, 8)


@pytest.mark.parametrize("kind", ["facts", "prefix"])
def test_more_layers_run_no_more_nodes(kind: str) -> None:
    def look(gm: fx.GraphModule) -> int:
        (size,) = {s for n in gm.graph.nodes for s in _symbols(example(n))}
        walker = both_ways(facts_walk(gm) if kind == "facts" else prefix_walk(gm, frozenset([size])))
        inputs = len(gm.graph.find_nodes(op="placeholder"))
        return ran(walker) - inputs

    few, many = (seen_by_backend(look, *layers_of(count)) for count in (3, 9))
    assert few == many > 0


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_known_of_repeated_nodes_is_what_running_them_finds(case: Case) -> None:
    made = program(case.fn, case.inputs)
    gm, origin = repeated(made.gm)
    both_ways(facts_walk(gm))
    blamed = {node.name for node in made.gm.graph.nodes if node.name in made.found.blame}
    both_ways(prefix_walk(gm, made.rows))
    both_ways(prefix_walk(gm, made.rows, lambda node: origin[node].name in blamed))


def test_a_write_through_a_view_counts_for_the_input_that_this_view_is_of() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.view(-1), y.view(-1), y.clone().view(-1)
        return a.add_(1), b.add_(1), c.add_(1)

    facts = gather_facts(hand_graph(fn, fake(2, 3), fake(2, 3)), "cuda")
    assert [facts.nodes[f"add_{k}"].writes for k in ("", "_1", "_2")] == [{"x"}, {"y"}, set()]
    assert facts.share_memory("add_", "x") and facts.share_memory("add__1", "y")
    assert not facts.share_memory("add__2", "y") and facts.share_memory("add__2", "clone")


def test_arguments_that_share_memory_are_not_like_those_that_do_not() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.view(-1), y.view(-1), x.view(-1)
        return torch.add(a, b, out=b), torch.add(a, c, out=c)

    gm = hand_graph(fn, fake(2, 3), fake(2, 3))
    both_ways(facts_walk(gm, "cuda"))
    facts = gather_facts(gm, "cuda")
    assert [facts.nodes[name].writes for name in ("add", "add_1")] == [{"y"}, {"x"}]


def test_a_view_of_a_node_that_was_not_run_is_made_when_a_new_node_takes_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x + 1).view(3, 2).t().contiguous().view(2, 3)
        return x.t().add_(1).sin()

    def last(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + 1
        one, two = x.chunk(2)
        y = one + 1
        three, four = (y.expand(2, 3) * 1).chunk(2)
        return two.cos(), four.mul_(two), three.sin()

    for gm in (hand_graph(fn, fake(2, 3, device="cpu")), hand_graph(last, fake(2, 3, device="cpu"))):
        walker = both_ways(facts_walk(gm))
        made = [h for node in walker.like for h in walker.fakes.held(node) if h.node is node and h.tensor is not None]
        assert made and all(walker.fakes.form(h.tensor) == h.form for h in made)


def test_behind_a_node_that_changes_a_mode_nothing_is_like_in_front_of_it() -> None:
    doubled: list[int] = []

    def turn_on() -> None:
        doubled.append(1)

    def op(x: torch.Tensor) -> torch.Tensor:
        return x + x if len(doubled) % 2 else x * 2

    gm = fx.GraphModule({}, fx.Graph())
    x = gm.graph.placeholder("x")
    x.meta["example_value"] = fake(2)
    calls = [
        gm.graph.call_function(target, given) for target, given in ((op, (x,)), (op, (x,)), (turn_on, ()), (op, (x,)))
    ]
    for node in calls:
        node.meta["example_value"] = None if node.target is turn_on else fake(2)
    gm.graph.output((calls[-1],))

    found = gather_facts(gm, "cuda").nodes
    assert [[op.name() for op in found[n.name].ops] for n in calls] == [["aten::mul.Tensor"]] * 2 + [
        [],
        ["aten::add.Tensor"],
    ]


def test_a_node_that_changes_its_argument_in_place_has_all_nodes_run() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + 1
        a = x.sin()
        x.t_()
        return a, x.sin(), x.reshape(-1)

    gm = seen_by_backend(lambda gm: gm, lambda x: (x + 1).sin() + (x + 1).sin(), ones(2, 3))
    assert both_ways(facts_walk(gm)).like
    gm = hand_graph(fn, fake(2, 3))
    walker = both_ways(facts_walk(gm, "cuda"))
    assert not walker.like and "aten::t_" in [op.name() for op in walker.facts.nodes["t_"].ops]


def test_two_numbers_that_are_equal_are_not_alike() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x + 1.0, x + True, x * 0.0, x * -0.0

    walker = both_ways(facts_walk(hand_graph(fn, fake(2)), "cuda"))
    assert not walker.like


def test_rows_that_lie_differently_are_not_alike() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.reshape(-1).cumsum(0), y.reshape(-1).cumsum(0)

    made = program(fn, [torch.ones(N, 4), torch.ones(4, N)])
    walker = both_ways(prefix_walk(made.gm, made.rows))
    assert list(walker.found.blame) == ["cumsum_1"]


def test_a_node_that_is_cut_is_not_like_one_that_is_not() -> None:
    made = program(lambda x: (x.cumsum(0).flip(0), x.cumsum(0).flip(0)), [torch.ones(N, 4)])
    walker = both_ways(prefix_walk(made.gm, made.rows, lambda node: node.name == "flip"))
    assert list(walker.found.blame) == ["flip_1"]


def test_a_tensor_that_was_put_into_other_memory_is_followed_there() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        x.set_(y)
        return x.add_(1)

    gm = hand_graph(fn, fake(2, 3, device="cpu"), fake(2, 3, device="cpu"))
    walker = both_ways(facts_walk(gm))
    assert [walker.facts.nodes[name].writes for name in ("add_", "add__1")] == [{"x"}, {"x", "y"}]


def test_memory_that_a_tensor_left_is_not_taken_for_what_is_made_later() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for _ in range(16):
            y = x.clone()
            y.set_(x + 1)
            made.append(y * 2)
        return made

    storages = gather_facts(hand_graph(fn, fake(2, 3, device="cpu")), "cpu").storages
    numbers = [number for name, held in storages.items() if name.startswith(("clone", "mul")) for number in held]
    assert len(numbers) == len(set(numbers)) == 32
