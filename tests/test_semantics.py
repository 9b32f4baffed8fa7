"""What a model means without us it means with us: modes, modules, inputs of every kind, and what aliases what."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aliasing import calls_as_eager
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import sgc_backend

__all__ = ["only_graphs_of_this_test"]

gpu = pytest.mark.gpu


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device)


def mlp(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(ops.double(m.a(x)).relu())


def of(body: Callable[..., Any], device: str) -> Model:
    return Model(body, a=lin(), b=lin()).to(device)


# -- instances that share code -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(d, d), nn.Parameter(torch.randn(d))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return ops.double(self.a(x)) * self.scale + self.count


@device
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_instances_keep_their_weights_and_their_state_apart(dynamic: bool | None, device: str) -> None:
    models = [Block().to(device) for _ in range(3)]
    references = copy.deepcopy(models)
    calls = [compiled(m, dynamic=dynamic) for m in models]
    order = random.Random(0)
    with torch.no_grad():
        for _ in range(40):
            k = order.randrange(3)
            x = rand(order.choice([3, 4]), D, device=device)
            same(calls[k](x), references[k](x))
            for mine, theirs in zip(models, references, strict=True):
                same(mine.count, theirs.count)
    assert total("replayed") > 20


@device
def test_instances_with_tied_weights_and_one_that_dies(device: str) -> None:
    first, second = Block().to(device), Block().to(device)
    second.a.weight = first.a.weight
    calls = [compiled(m, dynamic=False) for m in (first, second)]
    with torch.no_grad():
        for k in range(8):
            x = rand(4, D, device=device)
            for call, model in zip(calls, (first, second), strict=True):
                count = model.count.clone()
                same(call(x), ops.double(model.a(x)) * model.scale + (count + 1))
            if k == 4:
                first.a.weight.mul_(0.5)
        del first, model
        call = calls.pop(0)
        del call
        for _ in range(3):
            x = rand(4, D, device=device)
            count = second.count.clone()
            same(calls[0](x), ops.double(second.a(x)) * second.scale + (count + 1))


@device
def test_blocks_of_one_model_that_are_compiled_one_by_one(device: str) -> None:
    model = nn.Sequential(*(Block() for _ in range(4))).to(device)
    reference = copy.deepcopy(model)
    for block in model:
        block.compile(backend=sgc_backend.sgc_piecewise, dynamic=False, options={"inner": "eager", "cut_ops": CUTS})
    with torch.no_grad():
        for _ in range(5):
            x = rand(4, D, device=device)
            same(model(x), reference(x))
    assert list(model.state_dict()) == list(reference.state_dict())
    assert total("replayed") >= 12


# -- modes -------------------------------------------------------------------------------------------------------------


@device
def test_autocast_on_and_off_between_calls(device: str) -> None:
    model = of(mlp, device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(18):
            x = rand(4, D, device=device)
            dtype = torch.bfloat16 if k % 6 < 4 else torch.float16
            with torch.autocast(device, dtype=dtype, enabled=bool(k % 2)):
                got, wanted = call(x), model(x)
            assert got.dtype == wanted.dtype
            same(got, wanted)
    assert total("replayed") >= 9


@device
def test_autocast_sees_weights_that_changed(device: str) -> None:
    model = of(mlp, device)
    call = compiled(model, dynamic=False)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(6):
            x = rand(4, D, device=device)
            got = call(x)
            torch.clear_autocast_cache()
            same(got, model(x))
            model.a.weight.add_(0.25)
    assert total("replayed") == 5


@device
def test_train_and_eval_switch_dropout(device: str) -> None:
    model = Model(lambda m, x: m.drop(ops.double(m.a(x))), a=lin(), drop=nn.Dropout(0.5)).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(16):
            model.train(k % 4 >= 2)
            x = rand(64, D, device=device)
            got, whole = call(x), ops.double(model.a(x))
            if model.training:
                assert 0.3 < (got == 0).float().mean() < 0.7
                same(got, torch.where(got == 0, 0.0, whole * 2))
            else:
                same(got, whole)
    assert total("replayed") >= 12


@device
def test_modes_of_torch_that_change_between_calls(device: str) -> None:
    model = of(mlp, device)
    call = compiled(model, dynamic=False)
    x = rand(4, D, device=device)
    before = torch.get_default_dtype()
    with torch.no_grad():
        for k in range(8):
            torch.use_deterministic_algorithms(k % 4 >= 2 and device == "cpu")  # cuBLAS would want a workspace for it
            torch.set_default_dtype(torch.float64 if k % 2 else torch.float32)
            try:
                same(call(x), model(x))
            finally:
                torch.use_deterministic_algorithms(False)
                torch.set_default_dtype(before)
    assert total("replayed") >= 2


# -- hooks -------------------------------------------------------------------------------------------------------------


@device
def test_hooks_that_come_and_go_act_as_in_eager(device: str) -> None:
    model = of(mlp, device)
    reference = copy.deepcopy(model)
    call = compiled(model, dynamic=False)

    def all_same(times: int = 3) -> None:
        for _ in range(times):
            x = rand(4, D, device=device)
            same(call(x), reference(x))

    with torch.no_grad():
        all_same()
        for register in (
            lambda m: m.a.register_forward_hook(lambda mod, args, out: out + 1),
            lambda m: m.a.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
            lambda m: m.b.register_forward_hook(lambda mod, args, out: ops.double(out)),
            lambda m: m.register_forward_hook(lambda mod, args, out: out.neg()),
            lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0].flip(0),)),
        ):
            handles = [register(m) for m in (model, reference)]
            # Whether Dynamo sees a hook that is added behind the first call is its own affair.
            torch._dynamo.reset()
            all_same()
            for handle in handles:
                handle.remove()
            torch._dynamo.reset()
            all_same()
    assert total("replayed") > 0


# -- Dynamo's switches -------------------------------------------------------------------------------------------------


@device
def test_stances_are_obeyed(device: str) -> None:
    model = of(mlp, device)
    call = compiled(model, dynamic=False)
    x = rand(4, D, device=device)
    with torch.no_grad():
        with torch.compiler.set_stance("force_eager"):
            for _ in range(3):
                same(call(x), model(x))
        assert not graphs()
        for _ in range(3):
            same(call(x), model(x))
        before = total("replayed")
        with torch.compiler.set_stance("fail_on_recompile"):
            same(call(x), model(x))
            with pytest.raises(RuntimeError, match="recompil"):
                call(rand(5, D, device=device))
        with torch.compiler.set_stance("eager_on_recompile"):
            y = rand(5, D, device=device)
            same(call(y), model(y))
            same(call(x), model(x))
        with torch.compiler.set_stance("force_eager"):
            same(call(x), model(x))
        same(call(x), model(x))
    assert total("replayed") == before + 3
    assert len(graphs()) == 1


@device
@pytest.mark.parametrize("what", ["dynamo", "ours", "both"])
def test_after_a_reset_calls_record_again(what: str, device: str) -> None:
    model = Block().to(device)
    reference = copy.deepcopy(model)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            before = total("replayed")
            for _ in range(3):
                x = rand(4, D, device=device)
                same(call(x), reference(x))
            assert total("replayed") >= before + 2
            if what != "ours":
                torch._dynamo.reset()
            if what != "dynamo":
                sgc_backend.reset()


@device
def test_disabled_functions_and_nested_compiled_ones(device: str) -> None:
    inner = of(mlp, device)
    inner_call = compiled(inner, dynamic=False)

    @torch.compiler.disable
    def by_itself(x: torch.Tensor) -> torch.Tensor:
        return inner_call(x) + 1

    model = of(lambda m, x: m.b(by_itself(m.a(x))), device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(5):
            x = rand(4, D, device=device)
            same(call(x), model.b(inner(model.a(x)) + 1))
    assert total("replayed") >= 8


# -- inputs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float = 1.0


def _reads_a_batch(m: Any, batch: Batch, more: dict[str, Any] | None = None) -> torch.Tensor:
    h = ops.double(m.a(batch.x)) * batch.scale
    if batch.mask is not None:
        h = h.masked_fill(batch.mask, 0.0)
    if more is not None:
        for value in more.values():
            h = h if value is None else h + value
    return m.b(h)


@device
@pytest.mark.parametrize("dynamic", [None, True])
def test_optional_inputs_that_come_and_go(dynamic: bool | None, device: str) -> None:
    model = of(_reads_a_batch, device)
    x = lambda: rand(4, D, device=device)  # noqa: E731
    makers: list[Callable[[], tuple[Any, ...]]] = [
        lambda: (Batch(x()),),
        lambda: (Batch(x(), x() > 0),),
        lambda: (Batch(x(), None, 2.0), {"a": x(), "b": None}),
        lambda: (Batch(x(), x() > 0, 0.5), {"b": x(), "a": x()}),
        lambda: (Batch(x()), {}),
        lambda: (Batch(x()), None),
    ]
    with torch._dynamo.config.patch(recompile_limit=64):
        call = compiled(model, dynamic=dynamic)
        calls_as_eager(call, model, lambda k: makers[k // 3 % len(makers)](), 36)
    assert total("replayed") > 10


ODD: dict[str, Callable[[str], tuple[torch.Tensor, ...]]] = {
    "0-dim": lambda d: (rand(4, D, device=d), torch.tensor(2.5, device=d)),
    "0-dim host": lambda d: (rand(4, D, device=d), torch.tensor(random.random())),
    "0-dim host int": lambda d: (rand(4, D, device=d), torch.tensor(random.randrange(9))),
    "one element": lambda d: (rand(4, D, device=d), rand(1, device=d)),
    "zero size": lambda d: (rand(4, D, device=d), rand(0, D, device=d).sum(0)),
    "empty": lambda d: (rand(0, D, device=d), rand(1, D, device=d)),
    "expanded": lambda d: (rand(1, D, device=d).expand(4, D), rand(1, device=d).expand(D)),
    "overlapping": lambda d: (rand(D + 3, device=d).unfold(0, D, 1), rand(D, device=d)),
    "unaligned": lambda d: (rand(4 * D + 1, device=d)[1:].view(4, D), rand(D + 3, device=d)[3:]),
    "strided": lambda d: (rand(D, 8, device=d).t()[::2], rand(2 * D, device=d)[::2]),
    "views of one storage": lambda d: (lambda t: (t[:4], t[5]))(rand(6, D, device=d)),
    "the same twice": lambda d: (lambda t: (t, t))(rand(4, D, device=d)),
    "overlapping views": lambda d: (lambda t: (t[:4], t[3]))(rand(6, D, device=d)),
    "requires grad": lambda d: (rand(4, D, device=d).requires_grad_(), rand(D, device=d)),
    "bool": lambda d: (rand(4, D, device=d), rand(D, device=d) > 0),
    "int": lambda d: (rand(4, D, device=d), torch.arange(D, device=d)),
    "parameter": lambda d: (nn.Parameter(rand(4, D, device=d)), nn.Parameter(rand(D, device=d))),
    "conjugate": lambda d: (rand(4, D, device=d), torch.randn(D, dtype=torch.complex64, device=d).conj().real),
    "negated": lambda d: (rand(4, D, device=d), torch._neg_view(rand(D, device=d))),
}


def _adds(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return m.a(x + y) * y, ops.double(x) + y


def _writes_the_first(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    h = m.a(x + y)
    x.mul_(2)
    return h + y, ops.double(x)


NOT_WRITABLE = {"expanded", "overlapping", "requires grad", "parameter"}


@device
@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("body", [_adds, _writes_the_first], ids=lambda f: f.__name__.strip("_"))
def test_inputs_of_every_kind(body: Any, name: str, dynamic: bool | None, device: str) -> None:
    if body is _writes_the_first and name in NOT_WRITABLE:
        pytest.skip("eager refuses to write it")
    if body is _writes_the_first and name == "0-dim host" and device == "cuda":
        pytest.skip("covered by reading")
    model = of(body, device)
    call = compiled(model, dynamic=dynamic)
    calls_as_eager(call, model, lambda k: ODD[name](device), 5)
    # And behind a recording for plain inputs of the same shapes.
    torch._dynamo.reset()
    call = compiled(model, dynamic=dynamic)

    def plain_first(k: int) -> tuple[torch.Tensor, ...]:
        odd = ODD[name](device)
        return odd if k >= 3 else tuple(t.detach().clone().contiguous() for t in odd)

    calls_as_eager(call, model, plain_first, 8)
    assert not [c for g in graphs() for c in g.counters.failures if "overlaps itself" not in c]


@gpu
def test_host_tensors_that_are_not_zero_dimensional_are_right_on_a_gpu() -> None:
    model = of(lambda m, x, y: m.a(x) + y.to(x.device) * 2, "cuda")
    call = compiled(model, dynamic=False)
    calls_as_eager(call, model, lambda k: (rand(4, D, device="cuda"), torch.randn(4, D)), 6)
    assert total("replayed") > 0


class Tagged(torch.Tensor):
    """A subclass with torch functions of its own, and no storage of another kind."""


@pytest.mark.parametrize("make", [lambda: TwoTensor(torch.ones(4), torch.full((4,), 5.0))], ids=["wrapper"])
def test_wrapper_subclasses_run_uncaptured_with_their_cause(make: Any) -> None:
    for body in (lambda x: x * 2, lambda x: (x.sin() + 1, x)):
        torch._dynamo.reset()
        call = compiled(body, dynamic=False)
        with torch.no_grad():
            for _ in range(3):
                x = make()
                got, wanted = call(x), body(x)
                for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, wanted)), strict=True):
                    assert type(a) is type(b)
                    same(a.a, b.a)
                    same(a.b, b.b)
    assert all("tensor subclass" in g.cause for g in graphs())


def test_a_subclass_that_only_adds_a_class_is_right_and_stays_what_it_is() -> None:
    model = of(mlp, "cpu")
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(8):
            x = torch.randn(4, D)
            x = x.as_subclass(Tagged) if k % 4 >= 2 else x
            got, wanted = call(x), model(x)
            assert type(got) is type(wanted)
            same(got.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))


@device
def test_sparse_and_quantised_inputs_are_right_or_uncaptured(device: str) -> None:
    model = of(lambda m, x, s: m.a(x) + torch.sparse.mm(s, m.b(x)), device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x, s = rand(4, D, device=device), torch.eye(4, device=device).to_sparse()
            torch.testing.assert_close(call(x, s), model(x, s))


# -- results -----------------------------------------------------------------------------------------------------------


@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: ops.double(m.a(x)) * 0.25,
        lambda m, x: m.a(x).tanh(),
        lambda m, x: ops.double(x) * 0.5,
        lambda m, x: m.a(x)[1:].repeat(2, 1)[:4] * 0.5,
        lambda m, x: (x.mul_(0.5), ops.add_one_(x), x)[2],
    ],
    ids=["through a cut", "piece alone", "cut first", "a view", "in place"],
)
def test_a_result_fed_back_as_the_next_input(body: Any, outputs: str, device: str) -> None:
    model = of(body, device)
    call = compiled(model, outputs=outputs, dynamic=False)
    with torch.no_grad():
        x = rand(4, D, device=device)
        y = x.clone()
        for _ in range(8):
            x, y = call(x), model(y)
            same(x, y)
    if outputs == "clone" or "add_one" not in body.__code__.co_names:
        assert total("replayed") >= 6


@device
def test_two_models_that_feed_each_other(device: str) -> None:
    first, second = of(mlp, device), of(lambda m, x, y: (m.a(x) * 0.1 + y * 0.1, ops.double(y) * 0.1), device)
    for outputs in ("clone", "static"):
        torch._dynamo.reset()
        calls = [compiled(m, outputs=outputs, dynamic=False) for m in (first, second)]
        with torch.no_grad():
            x = y = rand(4, D, device=device)
            for _ in range(6):
                h, g = calls[0](x), first(y)
                same(h, g)
                a, b = calls[1](h, x)
                c, e = second(g, y)
                same((a, b), (c, e))
                x, y = a + b, c + e
    assert total("replayed") >= 8


@device
def test_the_same_weights_in_and_out(device: str) -> None:
    def fn(m: Any, w: torch.Tensor, x: torch.Tensor) -> Any:
        return w, F.linear(x, w), m.a.weight, w.t(), ops.double(w)[:2]

    model = of(fn, device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        for k in range(9):
            w = model.a.weight if k % 3 else model.b.weight
            x = rand(4, D, device=device)
            got, wanted = call(w, x), model(w, x)
            same(got, wanted)
            assert got[0] is w
            assert got[2] is model.a.weight
            assert got[3].data_ptr() == w.data_ptr()
    assert total("replayed") >= 3
