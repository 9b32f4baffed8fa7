"""Reported cases: which values of a call choose its recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import D, Model, lin, ops
from routes import Recorded, routes
from test_backend import compiled, only_graphs_of_this_test, same, total
from test_injection import device
from test_reports_replay import _host, fresh_host_state, host_list
from torch import nn

import sgc_backend
from sgc_backend import NotCapturedError, ShapeKey, eager_on_graph
from sgc_backend.errors import CutOpError, OptionError, ReplayError

__all__ = ["fresh_host_state", "only_graphs_of_this_test"]


@torch.library.custom_op("sgc_test::first_columns", mutates_args=())
def first_columns(x: torch.Tensor, k: int) -> torch.Tensor:
    return x[:, :k].sum(1)


first_columns.register_fake(lambda x, k: x.new_empty(x.shape[0]))


def biased(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = ops.double(x * 3)
    return y if bias is None else y + bias


# RC11
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("lengths", ["equal", "mixed"])
def test_an_input_left_out_is_not_the_one_of_the_call_before(lengths: str, dynamic: bool | None, device: str) -> None:
    call = compiled(biased, dynamic=dynamic)
    with torch.no_grad():
        for k, given in enumerate([True, True, True, False, False, False, True, False, True]):
            n = (6, 9, 4)[k % 3] if lengths == "mixed" else 6
            x = torch.randn(n, D, device=device)
            bias = (torch.full((n, D), 1e4, device=device),) if given else ()
            same(call(x, *bias), biased(x, *bias))
    assert total("replayed") > 0


# RC11
@device
@routes("full", "breakable")
def test_variants_keep_callables_with_and_without_an_input_apart(route: str, device: str) -> None:
    x, bias = torch.randn(26, D, device=device), torch.full((26, D), 1e4, device=device)
    call = Recorded(route, device, biased, x, sizes=(8,))
    call.record(ShapeKey(8, "bias"), fn=lambda x: biased(x, bias[:8]))
    for variant in (None, "bias", None, None, "bias", "bias", None):
        x.copy_(torch.randn(26, D))
        same(call(ShapeKey(8, variant)), biased(x[:8], bias[:8] if variant else None))
    with pytest.raises(NotCapturedError, match="key 8/other"):
        call(ShapeKey(8, "other"))


# RC11
@device
@pytest.mark.parametrize("static", [True, False])
def test_shorter_longer_and_other_inputs_than_captured_are_never_partly_copied(static: bool, device: str) -> None:
    model = Model(lambda m, x, y: m.a(ops.double(x)) + y, a=lin()).to(device)
    call = compiled(model, dynamic=not static, capture_sizes=None if static else [8])
    with torch.no_grad():
        for n in (8, 8, 8, 5, 5, 11, 8, 5, 1, 11, 8):
            x, y = torch.randn(n, D, device=device), torch.randn(n, D, device=device)
            same(call(x, y), model(x, y))
        x = torch.randn(8, D, device=device)
        same(call(x, y[:1]), model(x, y[:1]))  # broadcast
        same(call(x, y[0]), model(x, y[0]))
        same(call(x.double().float(), x.t().contiguous().t()), model(x, x))
        with pytest.raises(Exception, match=r"size|shape|broadcast|expand"):
            call(x, torch.randn(5, D, device=device))
        same(call(x, x), model(x, x))
    assert total("replayed") > 0


# RC13
@device
@pytest.mark.parametrize("how", ["tagged", "attention", "named", "overload", "packet", "op"])
@pytest.mark.parametrize("empty", [(), [], set()])
def test_an_op_that_reads_the_host_is_cut_by_default_rules_or_by_name(how: str, empty: Any, device: str) -> None:
    if how not in ("tagged", "attention") and empty != ():
        pytest.skip("the list is not empty")
    op = {"tagged": ops.host_list_unsafe, "attention": ops.host_list_attention}.get(how, ops.host_list)
    sgc_backend.register_attention("sgc_test::host_list_attention")
    names: Any = {
        "named": ["sgc_test::host_list"],
        "overload": ["sgc_test::host_list.default"],
        "packet": [ops.host_list],
        "op": [host_list],
    }.get(how, empty)
    model = Model(lambda m, x: m.b(op(m.a(x))), a=lin(), b=lin()).to(device)
    call = torch.compile(
        model,
        backend=sgc_backend.sgc_piecewise,
        dynamic=True,
        options={"inner": "eager", "cut_ops": names, "capture_sizes": None},
    )
    with torch.no_grad():
        for value in (1.0, 1.0, 1.0, 2.0, -3.0, 0.5):
            _host[0] = value
            x = torch.randn(5, D, device=device)
            same(call(x), model(x))
    assert total("replayed") > 0


# RC13
@pytest.mark.parametrize("option", ["cut_ops", "capturable_ops"])
@pytest.mark.parametrize(
    "name",
    ["sgc_test::host_lits", "sgc_tset::host_list", "sgc_test::host_list.defualt", "host_list", "sgc_test.host_list"],
)
def test_a_misspelt_op_is_an_error_that_names_it(name: str, option: str) -> None:
    call = torch.compile(lin(), backend=sgc_backend.sgc_piecewise, options={option: [name]})
    with torch.no_grad(), pytest.raises(CutOpError, match=name.replace(".", r"\.")):
        call(torch.randn(4, D))


# RC13
def test_a_lone_name_in_place_of_the_list_is_an_error_and_no_list_of_letters() -> None:
    call = torch.compile(lin(), backend=sgc_backend.sgc_piecewise, options={"cut_ops": "sgc_test::host_list"})
    with torch.no_grad(), pytest.raises(OptionError, match="cut_ops must be a list"):
        call(torch.randn(4, D))


class Picks(nn.Module):
    """Takes a Python value that changes the kernel, from one of the places that it comes from."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.k, self.a = where, 3, lin()

    def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
        h = self.a(x)
        k = self.k if k is None else k
        if self.where == "slice":
            return ops.double(h)[:, :k].sum(1)
        if self.where == "list":
            return h[:, : k[0]].sum(1) + ops.double(h)[:, 0]
        if self.where == "flag":
            return h * 2 if k == "double" else ops.double(h) - 1
        return ops.first_columns(h, k) * 2


PICKS: dict[str, tuple[Any, ...]] = {
    "argument": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "attribute": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "slice": (3, 3, 3, 5, 5, 5, 3, 1, 7, 7, 5),
    "list": ([3], [3], [3], [5], [5], [3], [5]),
    "flag": ("double", "double", "double", "minus", "minus", "minus", "double", "minus"),
}


# RC15
@device
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("where", PICKS)
def test_a_python_value_that_changes_the_kernel_is_part_of_the_key(
    where: str, dynamic: bool | None, cut: bool, device: str
) -> None:
    model = Picks(where).to(device)
    call = compiled(
        model, dynamic=dynamic, **({"cut_ops": ("sgc_test::first_columns", "sgc_test::double")} if cut else {})
    )
    with torch.no_grad():
        for k in PICKS[where]:
            x = torch.randn(6, D, device=device)
            args = ()
            if where == "attribute":
                model.k = k
            else:
                args = (k,)
            same(call(x, *args), model(x, *args))
    assert total("replayed") > 0


# RC15
@device
@routes("full", "breakable")
def test_a_variant_for_each_python_value_and_none_for_others(route: str, device: str) -> None:
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, lambda x: ops.first_columns(x, 3), x, sizes=())
    for k in (3, 5):
        call.record(ShapeKey(8, k), fn=lambda x, k=k: ops.first_columns(x, k))
    for k in (3, 5, 5, 3):
        x.copy_(torch.randn(26, D))
        same(call(ShapeKey(8, k)), x[:8, :k].sum(1))
    for missing in (ShapeKey(8, 4), ShapeKey(8), 8, ShapeKey(9, 3)):
        with pytest.raises(NotCapturedError, match="recorded: 8/3, 8/5"):
            call(missing)


# RC15
@device
def test_a_break_whose_python_value_changes_reads_it_at_replay_or_says_so(device: str) -> None:
    k = [3]
    reads = eager_on_graph(lambda y, k: ops.first_columns(y, k[0]))
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: reads(x * 2, k) + 1, x, sizes=(8,))
    for value in (3, 5, 1, 3):
        k[0] = value
        same(call(8), call.expected(8))


class Scaled(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.scale, self.a = where, 1.0, lin()

    def forward(self, x: torch.Tensor, s: Any = None) -> torch.Tensor:
        h = self.a(x)
        if self.where == "cut":
            return ops.double(h) * s
        return h * (self.scale if s is None else s) + 1


SCALES = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.5, -0.0, 0.0, 3.0, float("inf"))


# RC16
@device
@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("kind", ["float", "host tensor", "host tensor, written", "device tensor", "numpy", "int"])
@pytest.mark.parametrize("where", ["argument", "attribute", "cut"])
def test_a_scale_that_changes_is_never_the_first_one(where: str, kind: str, dynamic: bool | None, device: str) -> None:
    model = Scaled(where).to(device)
    call = compiled(model, dynamic=dynamic)
    held = torch.tensor(1.0)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=32):
        for value in SCALES:
            x = torch.randn(6, D, device=device)
            s: Any = value
            if kind == "host tensor":
                s = torch.tensor(value)
            elif kind == "host tensor, written":
                s = held.fill_(value)
            elif kind == "device tensor":
                s = torch.tensor(value, device=device)
            elif kind == "numpy":
                s = pytest.importorskip("numpy").float32(value)
            elif kind == "int":
                s = int(min(value, 9))
            if where == "attribute":
                model.scale = s
                same(call(x), model(x))
            else:
                same(call(x, s), model(x, s))
    assert total("replayed") > 0 or (kind == "numpy" and dynamic is False)


# RC16
@device
@routes("tc_piecewise", "full", "breakable")
def test_a_scale_on_the_device_follows_its_buffer(route: str, device: str) -> None:
    layer, scale = lin().to(device), torch.ones((), device=device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, lambda x: layer(x) * scale, x, sizes=(8,))
    for value in SCALES:
        scale.fill_(value)
        same(call(8), call.expected(8))


# RC16
@device
@routes("tc_piecewise", "full", "breakable")
def test_a_float_scale_that_changed_is_refused_by_replays_by_key(route: str, device: str) -> None:
    model = Scaled("attribute").to(device)
    x = torch.randn(26, D, device=device)
    call = Recorded(route, device, model, x, sizes=(8,))
    same(call(8), call.expected(8))
    for value in (2.0, 0.5, 1.0):
        model.scale = value
        if value == 1.0:
            same(call(8), call.expected(8))
        else:
            with pytest.raises(ReplayError, match=rf"scale changed from 1.0 to {value} since key 8 was captured"):
                call(8)


# RC16
@device
def test_a_break_reads_scales_on_the_host_as_they_are_at_replay(device: str) -> None:
    scale, box = torch.ones(()), {"s": 1.0}
    scaled = eager_on_graph(lambda y, t, b: y * t * b["s"])
    x = torch.randn(26, D, device=device)
    call = Recorded("breakable", device, lambda x: scaled(x + 1, scale, box) - 1, x, sizes=(8,))
    for value in SCALES:
        scale.fill_(value)
        box["s"] = value
        torch.testing.assert_close(call(8), call.expected(8), equal_nan=True, rtol=0, atol=0)
