"""What users call and get back: entry point, options, containers, keywords, modules, copies; reported cases by id."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import CUTS, D, Model, lin, ops
from test_backend import compiled, graphs, only_graphs_of_this_test, same, total
from test_injection import device, module
from test_reports import captured
from torch import nn
from torch.utils import _pytree as pytree

import sgc_backend
from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, TcPiecewiseCudaGraphBackend
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


# -- containers --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class One:
    x: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Two:
    x: torch.Tensor
    y: Any = None
    n: int = 3


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None = None


class Ordered(collections.OrderedDict):
    pass


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dict and a dataclass in one, as model outputs are."""

    x: torch.Tensor | None = None
    y: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Registered:
    def __init__(self, x: torch.Tensor, label: str) -> None:
        self.x, self.label = x, label


pytree.register_pytree_node(
    Registered, lambda r: ([r.x], r.label), lambda xs, label: Registered(xs[0], label), serialized_type_name="tests.Reg"
)

MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass of one": lambda h: One(h),
    "dataclass of two": lambda h: Two(h, h * 2),
    "dataclass inside": lambda h: Two(h, [One(h + 1), {"k": One(h)}]),
    "named tuple of one": lambda h: Pair(h),
    "named tuple": lambda h: Pair(h, h * 2),
    "ordered dict": lambda h: collections.OrderedDict(b=h, a=h * 2),
    "ordered dict of one": lambda h: collections.OrderedDict(only=h),
    "dict by int": lambda h: {3: h, 1: h * 2},
    "dict of nothing": lambda h: {"x": h, "none": None, "n": 5, "s": "text", "e": ()},
    "default dict": lambda h: collections.defaultdict(list, {"a": [h]}),
    "deque": lambda h: collections.deque([h, h + 1]),
    "one in a list": lambda h: [h],
    "one in a tuple": lambda h: (h,),
    "deep": lambda h: {"a": [(h, {"b": (h * 2,)}), None]},
    "size": lambda h: (h.shape, h, h.dtype, h.shape[0]),
}
IN_GRAPH: dict[str, Callable[[torch.Tensor], Any]] = {
    **MAKERS,
    "model output": lambda h: Output(x=h, y=h * 2),
    "model output of one": lambda h: Output(x=h),
    "registered": lambda h: Registered(h, "label"),
    "ordered subclass": lambda h: Ordered(b=h, a=h * 2),
}


def parts(value: Any) -> Any:
    """``value`` as plain containers that can be compared, each with its class."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Registered):
        return [type(value), value.x, value.label]
    if dataclasses.is_dataclass(value):
        fields = [parts(getattr(value, f.name)) for f in dataclasses.fields(value)]
        return [type(value), fields, [parts(v) for v in value.items()] if isinstance(value, dict) else None]
    if isinstance(value, dict):
        return [type(value), [[k, parts(v)] for k, v in value.items()]]
    if isinstance(value, (list, tuple, collections.deque)):
        return [type(value), [parts(v) for v in value]]
    return value


def same_parts(got: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        same(got, wanted)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            same_parts(a, b)
    else:
        assert got == wanted


# AP04
@device
@pytest.mark.parametrize("name", IN_GRAPH)
def test_a_compiled_model_returns_the_containers_that_it_makes(name: str, device: str) -> None:
    make = IN_GRAPH[name]
    model = Model(lambda m, x: make(m.b(ops.double(m.a(x)))), a=lin(), b=lin()).to(device)
    call = compiled(model)
    with torch.no_grad():
        for n in (4, 4, 5, 5, 4):
            x = torch.randn(n, D, device=device)
            same_parts(parts(call(x)), parts(model(x)))
    assert total("replayed") > 0


def first_tensor(value: Any) -> torch.Tensor:
    found = [v for v in flat(parts(value)) if isinstance(v, torch.Tensor)]
    return found[0]


def flat(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in flat(v)] if isinstance(value, list) else [value]


READ: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass of one": (MAKERS["dataclass of one"], lambda v: v.x),
    "dataclass of two": (MAKERS["dataclass of two"], lambda v: v.x + v.y * v.n),
    "named tuple": (MAKERS["named tuple"], lambda v: v.x + v.y),
    "ordered dict": (MAKERS["ordered dict"], lambda v: v["a"] + v["b"]),
    "dict": (MAKERS["dict of nothing"], lambda v: v["x"] * v["n"] if v["none"] is None else v["x"]),
    "deep": (MAKERS["deep"], lambda v: v["a"][0][0] + v["a"][0][1]["b"][0]),
    "model output": (IN_GRAPH["model output"], lambda v: v.x + v["y"]),
    "model output of one": (IN_GRAPH["model output of one"], lambda v: v.x if v.y is None else v.y),
    "registered": (IN_GRAPH["registered"], lambda v: v.x * len(v.label)),
}


# AP04
@device
@pytest.mark.parametrize("name", READ)
def test_a_compiled_model_takes_containers(name: str, device: str) -> None:
    make, read = READ[name]
    model = Model(lambda m, v: m.b(ops.double(m.a(read(v)))), a=lin(), b=lin()).to(device)
    call = compiled(model)
    with torch.no_grad():
        for n in (4, 4, 5, 5, 4):
            value = make(torch.randn(n, D, device=device))
            same(call(value), model(value))
    assert total("replayed") > 0


@sgc_backend.eager_on_graph
def through_a_break(value: Any) -> Any:
    return value


# AP04
@device
@pytest.mark.parametrize("kind", ["whole", "breakable"])
@pytest.mark.parametrize("name", IN_GRAPH)
def test_a_wrapper_returns_the_containers_that_its_callable_makes(name: str, kind: str, device: str) -> None:
    make = IN_GRAPH[name]
    x = torch.randn(4, D, device=device)
    layer = lin().to(device)
    backend = (FullCudaGraphBackend if kind == "whole" else BreakableCudaGraphBackend)(module(device))

    def forward() -> Any:
        return make(layer(through_a_break(x) if kind == "breakable" else x))

    try:
        with torch.no_grad(), backend.capture_session():
            backend.capture_one(4, forward)
    except sgc_backend.CaptureError as error:
        # A class whose tensors can't be found is refused by name, not handed out with tensors that go stale.
        assert type(forward()).__name__ in str(error)
        return
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(4, D))
            got = backend.replay(4)
            same_parts(parts(got), parts(forward()))
            first_tensor(got).unsqueeze_(0)  # what is done to one result is not seen in the next
    backend.cleanup()


# -- keywords ----------------------------------------------------------------------------------------------------------


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = lin()

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0, add: Any = None, **more: Any
    ) -> torch.Tensor:
        h = ops.double(self.a(x))
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        h = h * scale
        for name in sorted(more):
            h = h + more[name] * len(name)
        return h if add is None else h + add["t"]


# AP05
@device
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_keywords_are_bound_by_name(dynamic: bool | None, device: str) -> None:
    model = Keywords().to(device)
    t = lambda: torch.randn(4, D, device=device)  # noqa: E731
    m = lambda: torch.rand(4, D, device=device) > 0.5  # noqa: E731
    calls: list[Callable[[Any], Any]] = []
    for _ in range(3):
        x, y, a, b, c = t(), t(), m(), m(), t()
        calls += [
            lambda f, x=x, a=a: f(x, mask=a, scale=2.0),
            lambda f, y=y, b=b: f(scale=2.0, mask=b, x=y),
            lambda f, x=x, b=b: f(x, b),
            lambda f, x=x: f(x),
            lambda f, x=x: f(x=x, scale=0.5),
            lambda f, x=x, c=c: f(x, add={"t": c}, scale=3.0),
            lambda f, x=x, c=c, y=y: f(x, pq=c, p=y),
            lambda f, x=x, c=c, y=y: f(x, p=c, pq=y),
            lambda f, x=x, a=a: f(x, a, scale=2),
        ]
    with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
        call = compiled(model, dynamic=dynamic)
        for run_it in calls + calls[::-1]:
            same(run_it(call), run_it(model))
    assert total("replayed") > 20


# AP05
def test_a_call_that_python_refuses_is_refused_as_without_us() -> None:
    class Strict(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return x * scale

    model = Strict()
    call = compiled(model, dynamic=False)
    x = torch.randn(4, D)
    with torch.no_grad():
        for _ in range(3):
            same(call(x), x)
        for bad in ({"scales": 2.0}, {"x": x}):
            with pytest.raises(TypeError) as wanted:
                model(x, **bad)
            with pytest.raises(TypeError) as got:
                call(x, **bad)
            assert next(iter(bad)) in str(got.value)
            assert next(iter(bad)) in str(wanted.value)
        same(call(x, scale=2.0), x * 2)


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
