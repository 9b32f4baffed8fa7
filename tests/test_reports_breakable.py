"""What went wrong in public for others who capture graphs: breaks, what goes in and out of them, and what is around."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import D
from routes import Churn, Recorded
from test_backend import only_graphs_of_this_test, same
from test_injection import device, module, usable
from test_reports import a_clean_model_works

from sgc_backend import eager_on_graph
from sgc_backend.errors import CaptureError, ReplayError

__all__ = ["only_graphs_of_this_test"]


SIZES = (64, 32, 12)  # none is D: Dynamo would take the two for one size


# -- what goes into a break --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Given:
    first: torch.Tensor
    rest: list[torch.Tensor]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return broken(x * 2).relu() + 1


def _view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return broken(y[:, 1:9]).relu() + y.sum(1, keepdim=True)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return broken_nested({"a": [x * 2, (x + 1,)], "n": 3}, given=Given(x * 5, [x - 1])).relu()


def _later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = broken(x + 1)
    w = z * 3
    del z
    return broken(y) + broken(w)  # y was made two segments ago


def _own_result(x: torch.Tensor) -> torch.Tensor:
    return broken(broken(broken(x * 2))) + 1


def _several(x: torch.Tensor) -> torch.Tensor:
    a, b = two(x * 2)
    c = a.relu() + b
    return broken(b) + c + broken(a)


broken = eager_on_graph(lambda y: y.cumsum(0))
two = eager_on_graph(lambda y: (y + 1, y.flip(0)))
broken_nested = eager_on_graph(lambda d, given: d["a"][0] * d["n"] + d["a"][1][0] + given.first + given.rest[0])
INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (_plain, _view, _nested, _later, _own_result, _several)
}


# BR01
@device
@pytest.mark.parametrize("name", INTO)
def test_what_a_break_gets_is_its_own_buckets_whatever_was_captured_later(name: str, device: str) -> None:
    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, INTO[name], x, sizes=SIZES)
    other = Recorded("breakable", device, lambda x: broken((x - 3).tanh()) * 1e6, x, sizes=SIZES)
    order = [64, 32, 12, 64, *random.Random(0).choices(SIZES, k=20)]
    for n in order:
        x.copy_(torch.randn(66, D))
        other(random.Random(n).choice(SIZES))  # its values lie where those of the others lay
        for m in SIZES:
            if m != n:
                call(m)
        same(call(n), call.expected(n))


# BR01
@device
def test_a_break_that_keeps_what_it_got_finds_the_values_of_the_last_replay_there(device: str) -> None:
    kept: list[torch.Tensor] = []

    @eager_on_graph
    def keeps(y: torch.Tensor) -> torch.Tensor:
        kept[:] = [y]
        return y + 1

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: keeps(x * 2) * 3, x, sizes=(12,))
    for _ in range(3):
        x.copy_(torch.randn(66, D))
        same(call(12), call.expected(12))
    usable(device)


class Metadata:
    """A plain object that carries tensors to a break, as forward contexts do."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.scale: Any = None


by_object = eager_on_graph(lambda y, meta: y * meta.scale + (0 if meta.rows is None else meta.rows))


# BR01
@device
def test_an_object_that_carries_the_callers_own_tensors_into_a_break_is_read_at_replay(device: str) -> None:
    meta = Metadata()
    meta.scale = torch.tensor(2.0, device=device)
    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, lambda x: by_object(x + 1, meta) - 1, x, sizes=SIZES)
    for k, n in enumerate(SIZES * 2):
        meta.scale = torch.tensor(float(k), device=device)
        same(call(n), call.expected(n))


# BR01
@device
@pytest.mark.parametrize("held", ["attribute", "in a list", "in a dict", "in an object"])
def test_an_object_that_carries_tensors_of_a_segment_into_a_break_is_refused(held: str, device: str) -> None:
    meta = Metadata()
    meta.scale = 1.0
    read = eager_on_graph(lambda y, meta: y + unwrapped(meta.rows))

    def unwrapped(value: Any) -> torch.Tensor:
        while not isinstance(value, torch.Tensor):
            value = (
                value.rows if isinstance(value, Metadata) else value["rows"] if isinstance(value, dict) else value[0]
            )
        return value

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows: Any = x * 2
        if held == "in a list":
            rows = [rows]
        elif held == "in a dict":
            rows = {"rows": rows}
        elif held == "in an object":
            inner = Metadata()
            inner.rows, rows = rows, inner
        meta.rows = rows
        return read(x + 1, meta) - 1

    x = torch.randn(66, D, device=device)
    with pytest.raises(CaptureError, match=r"Metadata.*can't be followed"):
        Recorded("breakable", device, forward, x, sizes=SIZES)
    meta.rows = None
    usable(device)
    a_clean_model_works(device)


# -- what comes out of a break -----------------------------------------------------------------------------------------


OUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "fresh": lambda y: y * 2,
    "several": lambda y: (y * 2, {"b": y + 1}),
    "another dtype": lambda y: y.double(),
    "transposed": lambda y: (y * 2).t().contiguous().t(),
    "a slice of something larger": lambda y: torch.cat((y, y + 1))[3 : 3 + y.shape[0]],
    "0-dim": lambda y: y.sum(),
    "broadcast": lambda y: y[:1].clone().expand(y.shape),
}


# BR02
@device
@pytest.mark.parametrize("name", OUT)
def test_the_memory_of_a_breaks_result_is_never_somebody_elses(name: str, device: str) -> None:
    marked = eager_on_graph(OUT[name])
    tensors = lambda r: [r] if isinstance(r, torch.Tensor) else [r[0], r[1]["b"]]  # noqa: E731

    def forward(x: torch.Tensor) -> torch.Tensor:
        return sum((t.float() * 3 + x.sum() for t in tensors(marked(x * 2))), x.mean())  # type: ignore[no-any-return]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    gc.collect()
    module(device).empty_cache()
    # The bytes of every result, and what rounding makes of them.
    churn = Churn(device, *(n * D for n in SIZES), *(n * D * 2 for n in SIZES), 1, 8, 128)
    for _ in range(4):
        churn()
    for n in SIZES * 3:
        x.copy_(torch.randn(66, D))
        same(call(n), call.expected(n))
        churn()
    assert churn.unharmed()


# BR02
@device
@pytest.mark.parametrize("whole", [True, False])
def test_a_view_of_the_bodys_own_cache_is_the_cache_when_a_segment_writes_to_it(whole: bool, device: str) -> None:
    cache = torch.zeros(66, D, device=device)

    @eager_on_graph
    def lookup(y: torch.Tensor) -> torch.Tensor:
        rows = cache if whole else cache[: y.shape[0]]  # another object each time, the same memory
        rows[: y.shape[0]].copy_(y)
        return rows.view(rows.shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        lookup(x * 2).add_(1)
        return cache * 2

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for n in (12, 64, 32, 12):
        x.copy_(torch.randn(66, D))
        before = cache.clone()
        got, mine = call(n).clone(), cache.clone()
        cache.copy_(before)
        same(got, call.expected(n))
        same(mine, cache)


# BR02
@device
@pytest.mark.parametrize("written", [False, True])
def test_a_view_of_the_bodys_own_cache_that_moves_is_followed_or_refused(written: bool, device: str) -> None:
    cache = torch.randn(66, D, device=device)
    at = [0]
    row = eager_on_graph(lambda y: cache[at[0] : at[0] + 1])

    def forward(x: torch.Tensor) -> torch.Tensor:
        r = row(x * 2)
        return x + (r.add_(1) if written else r)

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    for n in SIZES:
        before = cache.clone()
        got = call(n).clone()
        cache.copy_(before)
        same(got, call.expected(n))
    at[0] = 7
    if written:
        with pytest.raises(ReplayError, match="returned memory that it keeps"):
            call(12)
    else:
        same(call(12), call.expected(12))
    usable(device)


# BR02
@device
@pytest.mark.parametrize("outputs", ["a break's result", "a view of it", "both"])
def test_a_breaks_result_that_is_the_output_lives_until_the_next_replay(outputs: str, device: str) -> None:
    def forward(x: torch.Tensor) -> Any:
        z = broken(x * 2)
        return {"a break's result": z, "a view of it": z[1:], "both": (z, z.t(), x + 1)}[outputs]

    x = torch.randn(66, D, device=device)
    call = Recorded("breakable", device, forward, x, sizes=SIZES)
    churn = Churn(device, *(n * D for n in SIZES))
    for n in SIZES * 2:
        x.copy_(torch.randn(66, D))
        got = call(n)
        churn()
        same(got, call.expected(n))
    assert churn.unharmed()
