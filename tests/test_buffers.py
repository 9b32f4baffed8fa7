"""InputBuffers: layouts, staging from device and host, and padding."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sgc_backend import ROWS, InputSpec, OptionError, emulated
from sgc_backend import buffers as buffers_module
from sgc_backend.buffers import InputBuffers
from sgc_backend.devices import device_of
from sgc_backend.input_spec import ALIGNMENT, host_tensor
from sgc_backend.pinned import GROUP

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
device = pytest.mark.parametrize("device", ["cpu", CUDA])

SPECS = (
    InputSpec("tokens", (ROWS,), torch.int64, pad=7),
    InputSpec("slots", (ROWS,), torch.int32, pad=-1),
    InputSpec("positions", (3, ROWS), torch.int64),
    InputSpec("offsets", (ROWS + 1,), torch.int32, pad="last"),
    InputSpec("embeds", (ROWS * 2, 5), torch.bfloat16, pad=0.5),
    InputSpec("mask", (ROWS,), torch.bool, pad=True),
    InputSpec("scale", (2,), torch.float32),
)


def made(device: str, capacity: int = 16, specs: Any = SPECS) -> InputBuffers:
    return InputBuffers(device_of(torch.cuda if device == "cuda" else emulated), specs, capacity)


def values(n: int, device: str, specs: Any = SPECS) -> list[torch.Tensor]:
    return [torch.randint(0, 2 if s.dtype is torch.bool else 100, s.size(n), device=device).to(s.dtype) for s in specs]


def padded(given: list[torch.Tensor], size: int, n: int, specs: Any = SPECS) -> dict[str, torch.Tensor]:
    """What the buffers must hold, made without them."""
    out = {}
    for spec, value in zip(specs, given, strict=True):
        whole = torch.zeros(spec.size(size), dtype=spec.dtype)
        if spec.pad == "last":
            whole[:] = value[-1] if len(value) else 0
        else:
            whole.fill_(spec.pad)
        whole[tuple(slice(length) for length in spec.size(n))] = value.cpu()
        out[spec.name] = whole
    return out


def check(buffers: InputBuffers, size: int, n: int, given: list[torch.Tensor], specs: Any = SPECS) -> None:
    expected = padded(given, size, n, specs)
    for name, view in buffers.views(size).items():
        assert torch.equal(view.cpu(), expected[name]), (name, size, n)


def test_the_views_of_a_bucket_lie_apart_aligned_and_are_no_views_to_a_compiler() -> None:
    buffers = made("cpu")
    for size in (1, 5, 16):
        spans = []
        for spec in SPECS:
            view = buffers.views(size)[spec.name]
            assert view.shape == spec.size(size)
            assert view.is_contiguous()
            assert (view.data_ptr() - buffers.views(size)["tokens"].data_ptr()) % ALIGNMENT == 0
            assert view.storage_offset() == 0
            assert not view._is_view()
            assert buffers.views(size)[spec.name] is view
            spans.append((view.data_ptr(), view.data_ptr() + view.numel() * view.itemsize))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_view_keeps_the_block_alive() -> None:
    view = made("cpu").views(16)["tokens"]
    view.fill_(3)
    others = [torch.zeros(1024) for _ in range(8)]
    assert view.eq(3).all()
    del others


@device
@pytest.mark.parametrize("from_host", ["none", "all", "some"])
def test_random_calls_leave_rows_and_padding_right_in_every_bucket(device: str, from_host: str) -> None:
    buffers, draw = made(device), random.Random(3)
    for _ in range(60):
        size = draw.choice((4, 8, 16))
        n = draw.randint(0, size)
        given = values(n, device)
        host = {"none": set(), "all": set(range(len(SPECS)))}.get(from_host)
        if host is None:
            host = {k for k in range(len(SPECS)) if draw.random() < 0.4}
        buffers.stage(size, n, [v.cpu() if k in host else v for k, v in enumerate(given)], tuple(sorted(host)))
        check(buffers, size, n, given)


@device
@pytest.mark.parametrize("from_host", [False, True])
def test_large_inputs_are_copied_by_themselves_and_padded(
    device: str, from_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers_module, "PACKED", 100)  # bytes: only scale and mask are small then
    buffers = made(device)
    for size, n in ((16, 16), (16, 3), (8, 8), (8, 2), (8, 5)):
        given = values(n, device)
        host = tuple(range(len(SPECS))) if from_host else ()
        buffers.stage(size, n, [v.cpu() if from_host else v for v in given], host)
        check(buffers, size, n, given)


def test_padding_is_not_written_again_where_it_is_known_to_be_right() -> None:
    buffers = made("cpu")
    buffers.stage(8, 3, values(3, "cpu"))
    buffers.views(8)["tokens"][6] = 99  # behind the runner's back
    buffers.stage(8, 4, values(4, "cpu"))
    assert buffers.views(8)["tokens"][6] == 99
    given = values(2, "cpu")
    buffers.stage(8, 2, given)  # fewer rows: rows 2 and 3 must become padding
    check(buffers, 8, 2, given)


def test_buffers_that_others_write_are_padded_every_time() -> None:
    buffers = made("cpu")
    buffers.shared = True
    buffers.stage(8, 3, values(3, "cpu"))
    for view in buffers.views(8).values():
        view.fill_(1)
    given = values(4, "cpu")
    buffers.stage(8, 4, given)
    check(buffers, 8, 4, given)


def test_an_input_that_lies_in_another_buckets_buffer_arrives_whole() -> None:
    specs = (InputSpec("a", (ROWS, 64), torch.float32), InputSpec("b", (ROWS, 64), torch.float32))
    buffers = made("cpu", specs=specs)
    buffers.shared = True
    a, b = values(8, "cpu", specs)
    buffers.stage(8, 8, [a, b])
    views = buffers.views(8)
    buffers.stage(16, 8, [views["b"], views["a"]])
    assert torch.equal(buffers.views(16)["a"][:8], b)
    assert torch.equal(buffers.views(16)["b"][:8], a)


@pytest.mark.gpu
def test_the_host_may_fill_its_next_inputs_while_the_last_are_on_their_way() -> None:
    specs = (InputSpec("a", (ROWS, 256), torch.float32),)
    buffers = made("cuda", 64, specs)
    seen = []
    for step in range(40):
        torch.cuda._sleep(2_000_000)  # the copies queue up behind it
        buffers.stage(64, 64, [torch.full((64, 256), float(step))], (0,))
        seen.append(buffers.views(64)["a"].clone())
    for step, value in enumerate(seen):
        assert value.eq(step).all(), step


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("not a name", (ROWS,), torch.int64), "identifier"),
        (("variant", (ROWS,), torch.int64), "identifier"),
        (("x", ROWS, torch.int64), "must be a tuple"),
        (("x", (ROWS, -1), torch.int64), "holds -1"),
        (("x", (ROWS, ROWS), torch.int64), "several dimensions"),
        (("x", (ROWS,), "int64"), "torch.dtype"),
        (("x", (ROWS,), torch.uint8, -1), "pad must be"),
        (("x", (ROWS,), torch.int64, 0.5), "pad must be"),
        (("x", (ROWS,), torch.int64, "first"), "pad must be"),
    ],
)
def test_a_bad_spec_is_refused_by_name(arguments: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        InputSpec(*arguments)


def test_pads_that_the_dtype_holds_are_taken() -> None:
    for dtype, pad in ((torch.float32, float("nan")), (torch.float16, 1e9), (torch.bool, True), (torch.uint8, 255)):
        assert InputSpec("x", (ROWS,), dtype, pad).pad is pad


def test_what_is_no_number_is_refused_with_its_input() -> None:
    with pytest.raises(OptionError, match=r"input tokens \(ROWS\) int64: expected a tensor or numbers, got a list"):
        host_tensor(["a"], SPECS[0])
    with pytest.raises(OptionError, match="got a dict"):
        host_tensor({}, SPECS[0])


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.int64, [1, 2.5]),
        (torch.int64, [float("nan")]),
        (torch.int32, [1 << 40]),
        (torch.uint8, [-1]),
        (torch.bool, [2]),
        (torch.int32, [1j]),
    ],
)
def test_numbers_that_a_dtype_does_not_hold_are_refused_and_not_cut_short(dtype: torch.dtype, numbers: Any) -> None:
    with pytest.raises(OptionError, match=r"input x \(ROWS\)"):
        host_tensor(numbers, InputSpec("x", (ROWS,), dtype))


def test_numbers_become_the_inputs_dtype() -> None:
    for dtype, numbers in [
        (torch.int32, [1, 2, True]),
        (torch.bool, [0, 1, True]),
        (torch.uint16, [0, 65535]),
        (torch.float64, [0.1, 1]),
        (torch.bfloat16, [0.1, 1e3]),
        (torch.int64, []),
    ]:
        found = host_tensor(numbers, InputSpec("x", (ROWS,), dtype))
        assert found.dtype is dtype
        assert torch.equal(found, torch.tensor(numbers, dtype=dtype))


class InterruptBehind(TorchFunctionMode):
    """An interrupt that comes behind the first call of one of these functions."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in self.names:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("inputs", [1, 2])
def test_an_interrupt_behind_the_copy_into_a_pinned_block_leaves_no_rows_as_padding(inputs: int) -> None:
    specs = tuple(InputSpec(f"x{k}", (ROWS,), torch.int64, pad=-1) for k in range(inputs))
    buffers, host = made("cpu", specs=specs), tuple(range(inputs))
    for _ in range(2 * GROUP):
        buffers.stage(8, 2, values(2, "cpu", specs), host)
    for _ in range(2 * GROUP):
        with pytest.raises(KeyboardInterrupt), InterruptBehind("copy_", "_foreach_copy_"):
            buffers.stage(8, 6, values(6, "cpu", specs), host)
    for _ in range(2 * GROUP):
        given = values(2, "cpu", specs)
        buffers.stage(8, 2, given, host)
        check(buffers, 8, 2, given, specs)


def test_an_interrupt_before_a_pinned_block_is_used_leaves_the_others_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (InputSpec("x", (ROWS,), torch.int64, pad=-1),)
    buffers = made("cpu", specs=specs)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(buffers_module, "HostBlock", interrupted)
        buffers.stage(8, 2, values(2, "cpu", specs), (0,))
    for _ in range(3 * GROUP):
        given = values(2, "cpu", specs)
        buffers.stage(8, 2, given, (0,))
        check(buffers, 8, 2, given, specs)
