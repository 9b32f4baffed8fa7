"""Which nodes are cut and why: a case for each rule, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_facts import fake, hand_graph, seen_by_backend
from torch import fx

from sgc_backend import attention, capturable
from sgc_backend.capturable import RULES, Reason, why_not_capturable
from sgc_backend.facts import gather_facts
from sgc_backend.marks import Marks


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here captures; what Dynamo compiled and what was registered is forgotten."""
    monkeypatch.setattr(attention, "_attention_ops", set())
    yield
    torch._dynamo.reset()


def reasons(gm: fx.GraphModule, device: str, marks: Marks) -> dict[str, Reason]:
    facts = gather_facts(gm, device)
    found = {n.name: why_not_capturable(n, facts, marks) for n in gm.graph.nodes if n.op.startswith("call")}
    return {name: reason for name, reason in found.items() if reason is not None}


def cuts(
    fn: Any, *args: Any, cut: Any = (), keep: Any = (), dynamic: bool | None = True, unbacked: bool = False
) -> dict[str, Reason]:
    """Reasons by node of the graph that Dynamo makes of ``fn(*args)``."""
    marks = Marks.of(cut, keep)
    with torch._dynamo.config.patch(capture_scalar_outputs=unbacked, capture_dynamic_output_shape_ops=unbacked):
        return seen_by_backend(lambda gm: reasons(gm, "cpu", marks), fn, *args, dynamic=dynamic)


def hand_cuts(fn: Callable[..., Any], *values: Any) -> dict[str, Reason]:
    return reasons(hand_graph(fn, *values), "cuda", Marks())


def rules(found: dict[str, Reason]) -> set[str]:
    return {reason.rule for reason in found.values()}


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size)


# -- ops of our own --------------------------------------------------------------------------------------------------


@torch.library.custom_op("sgc_rules_test::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q * k.sum()


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("sgc_rules_test::hosted", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def hosted(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@hosted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("sgc_rules_test", "FRAGMENT")
_LIBRARY.define("scale.number(Tensor x, float s) -> Tensor")
_LIBRARY.define("scale.tensor(Tensor x, Tensor s) -> Tensor")
_LIBRARY.impl("scale.number", lambda x, s: x * s, "CompositeExplicitAutograd")
_LIBRARY.impl("scale.tensor", lambda x, s: x * s, "CompositeExplicitAutograd")


# -- a case for each rule --------------------------------------------------------------------------------------------


def test_an_op_that_its_author_tagged() -> None:
    (reason,) = cuts(lambda x: hosted(x * 2) + 1, ones(4)).values()
    assert reason.rule == "cudagraph_unsafe"
    assert "sgc_rules_test::hosted" in str(reason)


def test_a_branch_on_a_tensors_value() -> None:
    found = cuts(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1, ones(4))
    assert [r.rule for r in found.values()] == ["control_flow"]
    assert "cond" in str(next(iter(found.values())))


def test_a_higher_order_operator_that_nobody_knows() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.higher_order.autograd_function_apply, (None, None, x))
    x.meta["example_value"] = node.meta["example_value"] = fake(4)
    graph.output(node)
    (reason,) = reasons(fx.GraphModule(torch.nn.Module(), graph), "cuda", Marks()).values()
    assert reason.rule == "higher_order"
    assert "autograd_function_apply" in str(reason)


@pytest.mark.parametrize("spelt", ["positional", "keyword", "aten", "multi_head"])
def test_attention_over_a_dynamic_length(spelt: str) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if spelt == "keyword":
            return F.scaled_dot_product_attention(q, key=k, value=k)
        if spelt == "aten":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)[0]
        if spelt == "multi_head":
            flat = q[0, 0][None]
            weight = torch.eye(8).repeat(3, 1)
            return F.multi_head_attention_forward(
                flat, flat, flat, 8, 2, weight, None, None, None, False, 0.0, torch.eye(8), None, need_weights=False
            )[0]
        return F.scaled_dot_product_attention(q, k, k)

    k = ones(1, 2, 6, 8)
    torch._dynamo.mark_dynamic(k, 2)
    q = ones(1, 2, 6, 8) if spelt != "aten" else k
    if spelt == "multi_head":
        torch._dynamo.mark_dynamic(q, 2)
        found = cuts(lambda q, k: attention(q.transpose(0, 2).contiguous().transpose(0, 2), k), q, k, dynamic=None)
    else:
        found = cuts(attention, q, k, dynamic=None)
    assert [r.rule for r in found.values()] == ["attention"]
    assert "attends over a dynamic length" in str(next(iter(found.values())))


def test_the_reason_names_the_op() -> None:
    found = cuts(lambda x: F.scaled_dot_product_attention(x, x, x), ones(1, 2, 6, 8))
    assert "scaled_dot_product_attention" in str(found["scaled_dot_product_attention"])


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("nonzero", torch.nonzero),
        ("masked_select", lambda x: torch.masked_select(x, x > 0)),
        ("unique", torch.unique),
        ("repeat_interleave", lambda x: torch.repeat_interleave(x[:, 0].long())),
    ],
)
def test_a_size_that_depends_on_data(name: str, fn: Callable[[torch.Tensor], Any]) -> None:
    found = cuts(fn, ones(4, 4), unbacked=True)
    assert rules(found) == {"data_dependent"}
    assert any(name in node for node in found)
    assert all("depends on data" in str(reason) for reason in found.values())


def test_what_takes_a_size_that_depends_on_data() -> None:
    found = cuts(lambda x: torch.nonzero(x)[:, 0] * 2, ones(4, 4), unbacked=True)
    assert rules(found) == {"data_dependent"}
    assert "takes a size that depends on data" in str(found["mul"]) or "result depends on data" in str(found["mul"])


def test_an_index_by_a_mask() -> None:
    read = cuts(lambda x: x[x > 0].sum() + x, ones(4, 4), unbacked=True)
    assert rules(read) == {"data_dependent"}
    write = cuts(lambda x: (x.__setitem__(x > 0, x[0, 0]), x * 2)[1], ones(4, 4))
    assert rules(write) == {"data_dependent"}
    assert "setitem indexes with a boolean mask" in {str(r) for r in write.values()}


def test_a_result_that_the_host_reads() -> None:
    found = cuts(lambda x: x * x.sum().item(), ones(4), unbacked=True)
    assert "item" in found
    assert rules(found) <= {"host_sync", "data_dependent"}


@pytest.mark.parametrize(
    ("op", "fn"),
    [
        ("_linalg_eigh", torch.linalg.eigh),
        ("_linalg_svd", torch.linalg.svd),
        ("bincount", lambda x: torch.bincount(x[:, 0].long(), minlength=3)),
        ("histc", lambda x: torch.histc(x, 4)),
    ],
)
def test_an_op_that_waits_inside(op: str, fn: Callable[[torch.Tensor], Any]) -> None:
    found = cuts(fn, ones(4, 4), unbacked=True)
    assert rules(found) <= {"host_sync", "data_dependent"} and found
    assert any(op in str(reason) for reason in found.values())


@pytest.mark.parametrize("method", ["item", "tolist", "numpy"])
def test_a_method_that_reads_on_the_host(method: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method(method, (x,))
    x.meta["example_value"] = fake(1)
    node.meta["example_value"] = 1.0
    graph.output(node)
    (reason,) = reasons(fx.GraphModule(torch.nn.Module(), graph), "cuda", Marks()).values()
    assert reason.rule == "host_sync"
    assert f".{method}()" in str(reason)


def test_a_copy_between_host_and_device() -> None:
    found = hand_cuts(lambda x: x.cpu(), fake(4))
    assert found["cpu"].rule == "host_copy"
    assert str(found["cpu"]) == "aten::_to_copy mixes cuda and cpu tensors"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("fn", "rule"),
    [
        (lambda x: x.cpu(), "host_copy"),
        (lambda x: x.to("cpu", non_blocking=True), "host_copy"),
        (lambda x: x.to("cpu", torch.float64), "host_copy"),
        (lambda x: x.new_zeros(3, device="cpu"), "host_copy"),
        (lambda x: torch.linalg.eigh(x)[0], "host_sync"),
        (lambda x: torch.linalg.solve(x, x), "host_sync"),
        (lambda x: torch.linalg.cholesky(x), "host_sync"),
        (lambda x: torch.linalg.pinv(x), "host_sync"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantised"),
    ],
)
def test_a_wait_or_copy_is_found_in_every_mode(fn: Any, rule: str, mode: Any) -> None:
    with mode():
        assert rules(hand_cuts(fn, fake(4, 4))) == {rule}


def test_a_host_scalar_that_a_kernel_takes() -> None:
    assert hand_cuts(lambda x, s: x + s, fake(4), fake(device="cpu"))["add"].rule == "host_copy"


def test_work_on_host_tensors() -> None:
    found = hand_cuts(lambda x, h: (x * 2, (h * 3).view(-1)), fake(4), fake(4, device="cpu"))
    assert {name: str(r) for name, r in found.items()} == {"mul_1": "mul computes on host tensors"}
    assert rules(found) == {"host_compute"}


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_into_tensor", "wait_tensor"])
def test_a_collective_without_nccl(op: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = {"all_reduce": (x, "sum", "0"), "all_gather_into_tensor": (x, 1, "0"), "wait_tensor": (x,)}[op]
    node = graph.call_function(getattr(torch.ops._c10d_functional, op).default, args)
    x.meta["example_value"] = node.meta["example_value"] = fake(4)
    graph.output(node)
    (reason,) = reasons(fx.GraphModule(torch.nn.Module(), graph), "cuda", Marks()).values()
    assert reason.rule == "collective"
    assert op in str(reason)


def draws_by_hand(target: Any, *args: Any, **kwargs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = fake(4, device="cpu")
    g = graph.placeholder("g")
    g.meta["example_value"] = torch.Generator()
    places = {"x": x, "g": g}
    args = tuple(places.get(a, a) if isinstance(a, str) else a for a in args)
    kwargs = {k: places.get(a, a) if isinstance(a, str) else a for k, a in kwargs.items()}
    node = graph.call_function(target, args, kwargs)
    node.meta["example_value"] = fake(4, device="cpu")
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_generator_passed_by_keyword() -> None:
    (reason,) = reasons(draws_by_hand(torch.bernoulli, "x", generator="g"), "cpu", Marks()).values()
    assert reason.rule == "generator"
    assert "bernoulli" in str(reason)


def test_what_could_not_be_examined() -> None:
    def opaque(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("nothing to see")

    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(opaque, (x,))
    x.meta["example_value"] = node.meta["example_value"] = fake(4)
    graph.output(node)
    (reason,) = reasons(fx.GraphModule(torch.nn.Module(), graph), "cuda", Marks()).values()
    assert reason.rule == "unknown"
    assert str(reason) == "opaque could not be examined (ValueError: nothing to see)"


def test_a_check_of_a_size_that_no_guard_makes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] >= 3)
        return x * 2

    x = ones(4, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    found = cuts(fn, x, dynamic=None)
    assert rules(found) == {"host_check"}
    assert "_assert_scalar.default checks a size of each call" in str(next(iter(found.values())))


def test_every_rule_has_a_case_here() -> None:
    assert len(RULES) == 12


def test_an_attention_inside_a_nested_region() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x) * 2

    assert "attention" in rules(cuts(lambda x: layer(layer(x + 1)), ones(1, 2, 6, 8)))


# -- near misses -----------------------------------------------------------------------------------------------------


NEAR_MISSES: dict[str, Callable[..., Any]] = {
    "index by an int": lambda x: x[0] + 1,
    "index by numbers": lambda x: x[torch.tensor([0, 1])] + 1,
    "index by numbers, dynamic": lambda x: x[torch.arange(x.shape[0])] + 1,
    "index_put by numbers": lambda x: x.index_put((torch.tensor([0]),), torch.ones(())),
    "setitem by slice": lambda x: (x.__setitem__(slice(0, 2), 0.0), x * 2)[1],
    "views of every kind": lambda x: x.view(-1)[1:].reshape(-1).unsqueeze(0).expand(2, -1).t(),
    "sizes": lambda x: x * x.shape[0] + x.shape[0] // 2,
    "a factory of a dynamic size": lambda x: torch.zeros(x.shape[0]) + torch.arange(x.shape[0]),
    "dropout": lambda x: F.dropout(x, 0.5),
    "the default generator": lambda x: torch.rand_like(x) + torch.randn(4) + torch.bernoulli(x),
    "masked_fill and where": lambda x: torch.where(x > 0, x.masked_fill(x > 1, 0.0), 0.0),
    "topk and sort": lambda x: (torch.topk(x, 2), x.sort(), x.argmax(), x.cumsum(0)),
    "a full reduction": lambda x: x / x.norm() + x.sum() - x.max(),
    "scatter and gather": lambda x: x.gather(0, torch.zeros(1, 4).long()) + x.scatter(0, torch.zeros(1, 4).long(), x),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "autocast": lambda x: _autocast(x),
    "no_grad": lambda x: _no_grad(x),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
}


def _autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def _no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_what_is_not_cut(case: str) -> None:
    assert cuts(NEAR_MISSES[case], ones(4, 4)) == {}


def test_attention_of_a_fixed_length_is_not_cut() -> None:
    assert cuts(lambda x: F.scaled_dot_product_attention(x, x, x), ones(1, 2, 6, 8), dynamic=False) == {}


def test_the_item_of_a_python_float_is_no_sync() -> None:
    assert cuts(lambda x, scale: x * scale + scale, ones(4), 0.25) == {}


def test_a_repeat_whose_total_is_given_does_not_depend_on_data() -> None:
    # With output_size it reads nothing back.
    assert cuts(lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 2]), dim=0, output_size=6), ones(4, 4)) == {}


def test_a_triton_kernel_is_not_cut() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(
        torch.ops.higher_order.triton_kernel_wrapper_mutation,
        (),
        {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "kwargs": {"x": x}},
    )
    x.meta["example_value"] = fake(4)
    graph.output((x,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    facts = gather_facts(gm, "cuda")
    assert why_not_capturable(node, facts, Marks()) is None
    assert facts.nodes[node.name].launches
    assert facts.nodes[node.name].writes == {"x"}


def test_device_work_is_not_cut_on_a_real_device_either() -> None:
    assert hand_cuts(lambda x: torch.relu(x.view(2, 2) @ x.view(2, 2)).sum() * 0.5 + x, fake(4)) == {}


def test_a_collective_on_nccl_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturable, "_runs_on_nccl", lambda node: True)
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    x.meta["example_value"] = node.meta["example_value"] = fake(4)
    graph.output(node)
    found = reasons(fx.GraphModule(torch.nn.Module(), graph), "cuda", Marks())
    assert "collective" not in rules(found)


# -- cut_ops and capturable_ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "aten::relu",
        "aten::relu.default",
        torch.ops.aten.relu,
        torch.ops.aten.relu.default,
        torch.relu,
    ],
    ids=["name", "overload's name", "packet", "overload", "function"],
)
def test_an_op_is_cut_however_it_is_named(name: Any) -> None:
    found = cuts(lambda x: torch.relu(x * 2) + 1, ones(4), cut=[name])
    assert {node: reason.rule for node, reason in found.items()} == {"relu": "cut_ops"}
    assert str(found["relu"]) == "relu is in cut_ops"


def test_a_name_finds_an_op_behind_any_spelling() -> None:
    found = cuts(lambda x: (x.relu(), F.relu(x), torch.relu(x), F.gelu(x)), ones(4), cut=["aten::relu"])
    assert len(found) == 3


def test_an_op_inside_a_composite_call_is_found() -> None:
    assert list(cuts(lambda x: F.linear(x, x) + 1, ones(4, 4), cut=["aten::mm"])) == ["linear"]


def test_a_functional_is_cut_by_itself() -> None:
    assert list(cuts(lambda x: F.gelu(x) + x.relu(), ones(4), cut=[F.gelu])) == ["gelu"]


@pytest.mark.parametrize(
    "name",
    ["sgc_rules_test::attend", torch.ops.sgc_rules_test.attend, torch.ops.sgc_rules_test.attend.default, attend],
    ids=["name", "packet", "overload", "custom_op"],
)
def test_a_custom_op_is_cut_however_it_is_named(name: Any) -> None:
    (reason,) = cuts(lambda x: attend(x, x) + 1, ones(4), cut=[name]).values()
    assert reason.rule == "cut_ops"


def test_a_higher_order_operator_is_cut_by_itself() -> None:
    op = torch.ops.higher_order.tag_activation_checkpoint
    found = cuts(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), ones(4), cut=[op])
    assert rules(found) == {"cut_ops"}


def test_an_overloads_name_cuts_that_overload_only() -> None:
    def both(x: torch.Tensor) -> Any:
        return torch.ops.sgc_rules_test.scale(x, 2.0), torch.ops.sgc_rules_test.scale(x, x)

    assert len(cuts(both, ones(4), cut=["sgc_rules_test::scale"])) == 2
    assert len(cuts(both, ones(4), cut=["sgc_rules_test::scale.number"])) == 1
    assert len(cuts(both, ones(4), cut=[torch.ops.sgc_rules_test.scale.tensor])) == 1


def test_the_default_overload_cuts_no_other_one() -> None:
    # OpOverload.name() leaves ".default" out.
    def both(x: torch.Tensor) -> Any:
        return x.sum(), x.sum(0)

    assert len(cuts(both, ones(4, 4), cut=["aten::sum.default"])) == 1
    assert len(cuts(both, ones(4, 4), cut=[torch.ops.aten.sum.default])) == 1


def test_what_is_capturable_by_the_users_word_is_not_cut() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(hosted(x), x, x)

    x = ones(1, 2, 6, 8)
    assert rules(cuts(model, x)) == {"attention", "cudagraph_unsafe"}
    assert rules(cuts(model, x, keep=["sgc_rules_test::hosted"])) == {"attention"}
    assert cuts(model, x, keep=[hosted, F.scaled_dot_product_attention]) == {}


def test_rules_come_in_order_and_the_users_word_first() -> None:
    attention = F.scaled_dot_product_attention
    assert rules(cuts(lambda x: attention(x, x, x), ones(1, 2, 6, 8), cut=[attention])) == {"cut_ops"}


def test_as_strided_of_an_input_may_reach_beyond_its_copy() -> None:
    assert "as_strided" in rules(cuts(lambda x: x.as_strided((2,), (1,)) + 1, torch.ones(4)))
    assert not cuts(lambda x: (x * 2).as_strided((2,), (1,)) + 1, torch.ones(4))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_cut() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x * 2, 0.1, 0, torch.quint8)

    assert "quantised" in rules(cuts(fn, torch.ones(4)))


@pytest.mark.parametrize("op", [torch.relu, torch.add, torch.nn.functional.gelu, torch.mul])
def test_torchs_own_functions_name_the_op_however_the_model_calls_it(op: object) -> None:
    name = op.__name__
    fn = {
        "relu": lambda x: x.relu() + 1,
        "add": lambda x: x * (x + 1),
        "gelu": lambda x: torch.nn.functional.gelu(x) + 1,
        "mul": lambda x: x.mul(2) + 1,
    }[name]
    assert "cut_ops" in rules(cuts(fn, torch.ones(4), cut=(op,)))
