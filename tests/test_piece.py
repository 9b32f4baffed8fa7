"""Compiling pieces: what torch's compilers can't take runs eagerly, is captured all the same, and is told of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sgc_backend
from sgc_backend import piece


@torch.library.custom_op("sgc_piece_test::host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Views(nn.Module):
    """Takes views of its buffer before a cut, and behind it writes the buffer and returns a view of such a view."""

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(64.0).reshape(8, 8))
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> Any:
        parts = self.before(self.w)
        x = torch.ops.sgc_piece_test.host(x + parts[0].sum())
        self.w[:2] += x[:2]
        return x * self.w, self.after(*parts)


def halves(w: torch.Tensor) -> Any:
    return w[:, :4], w[:, 4:]


OVERLAPPING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "of another shape": (halves, lambda a, b: a.transpose(0, 1)),
    "of the same shape": (lambda w: (w.t(),), lambda a: a.t()),
    "of other rows": (lambda w: (w[1:],), lambda a: a[:-1]),
    "of another part": (lambda w: (w.view(-1)[8:].view(7, 8),), lambda a: a[2:4]),
}


def compiled(fn: Any, inner: Any = "aot_eager", **options: Any) -> Any:
    options = {"device_module": sgc_backend.emulated, "capture_sizes": None, "inner": inner, **options}
    return torch.compile(fn, backend=sgc_backend.sgc_piecewise, options=options, dynamic=False)


_before: set[str] = set()


@pytest.fixture(autouse=True)
def only_graphs_of_this_test() -> None:
    # Graphs live until the garbage collector finds them.
    _before.clear()
    _before.update(sgc_backend.stats())


def counted() -> list[dict[str, dict[str, int]]]:
    """The counters of the graphs that this test compiled."""
    return [found for name, found in sgc_backend.stats().items() if name not in _before]


def uncompiled() -> dict[str, int]:
    """Pieces that run eagerly, by cause, over all graphs."""
    found: dict[str, int] = {}
    for counters in counted():
        found |= counters["uncompiled"]
    return found


def check_calls(call: Any, eager: Any, inputs: Callable[[int], Any], calls: int = 4) -> None:
    for number in range(calls):
        ours, theirs = inputs(number), inputs(number)
        with torch.no_grad():
            torch.testing.assert_close(call(*ours), eager(*theirs), rtol=0, atol=0, check_stride=True)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def replays() -> int:
    return sum(sum(counters["replayed"].values()) for counters in counted())


@pytest.mark.parametrize(("before", "after"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_view_of_one_of_overlapping_inputs_that_are_written(before: Any, after: Any) -> None:
    model = Views(before, after)
    eager = copy.deepcopy(model)
    call = compiled(model)
    check_calls(call, eager, lambda number: (torch.full((8, 8), float(number)),))
    torch.testing.assert_close(model.w, eager.w, rtol=0, atol=0)
    (cause,) = uncompiled()
    assert cause.startswith("it writes to one of inputs that overlap (")
    assert replays() > 0, "the piece is captured all the same"


@torch.library.custom_op("sgc_piece_test::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("sgc_piece_test::bump_all", mutates_args=("xs",))
def bump_all(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1)


PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: bump(x[1:]),
    "columns": lambda x: bump(x[:, 2:]),
    "a slice of a slice": lambda x: bump(x[2:][1:]),
    "several": lambda x: bump_all([x[:2], x[3:]]),
    "one row": lambda x: bump(x[1]),
    "one column": lambda x: bump(x[:, 1]),
    "every other row": lambda x: bump(x[::2]),
    "a corner": lambda x: bump(x[1:, 1:]),
}
SAFE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all": lambda x: bump(x),
    "by torch's own op": lambda x: x[1:].add_(1),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("fn", (PARTS | SAFE).values(), ids=PARTS | SAFE)
def test_a_custom_op_that_writes_to_a_part_of_an_input_that_begins_anywhere(
    fn: Callable[..., Any], static: bool
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        fn(x)
        return x * 2

    call = compiled(step)
    ours, theirs = (torch.arange(96.0).reshape(12, 8) for _ in range(2))
    x, reference = ours[2:11], theirs[2:11]
    if static:
        torch._dynamo.mark_static_address(x)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), step(reference), rtol=0, atol=0)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(uncompiled()) == (fn in PARTS.values())
    assert replays() > 0


@pytest.mark.parametrize("fn", PARTS.values(), ids=PARTS)
def test_a_custom_op_that_writes_to_a_part_of_a_whole_storage_is_compiled(fn: Callable[..., Any]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        fn(x)
        return x * 2

    check_calls(compiled(step), step, lambda number: (torch.full((9, 8), float(number)),))
    assert not uncompiled()


def test_a_part_that_a_cut_leaves_to_the_piece_behind_it_is_written_where_eager_writes_it() -> None:
    # The whole program would be compiled rightly: it is the cut that makes a part of a storage an input.
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        both = x @ w
        keys = both[:, 8:]
        x = torch.ops.sgc_piece_test.host(keys + 1)
        bump(keys[:, :4])
        return x + keys, both.sum()

    inputs = torch.rand(4, 8), torch.rand(8, 16)
    check_calls(compiled(step), step, lambda number: inputs)
    (cause,) = uncompiled()
    assert "writes to a part of" in cause


WRITTEN_BEHIND: dict[str, Callable[..., Any]] = {
    "the whole": lambda h, v, y: (h.add_(y), v * 2)[1],
    "the view": lambda h, v, y: (v.add_(1), h * y)[1],
}
VIEWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another shape": lambda h: h.view(-1),
    "some rows": lambda h: h[:2],
    "transposed": lambda h: h.t(),
    "columns": lambda h: h[:, 4:],
}


def rows(number: int, columns: int) -> torch.Tensor:
    n = 4 + 2 * (number % 2)
    return torch.arange(float(n * columns)).view(n, columns) + number


@pytest.mark.parametrize("viewed", VIEWED)
@pytest.mark.parametrize("written", WRITTEN_BEHIND)
def test_a_value_and_its_view_of_which_one_is_written_behind_a_cut_are_recorded(viewed: str, written: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = torch.ops.sgc_piece_test.host(x) + 1
        view = VIEWED[viewed](h)
        return WRITTEN_BEHIND[written](h, view, torch.ops.sgc_piece_test.host(x))

    options = {"device_module": sgc_backend.emulated, "capture_sizes": None, "inner": "aot_eager"}
    call = torch.compile(step, backend=sgc_backend.sgc_piecewise, options=options, dynamic=True)
    check_calls(call, step, lambda number: (rows(number, 8),), calls=6)
    (cause,) = uncompiled()
    assert cause.startswith("it writes to one of inputs that overlap (")
    assert replays() > 0 and not any(counters["failures"] for counters in counted())


views = torch.library.Library("sgc_piece_test", "FRAGMENT")
views.define("flat(Tensor(a) x) -> Tensor(a)")
for key in ("CompositeExplicitAutograd", "Meta"):
    views.impl("flat", lambda x: x.view(-1), key)


def test_a_view_of_an_input_is_returned_where_another_is_written_that_autograd_knows_for_no_view() -> None:
    def body(w: torch.Tensor, x: torch.Tensor) -> Any:
        flat = torch.ops.sgc_piece_test.flat(w)
        flat[3] = 1
        return torch.ops.sgc_piece_test.host(w[4:]) + x, flat

    call = compiled(body, cut_ops=["sgc_piece_test::flat"])
    check_calls(call, body, lambda number: (torch.arange(64.0).reshape(8, 8) + number, torch.ones(4, 8)))
    assert list(uncompiled()) == ["it writes to one of inputs that overlap (flat, l_w_)"]
    assert not any(found["failures"] for found in counted())


def test_columns_of_one_tensor_of_which_one_part_is_written_behind_a_cut_are_compiled() -> None:
    def step(x: torch.Tensor) -> Any:
        q, k, v = (x + 1).view(x.shape[0], 3, 8).unbind(1)
        y = torch.ops.sgc_piece_test.host(x)
        q.mul_(2)
        return q + k + y[:, :8], v * 2

    options = {"device_module": sgc_backend.emulated, "capture_sizes": None, "inner": "aot_eager"}
    call = torch.compile(step, backend=sgc_backend.sgc_piecewise, options=options, dynamic=True)
    check_calls(call, step, lambda number: (rows(number, 24),), calls=6)
    assert not uncompiled()
    assert replays() > 0 and not any(counters["failures"] for counters in counted())


def test_inputs_that_lie_apart_are_compiled_although_they_share_a_storage() -> None:
    def step(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> Any:
        keys[1] = x
        values[1] = x * 2
        return keys[:2], values.add_(1)

    both = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    x = torch.ones(8)
    call = compiled(step)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(*both[0], x), step(*both[1], x), rtol=0, atol=0)
    torch.testing.assert_close(*both)
    assert not uncompiled()


def test_overlapping_inputs_that_nothing_writes_are_compiled() -> None:
    def read(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        x.add_(1)
        return a + b + x, a.t(), b[:2]

    base = torch.rand(8, 8)
    check_calls(compiled(read), read, lambda number: (base, base.t(), torch.full((8, 8), float(number))))
    assert not uncompiled()


def mixed_views(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping tensors of which one doesn't know of the other; AOTAutograd takes no graph that writes to them."""
    base = torch.arange(64.0).reshape(8, 8) + number
    return base[:4], base.data[2:6]


def write_mixed(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.mul_(2)
    return b * 2


def test_a_piece_that_the_compiler_refuses_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(write_mixed)
    check_calls(call, write_mixed, mixed_views)
    (cause,) = uncompiled()
    assert cause.startswith("AssertionError: ")
    warned = [r.getMessage() for r in caplog.records if "runs eagerly" in r.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("piece 0 of graph ") and cause in warned[0] and "aot_eager" in warned[0]


def test_explain_names_pieces_that_run_eagerly() -> None:
    text = str(sgc_backend.explain(compiled(write_mixed), *mixed_views(0)))
    assert "  piece 0: " in text and "    not compiled, runs eagerly: AssertionError: " in text


@pytest.mark.parametrize("by_compiler", [True, False])
def test_strict_refuses_a_piece_that_is_not_compiled_with_the_compilers_error(by_compiler: bool) -> None:
    fn: Any = write_mixed if by_compiler else Views(lambda w: (w.t(),), lambda a: a.t())
    args = mixed_views(0) if by_compiler else (torch.zeros(8, 8),)
    with torch.no_grad(), pytest.raises(sgc_backend.StrictError, match="aot_eager can't compile piece") as caught:
        compiled(fn, strict=True)(*args)
    assert isinstance(caught.value.__cause__, AssertionError if by_compiler else type(None))


def test_pieces_that_are_the_same_program_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    compile_group = piece.compile_group

    def noted(group: Any, inner: Any) -> Any:
        asked.append(group)
        return compile_group(group, inner)

    monkeypatch.setattr(piece, "compile_group", noted)

    def layers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        x = torch.ops.sgc_piece_test.host(write_mixed(a, b))
        return x, write_mixed(c, d)

    check_calls(compiled(layers), layers, lambda number: (*mixed_views(number), *mixed_views(number)), calls=1)
    assert len(asked) == 1
    assert list(uncompiled().values()) == [2]


def test_a_users_own_compiler_that_raises_is_not_passed_over() -> None:
    def inner(gm: Any, examples: Any) -> Any:
        raise NotImplementedError("no such op here")

    with torch.no_grad(), pytest.raises(Exception, match="no such op here"):
        compiled(lambda x: x + 1, inner)(torch.ones(3))


def test_a_missing_compiler_is_no_fault_of_a_piece() -> None:
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InvalidCxxCompiler

    failed = BackendCompilerFailed(lambda: None, InvalidCxxCompiler(), None)
    assert not piece._is_about_the_piece(InvalidCxxCompiler())
    assert not piece._is_about_the_piece(failed)
    assert piece._is_about_the_piece(AssertionError("a piece"))


class Ring(nn.Module):
    """Two buffers of which one is a part of the other; writes to one and reads the other."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(64.0).reshape(8, 8))
        self.register_buffer("ring", self.cache[3:7])
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self.ring, self.cache, x)


def write_ring(ring: torch.Tensor, cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    ring.add_(x[:4])
    return cache * 2


def write_cache(ring: torch.Tensor, cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.add_(x)
    return ring * 2


@pytest.mark.parametrize("fn", [write_ring, write_cache])
def test_overlapping_buffers_that_are_written(fn: Callable[..., Any]) -> None:
    model, eager = Ring(fn), Ring(fn)
    call = compiled(model)
    check_calls(call, eager, lambda number: (torch.full((8, 8), float(number)),))
    torch.testing.assert_close(model.cache, eager.cache, rtol=0, atol=0)


def test_pieces_that_differ_in_which_inputs_share_memory_are_compiled_apart() -> None:
    def layer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    def layers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        return torch.ops.sgc_piece_test.host(layer(a, b)), layer(c, d)

    def inputs(number: int) -> tuple[torch.Tensor, ...]:
        one, two, three = (torch.arange(64.0).reshape(8, 8) + number for _ in range(3))
        return one[:4].data, two[2:6].data, three[:4].data, three[2:6].data

    check_calls(compiled(layers), layers, inputs)
    assert not uncompiled()
