"""Custom ops of every kind that may be cut or captured: fresh results, writes, views, lists, None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library = torch.library.Library("sgc_prop", "DEF")


def _define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any] | None = None, **more: Any) -> None:
    name = schema.partition("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *more.get("tags", ())))
    library.impl(name, impl, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"sgc_prop::{name}", fake, lib=library)


def _push_(cache: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    cache[index] = x
    return x - 1


def _swap_(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def _bump_all_(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1)


def _maybe(x: torch.Tensor, y: torch.Tensor | None, k: int, f: float) -> torch.Tensor:
    return x * f + k if y is None else x + y


def _pair_of_views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = x * 0.5
    return whole, whole[:, 1:]


# fresh results: one, three of them, a list, over one storage
_define("twice(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
_define("unsafe(Tensor x) -> Tensor", lambda x: x - 3, torch.empty_like, tags=(torch.Tag.cudagraph_unsafe,))
_define(
    "three(Tensor x) -> (Tensor, Tensor, Tensor)",
    lambda x: (x + 1, x.t().clone(memory_format=torch.contiguous_format), x.mean(-1)),
    lambda x: (torch.empty_like(x), x.new_empty(x.shape[1], x.shape[0]), x.new_empty(x.shape[0])),
)
_define(
    "halves(Tensor x) -> Tensor[]",
    lambda x: [x[:, : x.shape[1] // 2].clone(), x[:, x.shape[1] // 2 :].clone()],
    lambda x: [x.new_empty(x.shape[0], x.shape[1] // 2), x.new_empty(x.shape[0], x.shape[1] - x.shape[1] // 2)],
)
_define("pair_of_views(Tensor x) -> (Tensor, Tensor)", _pair_of_views, _pair_of_views)
_define("maybe(Tensor x, Tensor? y, SymInt k, float f) -> Tensor", _maybe, lambda x, y, k, f: torch.empty_like(x))
_define(
    "joined(Tensor[] xs) -> Tensor",
    lambda xs: torch.cat(xs, 0),
    lambda xs: xs[0].new_empty(sum(x.shape[0] for x in xs), *xs[0].shape[1:]),
)
_define(
    "transposed_result(Tensor x) -> Tensor", lambda x: (x.t() + 1).contiguous().t(), lambda x: x.t().contiguous().t()
)
# writes: in place, with a result besides, two tensors, a list, the same tensor returned
_define("bump_(Tensor(a!) x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)
_define(
    "push_(Tensor(a!) cache, Tensor x, Tensor index) -> Tensor", _push_, lambda cache, x, index: torch.empty_like(x)
)
_define("swap_(Tensor(a!) a, Tensor(b!) b) -> ()", _swap_, lambda a, b: None)
_define("bump_all_(Tensor(a!)[] xs) -> ()", _bump_all_, lambda xs: None)
_define("halve_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(0.5), lambda x: x)
_define("into(Tensor x, Tensor(a!) out) -> ()", lambda x, out: (out.copy_(torch.tanh(x)), None)[1], lambda x, out: None)
# views
_define("left(Tensor(a) x) -> Tensor(a)", lambda x: x[:, :4], lambda x: x[:, :4])
_define("same(Tensor(a) x) -> Tensor(a)", lambda x: x.view(x.shape), lambda x: x.view(x.shape))

CUSTOM = (
    "twice", "unsafe", "three", "halves", "pair_of_views", "maybe", "joined", "transposed_result", "bump_", "push_",
    "swap_", "bump_all_", "halve_", "into", "left", "same",
)  # fmt: skip
ATEN = (
    "relu", "mm", "matmul", "add", "add_", "mul", "mul_", "transpose", "t", "select", "slice", "view", "split",
    "index_put_", "cat", "copy_", "fill_", "sum", "_to_copy", "expand", "arange", "index", "softmax", "unbind", "clone",
    "rand_like",
)  # fmt: skip
