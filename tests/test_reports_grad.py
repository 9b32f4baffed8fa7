"""Gradients: asked for, not asked for, and one after the other; reported cases, named by their ids."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from torch import nn
from torch.autograd import forward_ad

__all__ = ["only_graphs_of_this_test"]

gpu = pytest.mark.gpu
pytestmark = [
    pytest.mark.filterwarnings("ignore:sgc_piecewise captures inference only"),
    # Dynamo itself makes one to trace a custom function.
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]
# torch scripts its formulas on the first use.
first_forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
inners = pytest.mark.parametrize("inner", ["eager", "aot_eager"])

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "set_grad_enabled off": lambda: torch.set_grad_enabled(False),
    "grad": contextlib.nullcontext,
    "grad inside no_grad": torch.enable_grad,
}


ORDERS = [
    *itertools.permutations(["inference", "no_grad", "grad"]),
    ("set_grad_enabled off", "grad inside no_grad", "inference"),
    ("grad inside no_grad", "inference", "no_grad"),
]


def two_layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(F.gelu(m.a(x)) * 2) @ m.a.weight.t() + x


def pair(body: Any = two_layers, device: str = "cpu") -> tuple[Model, Model]:
    model = Model(body, a=lin(), b=lin()).to(device)
    return model, copy.deepcopy(model)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted)


def step(call: Any, model: Any, reference: Any, mode: str, device: str) -> None:
    """One call in ``mode``: value, what autograd knows of it, and gradients are those of eager."""
    outer = torch.no_grad() if mode == "grad inside no_grad" else contextlib.nullcontext()
    with outer, MODES[mode]():
        x = torch.randn(4, D, device=device)
        got, wanted = call(x), reference(x)
        close(got, wanted)
    assert (got.requires_grad, got.is_inference()) == (wanted.requires_grad, wanted.is_inference())
    if wanted.requires_grad:
        got.square().sum().backward()
        wanted.square().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            close(mine.grad, theirs.grad)


# GM01
@device
@inners
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_modes_in_any_order_each_give_what_they_give_in_eager(order: tuple[str, ...], inner: str, device: str) -> None:
    model, reference = pair(device=device)
    call = compiled(model, inner=inner, dynamic=False)
    for mode in [m for m in order for _ in range(3)] + list(order) * 2:
        step(call, model, reference, mode, device)
    off = [m for m in order if not m.startswith("grad")]
    # Each mode that computes no gradients is recorded by its second call; two such modes may share a graph.
    assert bool(total("replayed")) == bool(off)
    assert total("replayed") >= (3 if off else 0)


# GM01
@device
def test_an_inference_tensor_as_input_or_state_is_right_in_every_mode(device: str) -> None:
    model, reference = pair(lambda m, x: m.b(ops.double(m.a(x))) + m.cache[:4], device)
    with torch.inference_mode():
        made = torch.randn(4, D, device=device)
        model.cache, reference.cache = (torch.ones(64, D, device=device) for _ in range(2))
    call = compiled(model, dynamic=False)
    for mode in ["no_grad"] * 3 + ["inference"] * 3 + ["no_grad"] * 2:
        with MODES[mode]():
            for x in (made, torch.randn(4, D, device=device)):
                got, wanted = call(x), reference(x)
                same(got, wanted)
                assert got.is_inference() == wanted.is_inference()
    assert total("replayed") > 4


# GM01
@device
def test_results_of_no_grad_calls_can_be_trained_on(device: str) -> None:
    model, _ = pair(lambda m, x: m.b(ops.double(m.a(x))), device)
    call = compiled(model, dynamic=False)
    head = lin().to(device)
    for _ in range(4):
        x = torch.randn(4, D, device=device)
        with torch.no_grad():
            h = call(x)
        head.zero_grad()
        head(h).sum().backward()
        close(head.weight.grad, h.sum(0).expand(D, D))
        h.requires_grad_()  # it is the caller's own leaf
        (grad,) = torch.autograd.grad((h * h).sum(), h)
        close(grad, 2 * h)
    assert total("replayed") == 3


# GM03
@device
@inners
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_micro_batches_accumulate(set_to_none: bool, inner: str, device: str) -> None:
    model, reference = pair(device=device)
    call = compiled(model, inner=inner, dynamic=False)
    retained = 1 if inner == "eager" else None  # AOTAutograd gives up what a second backward would read
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with torch.no_grad():
        for _ in range(3):  # recordings are there before training starts
            call(torch.randn(4, D, device=device))
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        kept = []
        for micro in range(4):
            x = torch.randn(4, D, device=device)
            losses = [m(x).square().mean() for m in (call, reference)]
            for loss in losses:
                loss.backward(retain_graph=micro == retained)
            if micro == retained:
                for loss in losses:
                    loss.backward()
            kept.append([p.grad.clone() for p in model.parameters()])
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                close(mine.grad, theirs.grad)
        assert not torch.equal(kept[0][0], kept[-1][0])
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # what was trained in place is what the next replay reads
            x = torch.randn(4, D, device=device)
            close(call(x), reference(x))
    assert total("replayed") >= 5


class Doubled(torch.autograd.Function):
    """Backward is not what autograd would find by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 5 + x


def _custom_function(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return m.b(Doubled.apply(m.a(x))) + y


def _the_same_twice(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return m.a(x) * m.b(y)


def _checkpointed(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda h: m.b(F.gelu(m.a(h))), x, use_reentrant=False) + y


def _partly_frozen(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = m.a(x)
    return m.b(h) + y.detach()


def _written(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h.mul_(2)
    h[0] = y[0]
    return m.b(h)


# GM05
@device
@inners
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "body",
    [_custom_function, _the_same_twice, _checkpointed, _partly_frozen, _written],
    ids=lambda f: f.__name__.strip("_"),
)
def test_gradients_of_weights_and_inputs_are_eagers_and_nothing_is_captured(
    body: Any, twice: bool, inner: str, device: str
) -> None:
    model, reference = pair(body, device)
    call = compiled(model, inner=inner, dynamic=False)
    for _ in range(3):
        mine = [torch.randn(4, D, device=device, requires_grad=True) for _ in range(2)]
        theirs = [t.detach().clone().requires_grad_() for t in mine]
        if twice:
            mine, theirs = [mine[0]] * 2, [theirs[0]] * 2
        got, wanted = call(*mine), reference(*theirs)
        close(got, wanted)
        got.square().sum().backward()
        wanted.square().sum().backward()
        close([t.grad for t in mine], [t.grad for t in theirs])
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad)
    assert not total("captured")
    assert all("gradients are wanted" in g.cause for g in graphs())


# GM05
@pytest.mark.parametrize("inner", ["eager"])
def test_double_backward_where_the_inner_compiler_can_do_it(inner: str) -> None:
    model, reference = pair()
    call = compiled(model, inner=inner, dynamic=False)
    for _ in range(2):
        grads = []
        x = torch.randn(4, D)
        for m, fn in ((model, call), (reference, reference)):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(fn(leaf).pow(3).sum(), leaf, create_graph=True)
            grads.append(torch.autograd.grad(first.square().sum(), [leaf, m.a.weight]))
        close(*grads)


# GM05
@device
def test_one_warning_says_why_a_training_call_is_not_captured(device: str) -> None:
    model, _ = pair(device=device)
    call = compiled(model, inner="eager", dynamic=False)
    with pytest.warns(UserWarning, match=r"captures inference only.*torch\.no_grad\(\)") as seen:
        for _ in range(3):
            call(torch.randn(4, D, device=device))
    assert len(seen) == 1
    (graph,) = graphs()
    assert dict(graph.counters.uncaptured) == {graph.cause: 3}


# GM01
@device
def test_training_between_captured_calls_disturbs_none_of_them(device: str) -> None:
    torch.manual_seed(1)
    model, reference = pair(lambda m, x: m.b(ops.double(m.a(x)) if not torch.is_grad_enabled() else m.a(x) * 2), device)
    call = compiled(model, dynamic=False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference)]
    for k in range(12):
        x = torch.randn(4, D, device=device)
        if k % 3 == 2:
            for m, fn, optimizer in ((model, call, optimizers[0]), (reference, reference, optimizers[1])):
                optimizer.zero_grad()
                fn(x).square().mean().backward()
                optimizer.step()
                assert all(p.grad is not None for p in m.parameters())
        else:
            with torch.inference_mode() if k % 2 else torch.no_grad():
                close(call(x), reference(x))
    assert total("replayed") >= 5


# GM01
@device
def test_train_and_eval_are_two_graphs_that_both_stay_right(device: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5)).to(device)
    reference = copy.deepcopy(model)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(16):
            for m in (model, reference):
                m.train(k % 4 < 2)
            x = torch.randn(8, D, device=device)
            torch.manual_seed(k)
            got = call(x)
            torch.manual_seed(k)
            close(got, reference(x))
            close(model.state_dict(), reference.state_dict())  # running statistics are written once a call
    assert len(graphs()) == 2
    assert all(sum(g.counters.replayed.values()) == 7 for g in graphs())


@first_forward_mode
def test_forward_mode_gradients_come_from_uncaptured_calls_and_disturb_no_captured_ones() -> None:
    model, reference = pair(lambda m, x: F.gelu(m.b(m.a(x) * 2)))
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            x, tangent = torch.randn(4, D), torch.randn(4, D)
            for _ in range(2):
                same(call(x), reference(x))
            with forward_ad.dual_level():
                got, wanted = (forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))) for f in (call, reference))
                close(tuple(got), tuple(wanted))
                assert got.tangent is not None
    (graph,) = graphs()
    assert graph.counters.uncaptured["warm-up"] == 1
    assert [(cause, n) for cause, n in graph.counters.uncaptured.items() if "forward-mode" in cause] == [
        ("inside torch.autograd.forward_ad.dual_level(); a recording computes no forward-mode gradients", 3)
    ]
    assert total("replayed") == 5


@first_forward_mode
def test_forward_mode_gradients_of_weights_are_not_lost() -> None:
    def body(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight)) * 2

    call = compiled(body, dynamic=False)
    weight, tangent, x = torch.randn(D, D), torch.randn(D, D), torch.randn(4, D)
    torch._dynamo.mark_static_address(weight)
    for _ in range(3):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weight, tangent)
            torch._dynamo.mark_static_address(dual)
            got, wanted = (forward_ad.unpack_dual(f(dual, x)).tangent for f in (call, body))
            close(got, wanted)
        same(call(weight, x), body(weight, x))
    assert total("replayed") == 2
