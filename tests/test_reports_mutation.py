"""Inputs with layouts of their own, writes, and memory that is shared: reported cases, named by their ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aliasing import calls_as_eager
from models import D, Model, lin, ops
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import device
from torch import nn

__all__ = ["only_graphs_of_this_test"]


gpu = pytest.mark.gpu
dynamic = pytest.mark.parametrize("dynamic", [None, True, False])


test_ops = torch.ops.sgc_test


def rand(*size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, device=device)


# -- layouts -----------------------------------------------------------------------------------------------------------


LAYOUTS: dict[str, Callable[[str], torch.Tensor]] = {
    "contiguous": lambda d: rand(D, D, device=d),
    "transposed": lambda d: rand(D, D, device=d).t(),
    "offset": lambda d: rand(D * D + 1, device=d)[1:].view(D, D),
    "rows apart": lambda d: rand(D, D + 3, device=d)[:, :D],
    "rows further apart": lambda d: rand(D, 2 * D, device=d)[:, 1 : D + 1],
    "every second column": lambda d: rand(D, 2 * D, device=d)[:, ::2],
    "every second row": lambda d: rand(2 * D, D, device=d)[::2],
    "expanded row": lambda d: rand(1, D, device=d).expand(D, D),
    "expanded column": lambda d: rand(D, 1, device=d).expand(D, D),
    "one element": lambda d: rand(9, device=d)[3:4].expand(D, D),
    "overlapping": lambda d: rand(2 * D, device=d).unfold(0, D, 1)[:D],
    "overlapping offset": lambda d: rand(2 * D + 1, device=d)[1:].as_strided((D, D), (1, 1)),
}

READERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "mm": lambda m, x: torch.mm(x, m.a.weight),
    "cut": lambda m, x: m.a(ops.double(x)),
    "preserves": lambda m, x: (x + 1, x * 2, ops.double(x.t())),
    "stride as a value": lambda m, x: m.a(x) * x.stride(0) + x.stride(1),
    "reshaped": lambda m, x: m.a(x.reshape(-1).view(D, D)),
    "strided": lambda m, x: x.as_strided((3, 2), (1, 1)) * 2,
    "returned": lambda m, x: (x, m.a(x), x.t(), x[1:]),
}


# MA01
@device
@dynamic
@pytest.mark.parametrize("reader", READERS)
def test_an_input_is_read_in_the_layout_that_it_has(reader: str, dynamic: bool | None, device: str) -> None:
    model = Model(READERS[reader], a=lin()).to(device)
    order = list(LAYOUTS) * 3
    with torch._dynamo.config.patch(recompile_limit=64):
        call = compiled(model, dynamic=dynamic)
        # Thrice one after the other, so that a layout replays, and then mixed, so that the wrong one might.
        calls_as_eager(call, model, lambda k: (LAYOUTS[order[k]](device),), len(order))
        for name in LAYOUTS:
            calls_as_eager(call, model, lambda k, name=name: (LAYOUTS[name](device),), 3)
    assert total("replayed") > 0


# MA01
@device
@dynamic
def test_memory_formats_of_images_are_kept(dynamic: bool | None, device: str) -> None:
    model = Model(lambda m, x: (m.c(x), ops.double(x), x * 2), c=nn.Conv2d(3, 4, 3)).to(device)
    call = compiled(model, dynamic=dynamic)
    formats = [torch.channels_last, torch.contiguous_format]

    def image(k: int) -> tuple[torch.Tensor]:
        x = rand(2, 3, 8, 8, device=device).contiguous(memory_format=formats[k % 2])
        return (x if k % 3 else rand(2, 3, 8, 9, device=device)[..., 1:].to(memory_format=formats[k % 2]),)

    calls_as_eager(call, model, image, 12)
    assert total("replayed") > 0


# MA01
@device
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_pieces_read_any_alignment(inner: str, device: str) -> None:
    model = Model(lambda m, x, y: ops.double(m.a(x) + y).relu() * y, a=lin()).to(device)
    call = compiled(model, inner=inner, dynamic=False)
    flat = rand(3 * D * D + 8, device=device)
    with torch.no_grad():
        for k in range(10):
            x, y = (flat[o : o + D * D].view(D, D) for o in (k % 5, D * D + (k * 3) % 7))
            torch.testing.assert_close(call(x, y), model(x, y))
    assert total("replayed") > 0


# -- views of one storage ----------------------------------------------------------------------------------------------


def _adds_then_sums(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return m.a(a).sum() + m.a(b).sum()


def _writes_both(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    b.add_(1)
    return m.a(a + b)


def _writes_across_a_cut(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = ops.double(m.a(b))
    a.copy_(h)
    ops.add_one_(a)
    return m.a(b) + ops.double(a)


def _writes_through_a_view(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:].t()[0].zero_()
    ops.add_one_(a[:, 1])
    return m.a(b) * 2


def _writes_late(m: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = m.a(b)
    before = b * 1
    a.zero_()
    return h, before, ops.double(b), b * 2


SHARING_BODIES = [_adds_then_sums, _writes_both, _writes_across_a_cut, _writes_through_a_view, _writes_late]
PAIRS: dict[str, Callable[[str], tuple[torch.Tensor, torch.Tensor]]] = {
    "apart": lambda d: (rand(4, D, device=d), rand(4, D, device=d)),
    "the same": lambda d: (rand(4, D, device=d),) * 2,
    "split columns": lambda d: tuple(rand(4, 2 * D, device=d).split(D, dim=1)),  # interleaved, no byte in common
    "split rows": lambda d: tuple(rand(8, D, device=d).split(4)),
    "one row on": lambda d: (lambda t: (t[:4], t[1:]))(rand(5, D, device=d)),
    "one row back": lambda d: (lambda t: (t[1:], t[:4]))(rand(5, D, device=d)),
    "two objects": lambda d: (lambda t: (t, t.view(4, D)))(rand(4, D, device=d)),
    "detached": lambda d: (lambda t: (t, t.detach()))(rand(4, D, device=d)),
    "reversed layout": lambda d: (lambda t: (t[:4, :D], t.t()[:4, :D]))(rand(D, D, device=d)),
    "a row of it": lambda d: (lambda t: (t, t[1:2].expand(4, D)))(rand(4, D, device=d)),
}


# MA03
@device
@dynamic
@pytest.mark.parametrize("body", SHARING_BODIES, ids=lambda f: f.__name__.strip("_"))
def test_writes_through_one_of_two_inputs_that_share_memory_are_seen_through_the_other(
    body: Any, dynamic: bool | None, device: str
) -> None:
    model = Model(body, a=lin()).to(device)
    names = list(PAIRS)
    with torch._dynamo.config.patch(recompile_limit=64):
        call = compiled(model, dynamic=dynamic)
        # First the pair that shares nothing, three times, so that there is a recording which would be wrong.
        if body is _writes_both:
            names.remove("a row of it")  # eager refuses to write it
        order = ["apart"] * 3 + [n for n in names for _ in range(3)] + ["apart"] + names
        calls_as_eager(call, model, lambda k: PAIRS[order[k]](device), len(order))
    assert total("replayed") > 0


# MA03
@device
def test_a_buffer_that_is_also_an_argument_is_written_once_and_seen_in_both(device: str) -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return m.cache[:4] + ops.double(m.a(x))

    def writes_the_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.cache.add_(1)
        return x * 2 + ops.double(m.a(x))

    for body in (fn, writes_the_buffer):
        model, reference = Model(body, a=lin()).to(device), Model(body, a=lin()).to(device)
        reference.load_state_dict(model.state_dict())
        call = compiled(model, dynamic=False)
        with torch.no_grad():
            for k in range(12):
                # Its own memory at first, so that there is a recording; then the buffer's; then its own again.
                inside = k % 4 == 3
                x = model.cache[2:6] if inside else rand(4, D, device=device)
                y = reference.cache[2:6] if inside else x.clone()
                same(call(x), reference(y))
                same(x, y)
                same(model.cache, reference.cache)
    assert total("replayed") > 0


# MA03
@device
def test_three_inputs_of_one_storage_keep_their_places(device: str) -> None:
    def fn(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q.mul_(0.5)
        k.copy_(ops.double(m.a(v)))
        return q + k + v, v

    model = Model(fn, a=lin()).to(device)
    call = compiled(model)

    def packed(k: int) -> tuple[torch.Tensor, ...]:
        qkv = rand(4 + k % 2, 3 * D, device=device)
        return qkv.chunk(3, 1) if k > 3 else tuple(t.clone() for t in qkv.chunk(3, 1))

    calls_as_eager(call, model, packed, 12)
    assert total("replayed") > 0


# -- outputs that are inputs -------------------------------------------------------------------------------------------


RETURNS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "itself and more": lambda m, x: (x, x + 1),
    "itself alone": lambda m, x: x,
    "flat view": lambda m, x: (x.view(-1), m.a(x)),
    "tail": lambda m, x: (x[1:], m.a(x)),
    "tail of a tail": lambda m, x: (lambda v: (v, v[1:].t(), m.a(v)))(x[1:]),
    "written and returned": lambda m, x: (x.add_(1), x * 2),
    "written by a cut and returned": lambda m, x: (ops.add_one_(x), x, x.t(), m.a(x))[1:],
    "twice": lambda m, x: (x, x, m.a(x), x[:]),
    "detached": lambda m, x: (x.detach(), m.a(x)),
    "weight": lambda m, x: (m.a.weight, m.a.weight.t(), m.a(x)),
    "buffer": lambda m, x: (m.cache, m.cache[1:3], m.a(x)),
    "written buffer": lambda m, x: (m.cache.add_(1), m.cache[2], m.a(x)),
    "itself behind a cut": lambda m, x: (ops.double(x), x[:, 2:], m.a(ops.double(x))),
    "split": lambda m, x: (*x.split(2), m.a(x)),
    "unbind": lambda m, x: (*x.unbind(1), m.a(x)),
    "a result and its views": lambda m, x: (lambda h: (h, h[1:], h.t(), h))(m.a(x)),
    "a result's views alone": lambda m, x: (lambda h: (h[1:], h[:-1], h.view(-1)[::3]))(m.a(x)),
    "a cut's result and its views": lambda m, x: (lambda h: (h, h[1:], m.a(h)))(ops.double(m.a(x))),
    "a cut's result's views alone": lambda m, x: (lambda h: (h[1:], h[:, 1]))(ops.double(x)),
    "expanded": lambda m, x: (x[:1].expand(4, D), m.a(x)[:1].expand(3, D)),
    "nested": lambda m, x: {"a": [x, (m.a(x), x[2:])], "b": None, "c": 3},
    "written result and its view": lambda m, x: (lambda h: (h, h[1:].add_(1)))(m.a(x)),
    "reshape of a transposed": lambda m, x: (x.t().reshape(-1), x.t().contiguous().view(-1), x.reshape(-1)),
    "to the same dtype": lambda m, x: (x.to(torch.float32), x.float(), x.contiguous(), m.a(x)),
    "another dtype": lambda m, x: (x.view(torch.int32), m.a(x).view(torch.int32)),
}


# MA04
@device
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("how", RETURNS)
def test_what_is_returned_aliases_what_it_aliases_in_eager(how: str, outputs: str, device: str) -> None:
    model = Model(RETURNS[how], a=lin()).to(device)
    for dynamic in (False, True):
        call = compiled(model, dynamic=dynamic, outputs=outputs)
        calls_as_eager(call, model, lambda k: (rand(4 + k % 2, D, device=device),), 10, lasting=outputs == "clone")
        torch._dynamo.reset()


# MA04
@device
def test_the_first_result_does_not_follow_the_inputs_of_later_calls(device: str) -> None:
    model = Model(lambda m, x: (x[1:], x, m.a(x)), a=lin()).to(device)
    call = compiled(model, dynamic=False)
    with torch.no_grad():
        kept = []
        for _ in range(6):
            x = rand(4, D, device=device)
            tail, whole, h = call(x)
            kept.append((x, x.clone(), tail, whole, h, h.clone()))
        for x, was, tail, whole, h, h_was in kept:
            same((x, tail, whole, h), (was, was[1:], was, h_was))
            tail.zero_()
            assert (x[1:] == 0).all()
            same(whole[0], was[0])
