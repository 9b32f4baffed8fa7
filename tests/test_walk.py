"""The uncaptured way through a split graph: what it returns, what it notes about cuts, and what it lets go of."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_facts import fake
from torch import fx
from torch.utils import _pytree as pytree

from sgc_backend.capturable import why_not_capturable
from sgc_backend.facts import gather_facts
from sgc_backend.groups import Split
from sgc_backend.marks import Marks
from sgc_backend.split import split_graph
from sgc_backend.symbols import Symbols
from sgc_backend.walk import CutResult, Walk, describe


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Walked:
    """A Dynamo graph, split, that runs both ways at every call and compares everything that can be seen."""

    def __init__(self, gm: fx.GraphModule, cut_ops: Sequence[Any]) -> None:
        facts, marks = gather_facts(gm, "cpu"), Marks.of(cut_ops, ())
        self.gm = gm
        self.split: Split = split_graph(gm, facts, lambda node: why_not_capturable(node, facts, marks))
        self.names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        self.compiled: list[Callable[..., Any]] = [g.gm.forward for g in self.split.groups]
        self.walk = Walk(self.split, self.compiled, Symbols(gm), self.names)
        self.observed: dict[str, CutResult] = {}
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        theirs = copy.deepcopy(args)
        seed = torch.get_rng_state()
        self.observed.clear()
        got = self.walk.run(theirs, self.observed)
        if self.split.spec is not None:
            got = pytree.tree_unflatten(got, self.split.spec)
        after = torch.get_rng_state()
        torch.set_rng_state(seed)
        expected = self.gm(*args)
        assert torch.equal(after, torch.get_rng_state())
        same((list(expected), list(args)), (list(got), list(theirs)))
        self.calls += 1
        return expected

    @property
    def layout(self) -> str:
        """Groups as letters: P for a piece, C for a cut, V for views between or behind cuts."""
        letters = {"piece": "P", "cut": "C"}
        return "".join(letters[g.kind] if g.cuts or g.kind == "piece" else "V" for g in self.split.groups)


def same(expected: Any, got: Any) -> None:
    """Equal in structure, bits, layout, and in which tensors share memory and where."""
    ours, spec = pytree.tree_flatten(expected)
    theirs, other = pytree.tree_flatten(got)
    assert spec == other
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert sharing(ours) == sharing(theirs)


def sharing(values: Sequence[Any]) -> list[tuple[int, int] | None]:
    seen: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = []
    for value in values:
        if not isinstance(value, torch.Tensor) or not value.numel():
            found.append(None)
            continue
        number, start = seen.setdefault(value.untyped_storage().data_ptr(), (len(seen), value.data_ptr()))
        found.append((number, value.data_ptr() - start))
    return found


def walked(fn: Any, *calls: tuple[Any, ...], cut: Sequence[Any] = (torch.relu,), dynamic: bool | None = True) -> Walked:
    """Compile ``fn``, call it with each of ``calls``, and return its one graph."""
    made: list[Walked] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Walked:
        made.append(Walked(gm, cut))
        return made[-1]

    with torch.no_grad():
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
        for args in calls:
            compiled(*args)
    (only,) = made
    assert only.calls == len(calls)
    return only


def rows(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(n, 4),) for n in sizes]


# -- what it notes about cuts ----------------------------------------------------------------------------------------


def test_a_fresh_result_is_known_by_its_layout() -> None:
    graph = walked(lambda x: torch.relu(x * 2) + 1, *rows(3))
    assert graph.observed == {"relu": CutResult((3, 4), (4, 1), torch.float32, None, None)}


def test_a_result_lies_in_the_argument_that_has_bytes() -> None:
    x = torch.randn(1, 4)
    empty, t = x[1:], x.t()
    (seen,) = describe([empty, t], [t.t()])
    assert seen.alias == (1, 0)
    whole = torch.randn(3, 4)
    none, part, all_of_it = describe([], [whole[3:], whole[1:], whole])
    assert (none.sibling, part.sibling, all_of_it.sibling) == (None, None, (1, -4 * whole.element_size()))
    (last,) = describe([whole], [whole[3:]])
    assert last.alias == (0, 12 * whole.element_size())  # where it would lie, not the 0 that data_ptr() gives


def test_a_result_that_is_all_of_its_memory_is_told_from_a_part() -> None:
    whole = torch.randn(3, 4)
    given = [whole, whole.t(), whole.view(-1), whole[1:], whole[:2], whole[:, ::2], whole[0]]
    assert [r.fills for r in describe([], given)] == [True, True, True, False, False, False, False]


def test_a_result_keeps_the_strides_that_the_cut_gave_it() -> None:
    graph = walked(lambda x: torch.relu(x.t()) + 1, *rows(3))
    (result,) = graph.observed.values()
    assert (result.size, result.stride) == ((4, 3), (1, 4))


def test_what_is_observed_is_that_of_the_last_call() -> None:
    graph = walked(lambda x: torch.relu(x * 2) + 1, *rows(3, 7))
    assert graph.observed["relu"].size == (7, 4)


def test_a_view_is_known_by_its_argument_and_offset() -> None:
    graph = walked(lambda x: (x * 2)[1:].sin(), *rows(3), cut=["aten::slice"])
    (result,) = graph.observed.values()
    (cut,) = graph.split.cuts
    position = [getattr(ref, "name", None) for ref in cut.inputs].index("mul")
    assert result.alias == (position, 16)
    assert result.sibling is None
    assert (result.size, result.stride) == ((2, 4), (4, 1))


def test_an_in_place_cut_returns_its_argument() -> None:
    graph = walked(lambda x: torch.relu_(x * 2) + 1, *rows(3), cut=[torch.relu_])
    (result,) = graph.observed.values()
    assert result.alias == (0, 0)


def test_results_over_one_storage_know_the_first() -> None:
    def fn(x: torch.Tensor) -> Any:
        y = torch.relu(x * 2)
        a, b = y[:1], y[1:]
        return a.sin(), b.cos(), y.tan()

    graph = walked(fn, *rows(3), cut=["aten::relu", "aten::slice"])
    results = [graph.observed[name] for name in graph.split.cuts[0].outputs]
    first = results[0]
    assert first.alias is None and first.sibling is None
    siblings = [r.sibling for r in results[1:]]
    assert len(siblings) == 2 and all(s is not None and s[0] == 0 for s in siblings)
    offsets = {r.size: r.sibling[1] if r.sibling else 0 for r in results}
    assert offsets[(2, 4)] - offsets[(1, 4)] == 16
    assert offsets[(3, 4)] == offsets[(1, 4)]


def test_results_of_their_own_memory_are_no_siblings() -> None:
    graph = walked(lambda x: [t * 2 for t in torch.topk(x * 2, 2)], *rows(3), cut=[torch.topk])
    assert [r.sibling for r in graph.observed.values()] == [None, None]
    assert {r.dtype for r in graph.observed.values()} == {torch.float32, torch.int64}


def test_an_empty_result_lies_nowhere() -> None:
    graph = walked(lambda x: torch.relu(x[:0]) * 2, *rows(3), dynamic=False)
    (result,) = graph.observed.values()
    assert (result.size, result.alias, result.sibling) == ((0, 4), None, None)


def counted(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, x.shape[0]


def scaled(pair: tuple[torch.Tensor, int]) -> torch.Tensor:
    return pair[0] * pair[1]


def test_a_number_from_a_cut_is_no_tensor() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(counted, (x,))
    done = graph.call_function(scaled, (pair,))
    graph.output((done,))
    x.meta["example_value"] = done.meta["example_value"] = fake(3, device="cpu")
    pair.meta["example_value"] = (fake(3, device="cpu"), 3)
    walk = Walked(fx.GraphModule(torch.nn.Module(), graph), [counted])
    walk(torch.randn(3))
    assert walk.layout == "CP"
    assert walk.observed["counted__0"].size == (3,)
    assert walk.observed["counted__1"] == CutResult()


def test_pieces_are_not_observed() -> None:
    graph = walked(lambda x: (x * 2).sin(), *rows(3))
    assert graph.layout == "P" and graph.observed == {}


def test_observing_is_asked_for() -> None:
    graph = walked(lambda x: torch.relu(x * 2) + 1, *rows(3))
    x = torch.randn(5, 4)
    given = tuple(x if isinstance(n, str) and n == "l_x_" else 5 for n in graph.names)
    (out,) = graph.walk.run(given)
    assert torch.equal(out, torch.relu(x * 2) + 1)
    assert graph.observed["relu"].size == (3, 4)


# -- what it lets go of ----------------------------------------------------------------------------------------------


def lifetimes(graph: Walked, *args: Any) -> list[set[str]]:
    """For each group, the results of earlier groups that are alive while it runs."""
    alive: list[set[str]] = []
    known: dict[str, weakref.ref[torch.Tensor]] = {}

    def spied(group: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            gc.collect(0)
            alive.append({name for name, ref in known.items() if ref() is not None})
            results = fn(*given)
            known.update({n: weakref.ref(r) for n, r in zip(group.outputs, results, strict=True)})
            return results

        return call

    fns = [spied(g, fn) for g, fn in zip(graph.split.groups, graph.compiled, strict=True)]
    Walk(graph.split, fns, graph.walk.symbols, graph.names).run(args)
    alive.append({name for name, ref in known.items() if ref() is not None})
    return alive


def test_an_intermediate_dies_after_its_last_reader() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.relu(x * 2)
        return x + 1

    graph = walked(fn, *rows(3), dynamic=False)
    assert graph.layout == "PCPCPCPCP"
    alive = lifetimes(graph, torch.randn(3, 4))
    assert all(len(names) <= 2 for names in alive)
    assert alive[-1] == set()


def test_an_intermediate_lives_until_its_last_reader() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        early = x * 2
        late = torch.relu(torch.relu(early) + 1) + 2
        return late + early

    graph = walked(fn, *rows(3), dynamic=False)
    alive = lifetimes(graph, torch.randn(3, 4))
    early = graph.split.groups[0].outputs[0]
    assert all(early in names for names in alive[1 : len(graph.split.groups)])


def test_an_output_lives_to_the_end() -> None:
    def fn(x: torch.Tensor) -> Any:
        early = x * 2
        return torch.relu(torch.relu(early) + 1) + 2, early

    graph = walked(fn, *rows(3), dynamic=False)
    args = (torch.randn(3, 4),)
    (_, early) = graph.walk.run(args)
    assert torch.equal(early, args[0] * 2)


def test_nothing_is_kept_from_call_to_call() -> None:
    graph = walked(lambda x: torch.relu(x * 2) + 1, *rows(3), dynamic=False)
    x = torch.randn(3, 4)
    (out,) = graph.walk.run((x,), graph.observed)
    watched = [weakref.ref(x), weakref.ref(out)]
    del x, out
    gc.collect(0)
    assert [ref() for ref in watched] == [None, None]
