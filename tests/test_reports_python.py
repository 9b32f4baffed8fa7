"""Reported cases: Python around a recording, which a replay doesn't run."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import pytest
import torch
from models import D, lin, ops
from routes import Recorded, routes
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import device, usable
from test_reports_replay import SIZES, fresh_host_state
from torch import nn

from sgc_backend import eager_on_graph
from sgc_backend.errors import ReplayError

__all__ = ["fresh_host_state", "only_graphs_of_this_test"]


class Remembers(nn.Module):
    """Stores what it computed on the way, in one of the ways that people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.l1, self.l2 = how, lin(), lin()
        self.last: Any = None
        self.stats: dict[str, Any] = {}
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.l1(x)
        if self.how == "attribute":
            self.last = h
        elif self.how == "dict":
            self.stats["h"] = h
        elif self.how == "list":
            self.log[:] = [h]
        else:
            self.last = ops.double(h)
        return self.l2(h)

    def stored(self) -> Any:
        return {"dict": self.stats.get("h"), "list": self.log[-1] if self.log else None}.get(self.how, self.last)


# RC08
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("how", ["attribute", "dict", "list", "behind a cut"])
def test_what_forward_stores_is_this_calls_where_dynamo_runs(how: str, outputs: str, device: str) -> None:
    model = Remembers(how).to(device)
    reference = Remembers(how).to(device)
    reference.load_state_dict(model.state_dict())
    call = compiled(model, dynamic=False, outputs=outputs)
    held = []
    with torch.no_grad():
        for k in range(8):
            x = torch.randn(4, D, device=device)
            if k % 3 == 2:
                model.last = reference.last = torch.full((4, D), 9.0, device=device)
            same(call(x), reference(x))
            same(model.stored(), reference.stored())
            if outputs == "clone":
                held.append((model.stored(), reference.stored()))
        for got, wanted in held:
            same(got, wanted)
    assert total("replayed") > 0


# RC08
@device
@routes("tc_piecewise", "full", "breakable")
def test_replays_by_key_run_no_python_and_say_so(route: str, device: str) -> None:
    model = Remembers("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=(8,))
    mark = model.last = object()
    with torch.no_grad():
        for _ in range(3):
            x.copy_(torch.randn(26, D))
            same(call(8), model.l2(model.l1(x[:8])))
    assert model.last is mark
    assert call.backend is not None
    for kind in type(call.backend).__mro__[:2]:
        if "side effects such as attribute writes" in (kind.__doc__ or ""):
            break
    else:
        pytest.fail("the contract is not written down")


# RC08
@device
@routes("full", "breakable")
def test_an_attribute_that_kept_pool_memory_hurts_nobody(route: str, device: str) -> None:
    model = Remembers("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=SIZES)
    kept = model.last
    with torch.no_grad():
        for n in SIZES * 2:
            x.copy_(torch.randn(26, D))
            same(call(n), model.l2(model.l1(x[:n])))
        assert call.backend is not None
        call.backend.cleanup()
        gc.collect()
        again = Recorded(route, device, model, x, sizes=SIZES)
        for n in SIZES:
            same(again(n), model.l2(model.l1(x[:n])))
    del kept
    usable(device)


class Context:
    """What engines call a forward context: metadata that layers find without being given it."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths


context = Context(torch.zeros(1))


def masked(x: torch.Tensor) -> torch.Tensor:
    x = x.view(-1, D)  # or the second dimension would be dynamic as well
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.where((rows < context.lengths)[:, None], x * 2, torch.zeros_like(x))


# RC10
@device
@routes()
def test_metadata_found_through_a_global_follows_updates_in_place(route: str, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, masked, x, sizes=(8,))
    for length in (1, 8, 0, 5):
        context.lengths.fill_(length)
        x.copy_(torch.randn(26, D))
        same(call(8), call.expected(8))


# RC10
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
def test_metadata_rebound_in_a_global_is_the_new_one_where_dynamo_runs(dynamic: bool | None, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    call = compiled(masked, dynamic=dynamic)
    kept = []
    with torch.no_grad():
        for length in (3, 3, 3, 1, 8, 0, 5, 5):
            kept.append(context.lengths)
            context.lengths = torch.tensor([length], device=device)
            x = torch.randn(8, D, device=device)
            same(call(x), masked(x))
    assert total("replayed") > 0


# RC10
@device
@routes("tc_piecewise", "full", "breakable")
@pytest.mark.parametrize("old_lives", [True, False])
def test_metadata_rebound_in_a_global_is_refused_by_replays_by_key(old_lives: bool, route: str, device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, masked, x, sizes=(8,))
    same(call(8), call.expected(8))
    old = context.lengths
    context.lengths = torch.tensor([5], device=device)
    if not old_lives:
        del old
    with pytest.raises(ReplayError, match=r"Context\.lengths moved since key 8 was captured"):
        call(8)
    call.record(8)
    same(call(8), call.expected(8))


# RC10
@device
def test_a_break_finds_the_metadata_of_its_replay(device: str) -> None:
    context.lengths = torch.tensor([3], device=device)
    broken = eager_on_graph(masked)
    layer = lin().to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: layer(broken(layer(x))), x, sizes=SIZES)
    for k, length in enumerate((1, 8, 0, 24, 5, 7)):
        context.lengths = torch.tensor([length], device=device)
        x.copy_(torch.randn(26, D))
        n = SIZES[k % 3]
        same(call(n), call.expected(n))


class Counting:
    """A cache that counts its tokens in an int, as transformers' layers with a sliding window do."""

    def __init__(self, device: str) -> None:
        self.rows, self.seen, self.name = torch.zeros(8, D, device=device), 3, "cache"

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.name = "used"
        self.rows[self.seen % 8].copy_(x[0])
        return self.rows.sum(0) + x


# RC08
@device
@routes("full", "breakable")
def test_an_int_that_the_callable_changes_is_told_of_once(
    route: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    caches = [Counting(device), Counting(device)]

    def body(x: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            x = cache.update(x)
        return ops.double(x)

    call = Recorded(route, device, body, torch.randn(26, D, device=device), sizes=(8,))
    with caplog.at_level(logging.WARNING, "sgc_backend"):
        call.record(8, 4)
    told = [r.getMessage() for r in caplog.records if r.name.startswith("sgc_backend")]
    (text,) = [text for text in told if "changed" in text]
    assert re.search(r"key 8: the callable changed Counting\.seen from \d+ to \d+\. Replays run no Python", text)


# RC08
@device
@routes("full", "breakable")
def test_an_int_that_only_changes_between_calls_is_not_told_of(
    route: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Counting(device)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x + cache.rows[: cache.seen].sum(0)

    with caplog.at_level(logging.WARNING, "sgc_backend"):
        Recorded(route, device, body, torch.randn(26, D, device=device), sizes=(8,))
        cache.seen += 1
    assert not [r for r in caplog.records if "changed" in r.getMessage()]
