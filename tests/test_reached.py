"""What a wrapper's callable reaches: a replay refuses what moved, and only what the recording can have read."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sgc_backend import BreakableCudaGraphBackend, FullCudaGraphBackend, eager_on_graph, emulated
from sgc_backend import reached as reached_module
from sgc_backend.devices import device_of
from sgc_backend.errors import ReplayError
from sgc_backend.reached import Reached

x = torch.ones(4, 4)


@pytest.fixture(autouse=True, params=["looked up", "counted"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether entries of modules are looked up at each replay, as where there are few, or writes to modules counted."""
    monkeypatch.setattr(reached_module, "FEW", 0 if request.param == "counted" else 10**6)
    return request.param


def recorded(*forwards: Callable[[], Any]) -> FullCudaGraphBackend:
    """A wrapper with each of ``forwards`` recorded, under keys from 0."""
    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session():
        for key, forward in enumerate(forwards):
            backend.capture_one(key, forward)
    return backend


def move(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


class Engine:
    """What owns a model in practice: state of many kinds, of which the step reads some."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.draft = nn.Linear(4, 4)
        self.scale = torch.ones(4)
        self.last_output = torch.zeros(4, 4)
        self.meta = {"lengths": torch.ones(4)}

    def forward(self) -> torch.Tensor:
        return self.helper(self.model(x)) * self.meta["lengths"]

    def helper(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale


FINDS: dict[str, Callable[[Engine], Callable[[], Any]]] = {
    "a bound method": lambda e: e.forward,
    "a closure": lambda e: lambda: e.forward(),
    "a partial": lambda e: functools.partial(Engine.forward, e),
    "a default": lambda e: lambda e=e: e.forward(),
    "a function that calls another": lambda e: lambda: runs(e),
    "a list": lambda e: (lambda held: lambda: held[0].forward())([e]),
}


def runs(engine: Engine) -> torch.Tensor:
    return engine.forward()


@pytest.mark.parametrize("how", FINDS)
def test_what_an_engines_step_reads_is_found_by_every_way_and_nothing_else(how: str) -> None:
    engine = Engine()
    backend = recorded(FINDS[how](engine))
    engine.last_output = torch.zeros(4, 4)
    move(engine.draft.weight)
    backend.replay(0)
    for what, change in (
        ("weight", lambda: move(engine.model.weight)),
        ("bias", lambda: setattr(engine.model, "bias", nn.Parameter(torch.zeros(4)))),
        ("Engine.scale", lambda: setattr(engine, "scale", torch.zeros(4))),
        ("gone", lambda: delattr(engine, "scale")),
    ):
        if what == "gone":
            engine.scale = torch.ones(4)
            with backend.capture_session():
                backend.capture_one(0, FINDS[how](engine))
        change()
        with pytest.raises(ReplayError, match="Engine.scale" if what == "gone" else what):
            backend.replay(0)
        if what != "gone":
            with backend.capture_session():
                backend.capture_one(0, FINDS[how](engine))
            backend.replay(0)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach().clone())),
    "other data": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "data that was kept": lambda m: kept.append(m.weight.data) or setattr(m.weight, "data", m.weight.data.clone()),
    "other data in the same memory": lambda m: setattr(m.weight, "data", m.weight.data.flatten()[1:]),
    "two that change places": lambda m: torch.utils.swap_tensors(m.weight, nn.Parameter(torch.zeros(4, 4))),
    "set_": lambda m: m.weight.set_(torch.zeros(4, 4)),
    "another dtype": lambda m: m.to(torch.float64),
    "assigned from a state": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "deleted": lambda m: delattr(m, "weight"),
    "no tensor": lambda m: m.register_parameter("weight", None),
    "a write around the module": lambda m: m._parameters.update(weight=nn.Parameter(torch.zeros(4, 4))),
}
kept: list[torch.Tensor] = []


@pytest.mark.parametrize("how", CHANGES)
def test_every_way_to_move_a_weight_is_noticed_at_the_next_replay(how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    backend = recorded(lambda: model(x))
    for _ in range(2):
        backend.replay(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # in place: the same memory
    backend.replay(0)
    with torch.no_grad():
        CHANGES[how](model[1])
    kept.clear()
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"1\.weight moved since key 0"):
            backend.replay(0)


def test_a_module_in_anothers_place_has_moved_however_deep() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    backend = recorded(lambda: model(x))
    inner = model[0][0]
    model[0][0] = nn.Linear(4, 4)
    with pytest.raises(ReplayError, match=r"0\.0 moved"):
        backend.replay(0)
    model[0][0] = inner
    backend.replay(0)


def test_what_is_written_without_a_move_is_looked_up_from_then_on(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reached = Reached(lambda: model(x), device_of(emulated))
    reached.settle("full, key 4")
    bias = model[0].bias
    for step in range(3):
        model[0].bias = bias  # a write of what is there
        model[0].register_parameter("unused", None)
        del model[0].unused
        assert reached.moved() is None, step
        assert id(model[0]._parameters) not in reached._quiet or way == "looked up"
    if way == "counted":
        assert id(model[1]._parameters) in reached._quiet
    model[0].bias = nn.Parameter(bias.detach().clone())
    assert reached.moved() == "0.bias moved"
    model[0].bias = bias
    assert reached.moved() is None
    move(model[1].bias)
    assert reached.moved() == "1.bias moved"


def test_a_tensor_at_the_same_address_has_not_moved() -> None:
    model = nn.Linear(4, 4)
    reached = Reached(lambda: model(x), device_of(emulated))
    reached.settle("full, key 4")
    old = model.weight
    model.weight = nn.Parameter(old.detach())
    for _ in range(2):
        assert reached.moved() is None
    old.data = torch.zeros(4, 4)  # no longer the model's
    assert reached.moved() is None
    move(model.weight)
    assert reached.moved() == "weight moved"


def test_a_loops_variable_is_not_what_is_checked() -> None:
    models = [nn.Linear(4, 4) for _ in range(3)]
    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session(), torch.no_grad():
        for key, model in enumerate(models):
            backend.capture_one(key, lambda: model(x))  # noqa: B023 as people write it
        for key, wanted in enumerate(models):
            assert torch.equal(backend.replay(key), wanted(x))
    move(models[1].weight)
    backend.replay(0)
    with pytest.raises(ReplayError, match="weight moved since key 1"):
        backend.replay(1)


def test_state_that_the_callable_rebinds_itself_is_not_checked() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps = self.steps + 1
            self.last = x * 2
            return self.last

    counts = Counts()
    backend = recorded(lambda: counts(x))
    counts.last = counts.steps = None
    assert torch.equal(backend.replay(0), x * 2)


def test_what_only_a_break_reads_may_move() -> None:
    model = nn.Module()
    model.inside, model.outside = nn.Linear(4, 4), nn.Linear(4, 4)
    adapts = eager_on_graph(lambda y: model.inside(y))
    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(4, lambda: adapts(model.outside(x)))
    move(model.inside.weight)
    with torch.no_grad():
        assert torch.equal(backend.replay(4), model.inside(model.outside(x)))
    move(model.outside.weight)
    with pytest.raises(ReplayError, match=r"outside\.weight moved since key 4"):
        backend.replay(4)


def test_a_check_finds_nothing_where_nothing_is_found() -> None:
    reached = Reached(torch.ones_like, device_of(emulated))
    assert reached.moved() is None
    reached.settle("full, key 4")
    assert reached.moved() is None


def test_without_the_check_memory_that_was_given_back_is_noticed() -> None:
    # Not through a wrapper: emulated recordings keep what they read alive.
    model = nn.Linear(4, 4)
    for replace, moved in (
        (lambda: setattr(model, "weight", nn.Parameter(torch.zeros(4, 4))), "weight"),
        (lambda: setattr(model.bias, "data", torch.zeros(4)), "bias"),
        (lambda: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True), "weight"),
    ):
        reached = Reached(lambda: model(x), device_of(emulated), check=False)
        reached.settle("full, key 4")
        with torch.no_grad():
            model.weight.copy_(torch.ones(4, 4))  # in place: the same memory
        assert reached.moved() is None
        replace()
        assert reached.moved() == f"{moved} moved"


def test_without_the_check_nothing_that_was_found_is_kept_alive() -> None:
    model = nn.Linear(4, 4)
    reached = Reached(lambda model=model: model(x), device_of(emulated), check=False)
    reached.settle("full, key 4")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert reached.moved() is not None


@pytest.mark.gpu
def test_without_the_check_freed_weights_are_noticed_on_a_gpu() -> None:
    model = nn.Linear(4, 4, device="cuda")
    rows = torch.ones(4, 4, device="cuda")
    backend = FullCudaGraphBackend(torch.cuda, check_addresses=False)
    with backend.capture_session():
        backend.capture_one(0, lambda: model(rows))
    backend.replay(0)
    model.weight.data = torch.zeros(4, 4, device="cuda")
    with pytest.raises(ReplayError, match="weight moved"):
        backend.replay(0)
    backend.cleanup()


class Named:
    """Equal where the names are, whatever the tensors."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


def test_an_object_in_anothers_place_has_moved_however_equal_the_two_are() -> None:
    holder = type("Holder", (), {})()
    holder.state = Named("state", torch.ones(4))
    backend = recorded(lambda: holder.state.tensor * 2)
    backend.replay(0)
    holder.state = Named("state", torch.zeros(4))
    with pytest.raises(ReplayError, match=r"Holder\.state moved"):
        backend.replay(0)


class Layers:
    """Caches in a list, and tensors of each step in another, which only breaks read."""

    def __init__(self, kind: type = list) -> None:
        self.caches = kind(torch.ones(4) for _ in range(80))
        self.tables = [torch.ones(4)]
        self.sizes = [1, 2]

    def step(self) -> torch.Tensor:
        return self.caches[79] * 2 + len(self.sizes) + len(self.tables)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_tensor_in_a_list_has_moved_where_another_took_its_place(kind: type) -> None:
    layers = Layers(kind)
    caches = layers.caches
    backend = recorded(layers.step, lambda: caches[79] + 1)
    layers.sizes = [3, 4]  # no tensors
    assert torch.equal(backend.replay(0), layers.step())
    layers.caches = kind(caches)  # the same tensors
    assert torch.equal(backend.replay(0), layers.step())
    layers.caches = kind([*caches[:79], torch.zeros(4)])
    with pytest.raises(ReplayError, match=r"Layers\.caches moved"):
        backend.replay(0)
    layers.caches = kind(caches[:3])
    with pytest.raises(ReplayError, match=r"Layers\.caches moved"):
        backend.replay(0)
    layers.caches = caches
    assert torch.equal(backend.replay(0), layers.step())
    if kind is list:
        caches[79] = torch.zeros(4)
        with pytest.raises(ReplayError, match=r"Layers\.caches\[79\] moved"):
            backend.replay(0)
        with pytest.raises(ReplayError, match=r"caches\[79\] moved"):
            backend.replay(1)
        caches.clear()
        with pytest.raises(ReplayError, match=r"caches\[0\] moved"):
            backend.replay(1)


def test_lists_that_only_breaks_read_may_change() -> None:
    layers = Layers()

    @eager_on_graph
    def attend(y: torch.Tensor) -> torch.Tensor:
        return y * layers.tables[0]

    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(0, lambda: attend(layers.step()) + 1)
    backend.replay(0)
    layers.tables[0] = torch.full((4,), 5.0)
    assert torch.equal(backend.replay(0), layers.step() * 5 + 1)
    layers.tables = [torch.full((4,), 3.0)]
    assert torch.equal(backend.replay(0), layers.step() * 3 + 1)


class Context:
    """A step's metadata by name, of which the step reads some, and its breaks others."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {
            "lengths": torch.ones(4),
            "scale": 2.0,
            "paged": {"slots": torch.ones(4)},
            "tables": torch.ones(4),
            "unread": torch.ones(4),
        }

    def step(self) -> torch.Tensor:
        return self.meta["lengths"] * self.meta["scale"] + self.meta["paged"]["slots"]


def test_a_tensor_in_a_dict_has_moved_where_another_took_its_place() -> None:
    context = Context()
    meta = context.meta
    backend = recorded(context.step, lambda: meta["lengths"] + 1)
    meta["unread"] = torch.zeros(4)
    context.meta = {**meta, "new": torch.zeros(4)}  # the same in all that is read
    assert torch.equal(backend.replay(0), context.step())
    context.meta = {**meta, "lengths": torch.zeros(4)}
    with pytest.raises(ReplayError, match=r"Context\.meta moved"):
        backend.replay(0)
    context.meta = {**meta, "scale": 3.0}
    with pytest.raises(ReplayError, match=r"Context\.meta moved"):
        backend.replay(0)
    context.meta = meta
    assert torch.equal(backend.replay(0), context.step())
    slots = meta["paged"]["slots"]
    meta["paged"]["slots"] = torch.zeros(4)
    with pytest.raises(ReplayError, match=r"Context\.meta\['paged'\]\['slots'\] moved"):
        backend.replay(0)
    meta["paged"]["slots"] = slots
    meta["paged"] = {"slots": slots}
    assert torch.equal(backend.replay(0), context.step())
    meta["lengths"] = torch.zeros(4)
    with pytest.raises(ReplayError, match=r"Context\.meta\['lengths'\] moved"):
        backend.replay(0)
    with pytest.raises(ReplayError, match=r"meta\['lengths'\] moved"):
        backend.replay(1)
    del meta["lengths"]
    with pytest.raises(ReplayError, match=r"meta\['lengths'\] moved"):
        backend.replay(1)


def test_entries_of_dicts_that_only_breaks_read_may_change() -> None:
    context = Context()

    @eager_on_graph
    def attend(y: torch.Tensor) -> torch.Tensor:
        return y * context.meta["tables"]

    backend = BreakableCudaGraphBackend(emulated)
    with backend.capture_session():
        backend.capture_one(0, lambda: attend(context.step()) + 1)
    backend.replay(0)
    context.meta["tables"] = torch.full((4,), 5.0)
    assert torch.equal(backend.replay(0), context.step() * 5 + 1)


def test_an_entry_that_the_callable_fills_itself_is_not_checked() -> None:
    context = Context()

    def step() -> torch.Tensor:
        context.meta["unread"] = context.meta["lengths"] * 2
        return context.meta["unread"] + 1

    backend = recorded(step)
    context.meta["unread"] = torch.ones(4)
    assert torch.equal(backend.replay(0), context.meta["lengths"] * 2 + 1)


FLOATS: dict[str, tuple[Any, Any]] = {
    "a float": (1.0, 2.0),
    "an int in its place": (1.0, 3),
    "nothing in its place": (1.0, None),
    "a NaN": (float("nan"), 0.0),
    "a complex number": (1j, 2j),
}


@pytest.mark.parametrize("holder", ["a module", "an object"])
@pytest.mark.parametrize("what", FLOATS)
def test_a_float_that_changed_is_refused_until_it_is_what_was_recorded(what: str, holder: str) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Plain:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    held: Any = Module() if holder == "a module" else Plain()
    held.scale, other = FLOATS[what]
    held.unread = 1.0
    backend = recorded(lambda: held.forward(x))
    wanted = held.forward(x)
    held.unread = 2.0
    for _ in range(2):
        torch.testing.assert_close(backend.replay(0), wanted, equal_nan=True, rtol=0, atol=0)
        first, held.scale = held.scale, other
        with pytest.raises(ReplayError, match=r"\.?scale changed from .* to .* since key 0 was captured"):
            backend.replay(0)
        held.scale = first
    del held.scale
    with pytest.raises(ReplayError, match="scale changed"):
        backend.replay(0)


def test_floats_and_ints_that_the_callable_or_the_engine_counts_with_are_not_checked() -> None:
    class Loop:
        rows, seconds = 4, 0.0

        def step(self) -> torch.Tensor:
            self.seconds += 0.5
            return x[: self.rows] * 2

    loop = Loop()
    backend = FullCudaGraphBackend(emulated)
    with backend.capture_session():
        for loop.rows in (4, 2):
            backend.capture_one(loop.rows, loop.step)
    loop.seconds = 7.0
    for rows in (4, 2):
        assert torch.equal(backend.replay(rows), x[:rows] * 2)


def test_a_list_that_the_callable_fills_itself_is_not_checked() -> None:
    last = [torch.ones(4)]

    def step() -> torch.Tensor:
        last[0] = x[0] * 2
        return last[0] + 1

    backend = recorded(step)
    last[0] = torch.ones(4)
    assert torch.equal(backend.replay(0), x[0] * 2 + 1)
