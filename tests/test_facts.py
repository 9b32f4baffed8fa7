"""What nodes do, as seen by running them once on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sgc_backend.facts import (
    GraphFacts,
    NodeFacts,
    example,
    free_unbacked,
    gather_facts,
    is_host_value,
    is_wrapped_number,
)


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def seen_by_backend(look: Callable[[fx.GraphModule], Any], fn: Any, *args: Any, dynamic: bool | None = True) -> Any:
    """What ``look`` returns for the one graph that Dynamo makes of ``fn(*args)``, while Dynamo still holds it."""
    found = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        found.append(look(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (only,) = found
    return only


def facts_of(fn: Any, *args: Any, dynamic: bool | None = True) -> GraphFacts:
    return seen_by_backend(lambda gm: gather_facts(gm, "cpu"), fn, *args, dynamic=dynamic)


MODE = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake(*size: int, device: str = "cuda", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with MODE:
        return torch.empty(size, device=device, dtype=dtype)


def hand_graph(fn: Callable[..., Any], *values: Any) -> fx.GraphModule:
    """A graph as Dynamo would hand it over, from fake tensors of any device."""
    gm = fx.symbolic_trace(fn)
    made: dict[fx.Node, Any] = {}
    given = iter(values)
    with MODE:
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "get_attr":
                made[node] = MODE.from_tensor(getattr(gm, str(node.target)))
            elif node.op == "call_method":
                made[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                made[node] = node.target(*args, **kwargs)
            node.meta["example_value"] = made[node]
    return gm


def hand_facts(fn: Callable[..., Any], *values: Any) -> GraphFacts:
    return gather_facts(hand_graph(fn, *values), "cuda")


def op_names(facts: NodeFacts) -> list[str]:
    return [op.name() for op in facts.ops]


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size)


# -- ops and launches ------------------------------------------------------------------------------------------------


def test_a_torch_call_is_known_by_the_aten_ops_behind_it() -> None:
    facts = facts_of(lambda x: torch.nn.functional.linear(x, x).relu(), ones(4, 4))
    assert op_names(facts.nodes["linear"]) == ["aten::t", "aten::mm"]
    assert op_names(facts.nodes["relu"]) == ["aten::relu"]


VIEWS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.view(-1),
    lambda x: x.t(),
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x[:, None],
    lambda x: x.expand(2, 4, 4),
    lambda x: x.detach(),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.reshape(2, -1),
    lambda x: x.chunk(2)[0],
    lambda x: x.permute(1, 0),
    lambda x: x.contiguous(),
    lambda x: x.as_strided((2, 2), (1, 1)),
    lambda x: torch.view_as_complex(x.view(-1, 2)),
    lambda x: x.view(torch.int32),
    lambda x: x.diagonal(),
    lambda x: x.narrow(0, 0, 2),
    lambda x: x.shape[0] * 2,
]


def test_views_and_sizes_launch_nothing() -> None:
    facts = facts_of(lambda x: ([view(x) for view in VIEWS], x + 1), ones(4, 4))
    assert [name for name, f in facts.nodes.items() if f.launches] == ["add"]
    assert len(facts.nodes) >= len(VIEWS)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.t().contiguous(),
        lambda x: x.clone(),
        lambda x: x.t().reshape(-1),
        lambda x: torch.cat([x, x]),
        lambda x: x.to(torch.float64),
        lambda x: torch.zeros(3),
        lambda x: torch.arange(x.shape[0]),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.fill_(2),
        lambda x: torch.rand(3),
    ],
)
def test_what_computes_or_copies_launches(work: Callable[[torch.Tensor], Any]) -> None:
    facts = facts_of(work, ones(4, 4))
    assert any(f.launches for f in facts.nodes.values())


def test_memory_that_is_only_allocated_launches_nothing() -> None:
    # A piece of nothing else is an empty graph, about which torch warns on a GPU.
    facts = facts_of(
        lambda x: (torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,)), x + 1),
        ones(4, 4),
    )
    assert [name for name, f in facts.nodes.items() if f.launches] == ["add"]


def test_a_pass_to_the_dtype_that_it_has_is_no_work() -> None:
    facts = facts_of(lambda x: (x.to(torch.float32), x + 1)[1] + x.float(), ones(4, 4))
    assert [name for name, f in facts.nodes.items() if f.launches] == ["add", "add_1"]


def test_wrapped_calls_show_what_is_inside() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x.relu()).sum()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        facts = facts_of(outer, ones(4, 4))
    everything = [name for f in facts.nodes.values() for name in op_names(f)]
    assert {"aten::relu", "aten::nonzero"} <= set(everything)


def test_the_graph_and_its_values_are_left_as_they_were() -> None:
    def look(gm: fx.GraphModule) -> tuple[Any, ...]:
        env = next(example(n) for n in gm.graph.nodes if n.name == "l_x_").fake_mode.shape_env
        before = (str(gm.graph), len(env.guards), dict(env.var_to_range), [dict(n.meta) for n in gm.graph.nodes])
        gather_facts(gm, "cpu")
        after = (str(gm.graph), len(env.guards), dict(env.var_to_range), [dict(n.meta) for n in gm.graph.nodes])
        return before[:3], after[:3], [a.keys() for a in before[3]] == [b.keys() for b in after[3]]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        before, after, same_meta = seen_by_backend(
            look, lambda x: x.add_(x.sum().item()).view(-1)[: x.shape[0] // 2] * 2, ones(4, 4)
        )
    assert before == after
    assert same_meta


def test_real_tensors_are_not_run() -> None:
    x = ones(4, 4)
    seen = []

    def look(gm: fx.GraphModule) -> None:
        seen.append(x.sum().item())
        gather_facts(gm, "cpu")
        seen.append(x.sum().item())

    seen_by_backend(look, lambda x: x.add_(1), x)
    assert seen == [16, 16]


# -- writes ----------------------------------------------------------------------------------------------------------


def written(fn: Any, *args: Any) -> dict[str, set[str]]:
    return {name: f.writes for name, f in facts_of(fn, *args).nodes.items() if f.writes}


WRITES = {
    "in place": lambda x, y: x.add_(1),
    "through a view": lambda x, y: x.view(-1)[1:].mul_(2),
    "through a view of a view that is made later": lambda x, y: (y + 1, x.t().unsqueeze(0)[0].zero_()),
    "through detach": lambda x, y: x.detach().add_(1),
    "through data": lambda x, y: x.data.add_(1),
    "through chunk": lambda x, y: x.chunk(2)[1].fill_(1),
    "through unbind": lambda x, y: x.unbind(0)[1].fill_(1),
    "setitem": lambda x, y: x.__setitem__(0, 1.0),
    "setitem by slice": lambda x, y: x.__setitem__(slice(0, 2), y[:2]),
    "setitem by mask": lambda x, y: x.__setitem__(y > 0, 0.0),
    "setitem by index": lambda x, y: x.__setitem__(torch.tensor([0, 1]), 0.0),
    "augmented assignment": lambda x, y: x.__iadd__(y),
    "copy_": lambda x, y: x.copy_(y),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0]),), torch.ones(())),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([0]), y[:1]),
    "scatter_": lambda x, y: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), y),
    "out=": lambda x, y: torch.add(y, 1, out=x),
    "foreach": lambda x, y: torch._foreach_add_([x], 1.0),
    "several outs": lambda x, y: torch.max(y, 0, out=(x[0], torch.empty(4, dtype=torch.long))),
    "random": lambda x, y: x.normal_(),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 1),
    "real part": lambda x, y: torch.view_as_complex(x.view(-1, 2)).real.zero_(),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_write_to_an_input_is_seen_however_it_is_spelt(case: str) -> None:
    found = written(lambda x, y: (WRITES[case](x, y), y * 2)[1], ones(4, 4), ones(4, 4))
    assert set().union(*found.values()) == {"l_x_"}


def test_a_foreach_writes_each_of_its_list() -> None:
    found = written(lambda x, y: torch._foreach_mul_([x, y], 2.0), ones(4), ones(4))
    assert set().union(*found.values()) == {"l_x_", "l_y_"}


def test_writes_to_what_the_graph_made_are_nobodys() -> None:
    assert written(lambda x, y: (x * 2).add_(y).view(-1).mul_(3), ones(4, 4), ones(4, 4)) == {}


def test_reading_is_not_writing() -> None:
    assert written(lambda x, y: (x.t() + y, torch.cat([x, y]), x.clone().zero_()), ones(4, 4), ones(4, 4)) == {}


def test_the_writing_node_is_the_one_that_is_blamed() -> None:
    found = written(lambda x, y: (x.view(-1), y.mul_(2), x.t().add_(y))[1], ones(4, 4), ones(4, 4))
    assert sorted(map(sorted, found.values())) == [["l_x_"], ["l_y_"]]


@torch.library.custom_op("sgc_facts_test::bump", mutates_args=("x",))
def bump(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


def test_a_custom_op_writes_what_its_schema_says() -> None:
    found = written(lambda x, y: bump(x[1:], y[1:]), ones(4), ones(4))
    assert set().union(*found.values()) == {"l_x_"}


def rows(x: torch.Tensor) -> Any:
    count = (x[:, 0] > 0).sum().item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return count


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(slice(0, rows(x)), 0.0),
        lambda x: x[: rows(x)].fill_(0),
        lambda x: x.narrow(0, 0, rows(x)).mul_(2),
        lambda x: x[: rows(x)].view(-1).add_(1),
    ],
    ids=["setitem", "slice", "narrow", "view of a slice"],
)
def test_a_write_through_a_size_that_depends_on_data_is_seen(write: Callable[[torch.Tensor], Any]) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = written(lambda x: (write(x), x * 3)[1], ones(4, 4))
    assert set().union(*found.values()) == {"l_x_"}


def test_a_write_in_a_branch_is_seen() -> None:
    def add(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a.clone()

    def sub(a: torch.Tensor) -> torch.Tensor:
        a.sub_(1)
        return a.clone()

    found = written(lambda x, y: torch.cond(y.sum() > 0, add, sub, (x,)), ones(4), ones(4))
    assert set().union(*found.values()) == {"l_x_"}


# -- masks, sizes and numbers ----------------------------------------------------------------------------------------


def test_a_boolean_index_is_told_from_one_by_numbers() -> None:
    values = (fake(4), fake(4, dtype=torch.bool), fake())
    masked = hand_facts(lambda x, m, v: torch.ops.aten._unsafe_index_put.default(x, [m], v), *values)
    assert [f.bool_index for f in masked.nodes.values()] == [True]
    numbered = facts_of(lambda x, i: x[i] + x[0] + x[:, None][:, 0], ones(4, 4), torch.tensor([0, 1, 1, 2]))
    assert not any(f.bool_index for f in numbered.nodes.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_that_is_written_through_is_a_boolean_index(dtype: torch.dtype) -> None:
    values = (fake(4), fake(4, dtype=dtype), fake(4))
    facts = hand_facts(lambda x, m, v: torch.ops.aten.index_put_.default(x, [m], v), *values)
    (node,) = facts.nodes.values()
    assert node.bool_index
    assert node.writes == {"x"}


def test_an_integer_index_put_is_no_boolean_index() -> None:
    values = (fake(4), fake(2, dtype=torch.long), fake(2))
    facts = hand_facts(lambda x, i, v: torch.ops.aten.index_put_.default(x, [i], v), *values)
    (node,) = facts.nodes.values()
    assert not node.bool_index
    assert node.error is None


def test_a_size_that_depends_on_data_is_unbacked_and_its_node_is_not_run() -> None:
    def look(gm: fx.GraphModule) -> tuple[dict[str, bool], GraphFacts]:
        return {n.name: free_unbacked(example(n)) for n in gm.graph.nodes}, gather_facts(gm, "cpu")

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        unbacked, facts = seen_by_backend(look, lambda x: torch.nonzero(x) + 1, ones(4, 4))
    assert unbacked["nonzero"] and unbacked["add"] and not unbacked["l_x_"]
    assert facts.nodes["add"].error is None
    assert facts.nodes["add"].launches


def test_python_floats_are_wrapped_numbers_and_their_item_launches_nothing() -> None:
    def look(gm: fx.GraphModule) -> tuple[list[str], GraphFacts]:
        return [n.name for n in gm.graph.nodes if is_wrapped_number(n)], gather_facts(gm, "cpu")

    wrapped, facts = seen_by_backend(look, lambda x, scale: x * scale + scale, ones(4), 0.25)
    assert wrapped == ["l_scale_"]
    assert facts.wrapped_numbers == {"l_scale_"}
    assert not facts.nodes["item"].launches
    assert facts.nodes["item"].ops == []


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (1, True),
        (1.5, True),
        (True, True),
        (torch.Size([1, 2]), True),
        ((1, None), True),
        ([torch.float32, "a"], True),
        (torch.device("cpu"), True),
        ((), True),
        (None, False),
        (torch.ones(()), False),
        ((1, torch.ones(1)), False),
        (torch.Generator(), False),
    ],
)
def test_host_values_hold_no_tensor(value: Any, host: bool) -> None:
    assert is_host_value(value) is host


# -- host and device -------------------------------------------------------------------------------------------------


def test_a_copy_to_the_host_reads_the_device() -> None:
    facts = hand_facts(lambda x: x.cpu() + 1, fake(4))
    assert facts.nodes["cpu"].host_reads == ["aten::_to_copy mixes cuda and cpu tensors"]
    assert not facts.nodes["cpu"].host_only
    assert facts.nodes["add"].host_only and facts.nodes["add"].host_reads == []


def test_a_copy_from_the_host_is_a_host_read() -> None:
    facts = hand_facts(lambda x, h: torch.ops.aten.copy_.default(x, h), fake(4), fake(4, device="cpu"))
    (node,) = facts.nodes.values()
    assert len(node.host_reads) == 1
    assert node.writes == {"x"}


def test_a_host_scalar_that_enters_a_kernel_is_a_host_read() -> None:
    facts = hand_facts(lambda x, s: x * s, fake(4), fake(device="cpu"))
    assert len(facts.nodes["mul"].host_reads) == 1


def test_a_python_number_is_no_host_read() -> None:
    facts = hand_facts(lambda x: torch.clamp(x * 2.5 + 1, 0.0, 1.0).masked_fill(x > 0, 3.0), fake(4))
    assert all(not f.host_reads and not f.host_only for f in facts.nodes.values())


def test_work_on_the_device_alone_is_neither() -> None:
    facts = hand_facts(lambda x: torch.zeros_like(x) + x.view(-1), fake(4))
    assert all(not f.host_reads and not f.host_only and f.error is None for f in facts.nodes.values())


def test_on_the_emulated_device_host_tensors_are_the_devices() -> None:
    facts = facts_of(lambda x: x.cpu() + torch.ones(4), ones(4))
    assert all(not f.host_reads and not f.host_only for f in facts.nodes.values())


def test_a_node_without_tensors_is_not_on_the_host() -> None:
    facts = facts_of(lambda x: x * (x.shape[0] + 1), ones(4))
    assert not any(f.host_only for f in facts.nodes.values())


# -- what can't be run -----------------------------------------------------------------------------------------------


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no fake\nsecond line")


def graph_with_a_broken_node(name: str = "broken") -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = fake(4)
    target = broken if name == "broken" else name
    node = graph.call_method(name, (x,)) if isinstance(target, str) else graph.call_function(target, (x,))
    node.meta["example_value"] = fake(4)
    after = graph.call_function(torch.relu, (node,))
    after.meta["example_value"] = fake(4)
    graph.output((after,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_an_error_is_written_down_by_its_first_line_and_the_walk_goes_on() -> None:
    facts = gather_facts(graph_with_a_broken_node(), "cuda")
    assert facts.nodes["broken"].error == "ValueError: no fake"
    assert op_names(facts.nodes["relu"]) == ["aten::relu"]
    assert facts.nodes["relu"].error is None


def test_a_node_that_could_not_be_run_and_may_write_is_taken_to_write() -> None:
    facts = gather_facts(graph_with_a_broken_node("no_such_method_"), "cuda")
    assert facts.nodes["no_such_method_"].error is not None
    assert facts.nodes["no_such_method_"].writes == {"x"}


# -- inference mode --------------------------------------------------------------------------------------------------

COMPOSITES: dict[str, Callable[..., Any]] = {
    "a copy to the host": lambda x: x.cpu().to(x.device),
    "a copy to another device by name": lambda x: x.to("cpu", non_blocking=True),
    "a reshape that copies": lambda x: x.t().reshape(-1),
    "a flattening": lambda x: x.t().flatten(),
    "a decomposition": lambda x: torch.linalg.svd(x)[1],
    "an inverse": lambda x: torch.linalg.inv(x),
    "a rank": lambda x: torch.linalg.matrix_rank(x),
    "a linear layer": lambda x: torch.nn.functional.linear(x, x),
    "a product by indices": lambda x: torch.einsum("ij,jk->ik", x, x),
    "attention": lambda x: torch.ops.aten.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("fn", COMPOSITES.values(), ids=COMPOSITES)
def test_ops_made_of_other_ops_are_taken_apart_in_inference_mode_too(fn: Callable[..., Any]) -> None:
    device = "cpu" if fn is COMPOSITES["attention"] else "cuda"
    with torch.no_grad():
        outside = hand_facts(fn, fake(4, 4, device=device))
    with torch.inference_mode():
        inside = hand_facts(fn, fake(4, 4, device=device))
    assert {name: op_names(f) for name, f in inside.nodes.items()} == {
        name: op_names(f) for name, f in outside.nodes.items()
    }
    assert [f.launches for f in inside.nodes.values()] == [f.launches for f in outside.nodes.values()]


def test_ops_on_inference_tensors_are_taken_apart_behind_a_switch_inside_of_the_graph() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.t().reshape(-1) * 2

    facts = facts_of(fn, ones(4, 4))
    assert op_names(facts.nodes["reshape"]) == ["aten::clone", "aten::_unsafe_view"]
    assert facts.nodes["reshape"].launches
