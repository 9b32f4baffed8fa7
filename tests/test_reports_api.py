"""What users call and get back: entry point, options, containers, keywords, modules, copies; reported cases by id."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from test_backend import graphs, only_graphs_of_this_test, same

import sgc_backend
from sgc_backend.config import Options
from sgc_backend.devices import device_of
from sgc_backend.pools import pool_of

__all__ = ["only_graphs_of_this_test"]


gpu = pytest.mark.gpu


# -- found by name -----------------------------------------------------------------------------------------------------


FRESH = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
import torch
{first}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
compiled = torch.compile(model, backend="sgc_piecewise", options={{"inner": "eager"}})
with torch.no_grad():
    for n in (2, 2, 3, 3, 3):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), model(x))
    same = torch.compile(model, backend="sgc_piecewise", options={{"inner": "eager"}})
    assert torch.equal(same(x), model(x))
assert torch._dynamo.list_backends().count("sgc_piecewise") == 1
import sgc_backend
print(sum(sum(of["replayed"].values()) for of in sgc_backend.stats().values()) > 0)
"""


# AP01
@pytest.mark.parametrize(
    ("first", "emulated"),
    [("", True), ("import sgc_backend", False), ("torch._dynamo.list_backends(); torch._dynamo.reset()", True)],
)
def test_a_fresh_process_finds_the_backend_by_name(first: str, emulated: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "SGC_DEVICE"}
    if emulated:
        environment["SGC_DEVICE"] = "emulated"
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(first=first)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # Where nothing can be captured it runs all the same, and warns of nothing.
    assert done.stdout.strip() == str(emulated)


# AP01
def test_looking_up_does_not_register_and_a_callable_is_the_same_backend() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    found = [lookup_backend("sgc_piecewise") for _ in range(3)]
    assert all(f is found[0] for f in found)
    assert torch._dynamo.list_backends().count("sgc_piecewise") == 1
    assert found[0].__module__ == sgc_backend.sgc_piecewise.__module__


# -- options -----------------------------------------------------------------------------------------------------------


def with_options(options: dict[str, Any], body: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    model = Model(body or (lambda m, x: m.b(ops.double(m.a(x)))), a=lin(), b=lin())
    call = torch.compile(
        model, backend="sgc_piecewise", dynamic=kwargs.pop("dynamic", True), options={"inner": "eager", **options}
    )
    return call, model


_alive: list[Any] = []  # a model that dies takes its recordings along


def run(call: Any, model: Any, *sizes: int) -> list[torch.Tensor]:
    _alive[:] = [call, model]
    results = []
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(n, D)
            results.append(call(x))
            torch.testing.assert_close(results[-1], model(x))
    return results


def the_graph() -> Any:
    (graph,) = graphs()
    return graph


def _capture_sizes() -> None:
    run(*with_options({"capture_sizes": [4, 6]}), 4, 4, 5, 5, 6, 6)
    assert set(the_graph().plans) == {(4,), (6,)}


def _max_recordings() -> None:
    run(*with_options({"max_recordings": 1, "capture_sizes": None}), 4, 4, 5, 5, 6, 6)
    assert len(the_graph().plans) == 1


def _cut_ops() -> None:
    run(*with_options({"cut_ops": ["sgc_test::double"]}), 4, 4)
    assert len(the_graph().split.cuts) == 1


def _capturable_ops() -> None:
    body = lambda m, x: m.b(torch.ops.sgc_test.says_unsafe(m.a(x)))  # noqa: E731
    run(*with_options({"capturable_ops": ["sgc_test::says_unsafe"]}, body), 4, 4)
    assert not the_graph().split.cuts


def _says_unsafe(x: torch.Tensor) -> torch.Tensor:
    return x + 2


# An op that is cut by default, because it says that it can't be captured.
torch.library.define("sgc_test::says_unsafe", "(Tensor x) -> Tensor", tags=(torch._C.Tag.cudagraph_unsafe,))
torch.library.impl("sgc_test::says_unsafe", "CompositeExplicitAutograd", _says_unsafe)
torch.library.register_fake("sgc_test::says_unsafe", torch.empty_like)


def _inner() -> None:
    seen: list[Any] = []
    run(*with_options({"inner": lambda gm, inputs: (seen.append(gm), gm.forward)[1], "pad": "never"}), 4, 4)
    assert len(seen) == 1


def _pad() -> None:
    run(*with_options({"pad": "never", "capture_sizes": [8]}), 7, 7, 8, 8)
    assert set(the_graph().plans) == {(8,)}


def _max_padding_ratio() -> None:
    run(*with_options({"max_padding_ratio": 1.0, "capture_sizes": [8]}), 7, 7, 8, 8)
    assert set(the_graph().plans) == {(8,)}


def _outputs() -> None:
    results = run(*with_options({"outputs": "static", "capture_sizes": [4]}), 4, 4, 4)
    assert results[1].data_ptr() == results[2].data_ptr()


def _capture() -> None:
    run(*with_options({"capture": "session"}), 4, 4, 4)
    assert not the_graph().plans


def _strict() -> None:
    call, model = with_options({"strict": True, "capture_sizes": [4]})
    run(call, model, 4, 4)
    with pytest.raises(sgc_backend.StrictError, match=r"no.* capture size"), torch.no_grad():
        call(torch.randn(5, D))


def _share_executables() -> None:
    families: list[Any] = []

    class Executables:
        graphs = alive = 0

        def worth(self, family: Any) -> bool:
            families.append(family)
            return False

    pool = pool_of(device_of(sgc_backend.emulated), None)
    pool.executables = Executables()  # the emulated device has none
    run(*with_options({}), 4, 4)
    assert not families
    run(*with_options({"share_executables": True}), 4, 4)
    assert families


def _device_module() -> None:
    os.environ.pop("SGC_DEVICE", None)  # put back by the fixture that set it
    run(*with_options({"device_module": sgc_backend.emulated}), 4, 4)
    assert the_graph().plans


def _lane() -> None:
    run(*with_options({"lane": "draft"}), 4, 4)
    (plan,) = the_graph().plans[(4,)]
    assert plan.pool.lane == "draft"


EFFECTS = {
    f.__name__[1:]: f
    for f in (
        _capture_sizes,
        _max_recordings,
        _cut_ops,
        _capturable_ops,
        _inner,
        _pad,
        _max_padding_ratio,
        _outputs,
        _capture,
        _share_executables,
        _strict,
        _device_module,
        _lane,
    )
}


# AP02
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Options)])
def test_every_option_that_torch_compile_passes_on_takes_effect(name: str) -> None:
    EFFECTS[name]()


# AP02
def test_two_models_alive_together_keep_their_own_options() -> None:
    pairs = [
        with_options({"cut_ops": ["sgc_test::double"], "capture_sizes": [4]}),
        with_options({"outputs": "static", "capture_sizes": [5]}, lambda m, x: m.b(ops.double(m.a(x)))),
    ]
    for _ in range(3):
        for call, model in pairs:
            run(call, model, 4, 5)
    first, second = graphs()
    assert (len(first.split.cuts), len(second.split.cuts)) == (1, 0)
    _alive.append(pairs)
    assert (set(first.plans), set(second.plans)) == ({(4,)}, {(5,)})
    assert (first.options.outputs, second.options.outputs) == ("clone", "static")


# AP02
def test_one_model_compiled_twice_with_other_options_runs_with_each() -> None:
    model = Model(lambda m, x: m.b(ops.double(m.a(x))), a=lin(), b=lin())
    calls = [
        torch.compile(model, backend="sgc_piecewise", dynamic=False, options={"inner": "eager", "cut_ops": cut_ops})
        for cut_ops in ([], ["sgc_test::double"])
    ]
    with torch.no_grad():
        for _ in range(3):
            for call in calls:
                x = torch.randn(4, D)
                same(call(x), model(x))
    assert sorted(len(g.split.cuts) for g in graphs()) == [0, 1]


# AP02
@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"options": {"capture_size": [4]}}, "unknown option capture_size; valid: capture_sizes"),
        ({"options": {"Pad": "auto"}}, "unknown option Pad"),
        ({"options": {"strict": "yes"}}, "strict must be True or False, got 'yes'"),
        ({"options": {"triton.cudagraphs": True}}, "unknown option triton.cudagraphs"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' is not supported by sgc_piecewise; modes configure"),
        ({"mode": "max-autotune-no-cudagraphs"}, "mode='max-autotune-no-cudagraphs' is not supported"),
    ],
)
def test_what_is_wrong_with_options_is_said_at_the_first_call_and_at_every_one(kwargs: Any, says: str) -> None:
    model = Model(lambda m, x: m.a(x), a=lin())
    x = torch.randn(4, D)
    with torch.no_grad():
        call = torch.compile(model, backend="sgc_piecewise", **kwargs)
        for _ in range(2):
            with pytest.raises(ValueError, match=says.replace(".", r"\.")) as raised:
                call(x)
            assert isinstance(raised.value, sgc_backend.OptionError)
        good = torch.compile(model, backend="sgc_piecewise", options={"inner": "eager"})
        same(good(x), model(x))
