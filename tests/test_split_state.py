"""State that a graph sets or writes, across groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_split import clean_slate, relu
from test_walk import rows, same, walked
from torch.nn.attention import SDPBackend, sdpa_kernel

import sgc_backend

__all__ = ["clean_slate"]


# -- state -------------------------------------------------------------------------------------------------------------


def _in_place(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(1)
    z = relu(x * 2)
    x[1:].mul_(3)
    y.copy_(relu(x))
    x.view(-1)[0] = 7
    return z + x, y.t(), x


def test_writes_keep_their_order() -> None:
    graph = walked(_in_place, *[(torch.randn(n, 4), torch.randn(n, 4)) for n in (3, 5, 3)])
    assert set().union(*(g.writes for g in graph.split.groups)) == {"l_x_", "l_y_"}


def test_a_group_knows_which_inputs_it_writes() -> None:
    graph = walked(lambda x, y: (x.add_(1), relu(y), y.mul_(2))[1], (torch.ones(3, 4), torch.ones(3, 4)))
    assert [set(g.writes) for g in graph.split.groups] == [{"l_x_"}, set(), {"l_y_"}]


def test_inputs_that_share_memory_are_written_as_one() -> None:
    base = torch.randn(5, 4)
    walked(lambda x, y: (x.add_(1), relu(y * 2), y.mul_(2)), (base[:-1], base[1:]), dynamic=False)


def _autocast(x: torch.Tensor) -> Any:
    w = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = relu(x @ w)
        with torch.autocast("cpu", enabled=False):
            b = relu(a.float() @ w)
        c = relu(b @ w)
        d = c @ w
    e = relu(d.float() @ w)
    with torch.autocast("cpu", dtype=torch.float16):
        f = e @ w
    return a, b, c, d, e, f


def test_autocast_is_reopened_in_each_group() -> None:
    graph = walked(_autocast, *rows(6, 3))
    assert graph.layout == "PCPCPCPCP"
    for group in graph.split.groups:
        targets = [n.target for n in group.gm.graph.nodes]
        entered = targets.count(torch.amp.autocast_mode._enter_autocast)
        assert entered == targets.count(torch.amp.autocast_mode._exit_autocast)
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_is_on_already_holds_in_every_group() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return relu(x @ x.t()) @ x

    with torch.autocast("cpu", dtype=torch.bfloat16):
        walked(fn, *rows(6, 3))


def _grad_modes(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = relu(x * 2)
        with torch.enable_grad():
            z = relu(y + 1)
    return z * 2


def test_grad_mode_switches_are_dropped() -> None:
    graph = walked(_grad_modes, *rows(6, 3))
    for group in graph.split.groups:
        assert torch._C._set_grad_enabled not in [n.target for n in group.gm.graph.nodes]
    assert torch.is_grad_enabled()


# -- state that spans groups, through the whole backend ----------------------------------------------------------------


def states() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def run_through_the_backend(fn: Callable[..., Any], *args: Any, cut_ops: Sequence[Any] = (relu,)) -> None:
    compiled = torch.compile(
        fn,
        backend=sgc_backend.sgc_piecewise,
        dynamic=True,
        options={"inner": "eager", "capture_sizes": None, "cut_ops": cut_ops},
    )
    before = states()
    with torch.no_grad():
        inside = states()
        for _ in range(4):
            expected = fn(*args)
            got = compiled(*args)
            same([expected], [got])
            assert [t.requires_grad for t in _tensors(expected)] == [t.requires_grad for t in _tensors(got)]
            assert states() == inside
    assert states() == before


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


@pytest.fixture
def put_back() -> Iterator[None]:
    flags = torch.backends.cuda
    kept = (flags.flash_sdp_enabled(), flags.math_sdp_enabled(), flags.mem_efficient_sdp_enabled())
    yield
    torch.use_deterministic_algorithms(False)
    for enable, value in zip(
        (flags.enable_flash_sdp, flags.enable_math_sdp, flags.enable_mem_efficient_sdp), kept, strict=True
    ):
        enable(value)


@torch.library.custom_op("sgc_split_test::flash_is_on", mutates_args=())
def flash_is_on(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float(torch.backends.cuda.flash_sdp_enabled()))


@flash_is_on.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("put_back")
def test_a_choice_of_attention_kernels_holds_for_a_cut_at_every_replay() -> None:
    # Nodes that choose kernels must not be parted from the cuts between them.
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with sdpa_kernel(SDPBackend.MATH):
            z = flash_is_on(y)
        return z + y

    run_through_the_backend(fn, torch.randn(3, 4), cut_ops=[flash_is_on])


@pytest.mark.usefixtures("put_back")
def test_a_choice_of_attention_kernels_ends_where_it_ends() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = flash_is_on(x)
        with sdpa_kernel(SDPBackend.MATH):
            z = flash_is_on(y) * 2
        return z + y

    run_through_the_backend(fn, torch.randn(3, 4), cut_ops=[flash_is_on])


@pytest.mark.usefixtures("put_back")
def test_deterministic_mode_ends_where_it_ends() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = relu(x)
        torch.use_deterministic_algorithms(True)
        b = relu(a) * 2
        torch.use_deterministic_algorithms(False)
        return relu(b) + 1

    run_through_the_backend(fn, torch.randn(3, 4))


def test_inference_mode_ends_where_it_ends() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = relu(x)
        with torch.inference_mode():
            b = relu(a)
            c = relu(b)
        return c * 2

    run_through_the_backend(fn, torch.randn(3, 4))


def test_inference_mode_does_not_keep_a_graph_from_being_captured() -> None:
    # The switch's token must not cross from a cut to a piece.
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = relu(x)
        with torch.inference_mode():
            b = relu(a)
        return b * 2

    graph = walked(fn, *rows(3, 5))
    assert not any("inference_mode" in name for g in graph.split.groups for name in g.outputs)


def test_a_graph_that_turns_gradients_on_for_a_weight_gives_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return relu(x * weight)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_through_the_backend(fn, torch.randn(3, 4))


def test_a_write_in_a_branch_reaches_later_pieces() -> None:
    def add(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a.clone()

    def sub(a: torch.Tensor) -> torch.Tensor:
        a.sub_(1)
        return a.clone()

    def fn(x: torch.Tensor) -> Any:
        y = x * 2
        return torch.cond(y.sum() > 0, add, sub, (x.clone(),)) + 1, y

    def writing(x: torch.Tensor) -> Any:
        y = x * 2
        return torch.cond(y.sum() > 0, add, sub, (x,)) + 1, x * 3

    run_through_the_backend(fn, torch.randn(3, 4))
    torch._dynamo.reset()
    compiled = torch.compile(
        writing, backend=sgc_backend.sgc_piecewise, options={"inner": "eager", "capture_sizes": None}
    )
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 4)
            ours = x.clone()
            same([writing(x), x], [compiled(ours), ours])
