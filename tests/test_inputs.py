"""Kinds of input, and the arithmetic of strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_facts import seen_by_backend
from torch import fx

import sgc_backend
from sgc_backend.inputs import Input, classify, distinct_elements, has_overlap, is_dense, is_static


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGC_DEVICE", "emulated")
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    sgc_backend.reset()


def kinds(fn: Any, *args: Any, read: Any = None, written: Any = (), dynamic: bool | None = True) -> list[Input]:
    """The inputs of ``fn``'s graph; by default pieces read them all."""

    def look(gm: fx.GraphModule) -> list[Input]:
        names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
        return list(classify(gm, names if read is None else read, written))

    return seen_by_backend(look, fn, *args, dynamic=dynamic)


def by_label(inputs: list[Input]) -> dict[str, str]:
    return {i.label: i.kind for i in inputs if i.kind != "size"}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("cache", torch.zeros(8, 4))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * self.weight * scale + self.cache[: x.shape[0]] + self.plain


def test_each_input_has_the_kind_of_what_it_is() -> None:
    found = kinds(Model(), torch.ones(3, 4), 0.25)
    tensors = [i for i in found if isinstance(i.fake, torch.Tensor)]
    parts = {"weight": "static", "cache": "static", "plain": "static", "'scale'": "number", "L['x']": "staged"}
    assert {part: next(i.kind for i in tensors if part in i.label) for part in parts} == parts
    assert [i.kind for i in found if not isinstance(i.fake, torch.Tensor)] == ["size"]


def test_inputs_come_in_the_order_of_the_call() -> None:
    found = kinds(Model(), torch.ones(3, 4), 0.25)
    assert [i.index for i in found] == list(range(len(found)))


def test_a_tensor_that_is_marked_static_is_static() -> None:
    x, y = torch.ones(4), torch.ones(4)
    torch._dynamo.mark_static_address(x)
    assert by_label(kinds(lambda x, y: x + y, x, y)) == {"L['x']": "static", "L['y']": "staged"}


def test_what_no_piece_reads_is_passed_on() -> None:
    found = kinds(lambda x, y: x + y, torch.ones(4), torch.ones(4), read=["l_x_"], dynamic=False)
    assert by_label(found) == {"L['x']": "staged", "L['y']": "passed"}


def test_a_parameter_that_no_piece_reads_is_passed_on() -> None:
    found = kinds(Model(), torch.ones(3, 4), 0.25, read=[], dynamic=False)
    assert set(by_label(found).values()) == {"passed"}


def test_writes_are_noted() -> None:
    found = kinds(lambda x, y: x.add_(y), torch.ones(4), torch.ones(4), written={"l_x_"}, dynamic=False)
    assert {i.label: i.written for i in found} == {"L['x']": True, "L['y']": False}


def test_labels_are_the_users_own_expressions() -> None:
    found = kinds(lambda batch: batch["ids"][0] + batch["mask"], {"ids": [torch.ones(4)], "mask": torch.ones(4)})
    assert {i.label for i in found if i.kind == "staged"} == {"L['batch']['ids'][0]", "L['batch']['mask']"}


def test_a_graph_made_by_hand_is_labelled_by_its_placeholders() -> None:
    graph = fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    x.meta["example_value"], n.meta["example_value"] = torch.ones(3), 3
    graph.output(x)
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert [(i.label, i.kind, i.fake is x.meta["example_value"]) for i in classify(gm, ["x"], ())] == [
        ("x", "staged", True),
        ("n", "size", False),
    ]
    assert not is_static(x)


# -- strides ---------------------------------------------------------------------------------------------------------


SHAPES = [
    (size, stride)
    for dims in range(4)
    for size in itertools.product((0, 1, 2, 3), repeat=dims)
    for stride in itertools.product((0, 1, 2, 3, 6), repeat=dims)
]


def offsets(size: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    return [sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, size))]


def test_an_overlap_is_never_missed() -> None:
    for size, stride in SHAPES:
        kept = [(n, s) for n, s in zip(size, stride, strict=True) if s != 0 or n == 0]
        places = offsets(tuple(n for n, _ in kept), tuple(s for _, s in kept))
        if len(set(places)) < len(places):
            assert has_overlap(size, stride), (size, stride)


def test_layouts_that_torch_makes_do_not_overlap() -> None:
    base = torch.empty(3, 4, 5)
    views = [base, base.transpose(0, 2), base[:, ::2], base[1:], base.permute(2, 0, 1)]
    views += [base.expand(2, 3, 4, 5), base[:0], base.view(-1), base[0, 0, 0], base.unfold(2, 2, 2), base[..., None]]
    views += [torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(4, 4).diagonal()]
    assert not any(has_overlap(v.size(), v.stride()) for v in views)
    assert has_overlap(base.unfold(2, 3, 1).size(), base.unfold(2, 3, 1).stride())


def test_dense_is_what_fills_its_bytes_once() -> None:
    for size, stride in SHAPES:
        places = offsets(size, stride)
        assert is_dense(size, stride) == (sorted(places) == list(range(len(places)))) or 0 in size, (size, stride)


def test_a_dense_tensors_clone_keeps_its_strides() -> None:
    for size, stride in SHAPES:
        if is_dense(size, stride):
            assert torch.empty_strided(size, stride).clone().stride() == stride or 0 in size or 1 in size


def test_distinct_elements_are_each_byte_once() -> None:
    for size, stride in SHAPES:
        if has_overlap(size, stride):
            continue
        reach = 1 + sum(max(n - 1, 0) * s for n, s in zip(size, stride, strict=True))
        tensor = torch.arange(reach).as_strided(size, stride)
        distinct = distinct_elements(tensor)
        values = distinct.flatten().tolist()
        assert len(set(values)) == len(values)
        assert set(values) == set(tensor.flatten().tolist())
        assert distinct.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_tensor_without_repeats_is_left_as_it_is() -> None:
    tensor = torch.ones(3, 4).t()
    assert distinct_elements(tensor) is tensor


# -- inputs that share memory with what cuts and callers see ---------------------------------------------------------


def run_both(fn: Any, size: int, calls: int = 4, **options: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """(eager inputs, eager results, captured inputs, captured results) of each call."""
    compiled = torch.compile(
        fn,
        backend=sgc_backend.sgc_piecewise,
        dynamic=True,
        options={"inner": "eager", "capture_sizes": None, **options},
    )
    with torch.no_grad():
        for _ in range(calls):
            x = torch.randn(size, 4)
            ours = x.clone()
            yield x, fn(x), ours, compiled(ours)


def lies_in(view: torch.Tensor, base: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_a_write_through_a_view_that_a_cut_made_reaches_the_callers_tensor() -> None:
    # The pieces reach the input through the cut's view alone.
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.view(-1)
        z = y * 2
        y.add_(1)
        return z

    for x, expected, ours, got in run_both(fn, 3, cut_ops=["aten::view"]):
        assert torch.equal(x, ours)
        assert torch.equal(expected, got)


def test_a_write_of_a_cut_is_seen_through_an_earlier_view() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.view(-1)
        z = y * 2
        x.relu_()
        return z, y * 3

    for x, expected, ours, got in run_both(fn, 3, cut_ops=["aten::view", "aten::relu_"]):
        assert torch.equal(x, ours)
        assert all(map(torch.equal, expected, got))


def test_an_output_that_is_a_view_of_an_input_stays_one() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x[1:]

    for _, expected, ours, got in run_both(fn, 3):
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        assert lies_in(got[1], ours)


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag], ids=["conjugate", "negative"])
def test_a_result_whose_bytes_are_read_differently_stays_right(view: Any) -> None:
    # Unowned tensors carry the conjugate and negative bits of what they stand for.
    def fn(x: torch.Tensor) -> torch.Tensor:
        return view(torch.view_as_complex(x.view(-1, 2, 2) * 2))

    for _, expected, _, got in run_both(fn, 3):
        assert torch.equal(expected.resolve_conj().resolve_neg(), got.resolve_conj().resolve_neg())
