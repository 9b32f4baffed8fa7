"""Reported cases: state and copies of what was compiled or wrapped."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import device, module
from test_reports import captured
from torch import nn

import sgc_backend
from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, TcPiecewiseCudaGraphBackend

__all__ = ["only_graphs_of_this_test"]


# -- modules -----------------------------------------------------------------------------------------------------------


class Loads(nn.Module):
    """Overrides how its state is saved and loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.loaded = lin(), 0
        self.register_buffer("cache", torch.zeros(4, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(1)
        return ops.double(self.a(x)) + self.cache[: x.shape[0]]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"extra": torch.ones(1), **super().state_dict(*args, **kwargs)}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return super().load_state_dict({k: v for k, v in state.items() if k != "extra"}, *args, **kwargs)


# AP07
@device
def test_nothing_of_ours_is_in_a_modules_state(device: str) -> None:
    model, reference = Loads().to(device), Loads().to(device)
    reference.load_state_dict(model.state_dict())
    plain = torch.compile(copy.deepcopy(model), backend="eager")
    call = compiled(model, dynamic=False)
    seen = [set(model.state_dict()), set(model.__dict__), [n for n, _ in model.named_modules()]]
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, D, device=device)
            same(call(x), reference(x))
            assert seen == [set(model.state_dict()), set(model.__dict__), [n for n, _ in model.named_modules()]]
        assert list(call.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in call.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert next(call.buffers()) is model.cache
        # The next replay reads what was loaded, be it through the compiled module or not.
        fresh = Loads().to(device)
        model.load_state_dict(fresh.state_dict())
        reference.load_state_dict(fresh.state_dict())
        assert (model.loaded, reference.loaded) == (1, 2)
        for _ in range(3):
            x = torch.randn(4, D, device=device)
            same(call(x), reference(x))
        again = {k: torch.randn_like(v) for k, v in call.state_dict().items()}
        call.load_state_dict(again)
        plain.load_state_dict(again)
        for _ in range(3):
            x = torch.randn(4, D, device=device)
            same(call(x), plain(x))
        call.foo = 1
        assert model.foo == 1
        assert call.cache is model.cache
        del call.foo
        assert not hasattr(model, "foo")
    assert total("replayed") > 3


# AP07
@device
@pytest.mark.parametrize("kind", ["whole", "tc_piecewise"])
def test_a_wrapper_adds_nothing_to_the_model_that_it_records(kind: str, device: str) -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin()).to(device)
    torch.compile(model, backend="eager")  # leaves a mark of torch's own
    before = [list(model.state_dict()), set(model.__dict__), [n for n, _ in model.named_modules()]]
    x = torch.randn(8, D, device=device)
    if kind == "whole":
        backend = captured(device, lambda: model(x[:4]))
    else:
        backend = TcPiecewiseCudaGraphBackend(
            model, capture_sizes=[4], options={"inner": "eager", "cut_ops": CUTS}, device_module=module(device)
        )
        with torch.no_grad(), backend.capture_session():
            backend.capture_one(4, lambda: backend.compiled(x[:4]))
    assert before == [list(model.state_dict()), set(model.__dict__), [n for n, _ in model.named_modules()]]
    with torch.no_grad():
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
        same(backend.replay(4), model(x[:4]))
    backend.cleanup()


# -- copies ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = lin()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return ops.double(self.a(x)) * self.count


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


# AP08
@device
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", COPIERS)
def test_a_copy_of_a_compiled_model_has_weights_and_recordings_of_its_own(
    how: str, in_place: bool, device: str
) -> None:
    model = Small().to(device)
    options = {"inner": "eager", "cut_ops": CUTS}
    if in_place:
        model.compile(backend=sgc_backend.sgc_piecewise, dynamic=False, options=options)
        call: Any = model
    else:
        call = torch.compile(model, backend=sgc_backend.sgc_piecewise, dynamic=False, options=options)
    with torch.no_grad():
        for _ in range(3):
            call(torch.randn(4, D, device=device))
        copied = COPIERS[how](call)
        inner = getattr(copied, "_orig_mod", copied)
        assert inner.a.weight.data_ptr() != model.a.weight.data_ptr()
        same(inner.state_dict(), model.state_dict())
        inner.a.weight.mul_(2)
        references = []
        for of in (model, inner):
            reference = Small().to(device)
            reference.load_state_dict(of.state_dict())
            references.append(reference)
        for _ in range(5):
            x = torch.randn(4, D, device=device)
            for mine, reference in zip((call, copied), references, strict=True):
                same(mine(x), reference(x))
        del call, model
        for _ in range(3):
            x = torch.randn(4, D, device=device)
            same(copied(x), references[1](x))
    assert total("replayed") > 6


def in_a_session(backend: Any, fn: Callable[[], Any]) -> None:
    with warnings.catch_warnings(), torch.no_grad(), backend.capture_session():
        warnings.simplefilter("ignore", UserWarning)  # a breakable callable that breaks nowhere
        backend.capture_one(4, fn)


# AP08
@device
@pytest.mark.parametrize("how", ["copy", *COPIERS])
@pytest.mark.parametrize("kind", ["whole", "breakable", "tc_piecewise"])
def test_a_copy_of_a_wrapper_has_its_settings_and_nothing_recorded(kind: str, how: str, device: str) -> None:
    model = Small().to(device)
    x = torch.randn(8, D, device=device)
    settings: dict[str, Any] = {"device_module": module(device), "lane": "draft", "name": "mine"}
    if kind == "tc_piecewise":
        options = {"inner": "eager", "cut_ops": CUTS}
        backend: Any = TcPiecewiseCudaGraphBackend(model, capture_sizes=[4], options=options, strict=True, **settings)
    elif kind == "breakable":
        backend = BreakableCudaGraphBackend(**settings, strict=False, one_break=False)
    else:
        backend = FullCudaGraphBackend(**settings)

    def forward(of: Any) -> Callable[[], Any]:
        return (lambda: of.compiled(x[:4])) if kind == "tc_piecewise" else (lambda: model(x[:4]))

    in_a_session(backend, forward(backend))
    copied = {"copy": copy.copy, **COPIERS}[how]({"engine": backend})["engine"] if how != "copy" else copy.copy(backend)
    assert type(copied) is type(backend)
    assert (copied.lane, copied.device.type) == ("draft", backend.device.type)
    assert not copied.can_run(4)
    with pytest.raises(sgc_backend.NotCapturedError, match="nothing is recorded under key 4"):
        copied.replay(4)
    copied.cleanup()  # takes nothing from the original
    in_a_session(copied, forward(copied))
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(8, D))
            for each in (backend, copied):
                out = each.replay(4).clone()
                of = each.compiled._orig_mod if kind == "tc_piecewise" else model
                torch.testing.assert_close(out, ops.double(of.a(x[:4])) * of.count)
        copied.cleanup()
        out = backend.replay(4).clone()
        torch.testing.assert_close(out, ops.double(model.a(x[:4])) * model.count)
    backend.cleanup()


# AP08
def test_an_engine_that_holds_a_wrapper_and_a_module_can_be_copied() -> None:
    class Engine:
        def __init__(self) -> None:
            self.model, self.decode = Small(), FullCudaGraphBackend(sgc_backend.emulated)
            self.x = torch.randn(4, D)

        def capture(self) -> None:
            in_a_session(self.decode, lambda: self.model(self.x))

        def step(self) -> torch.Tensor:
            return self.decode.replay(4) if self.decode.can_run(4) else self.model(self.x)

    engine = Engine()
    engine.capture()
    twin = copy.deepcopy(engine)
    with torch.no_grad():
        twin.model.a.weight.zero_()
        for captured_too in (False, True):
            if captured_too:
                twin.capture()
            for each in (engine, twin, engine, twin):
                out = each.step().clone()
                torch.testing.assert_close(out, ops.double(each.model.a(each.x)) * each.model.count)
    for each in (engine, twin):
        each.decode.cleanup()
