"""What random programs are made of: templates of lines.

A template takes a `Scope`, picks values out of it and returns one line of Python; None where nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

D = 8  # columns
ROWS = 64  # of the cache


class Scope:
    """The values of a program so far, at a few sizes.

    Args:
        choose: picks one item of a non-empty sequence.
        envs: names to values, one dict a size.
        names: expressions that are tensors.
    """

    def __init__(
        self, choose: Callable[[Sequence[Any]], Any], envs: tuple[dict[str, Any], ...], names: list[str]
    ) -> None:
        self.choose, self.envs, self.names = choose, envs, names
        self.count = 0
        self.callers = [self.value(name) for name in names]

    def value(self, name: str) -> torch.Tensor:
        return eval(name, dict(self.envs[0]))

    def pick(self, fits: Callable[[torch.Tensor], bool]) -> str | None:
        """A value for which ``fits``; late ones are as likely as early ones."""
        found = [name for name in self.names if fits(self.value(name))]
        return self.choose(found) if found else None

    def pick_target(self) -> str | None:
        """A value to write to: one of all, or, as often, one that is the caller's."""
        every = self.choose((True, False))
        return self.pick(lambda t: is_writable(t) and (every or any(t is c for c in self.callers)))

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, line: str) -> bool:
        """Run a line; whether it works at every size and its results are small."""
        trial = []
        for env in self.envs:
            scope = dict(env)
            try:
                exec(line, scope)
            except Exception:
                return False
            trial.append(scope)
        fresh = [k for k in trial[0] if k not in self.envs[0] and k != "__builtins__"]
        for name in fresh:
            value = trial[1][name]
            if isinstance(value, torch.Tensor) and (value.numel() > 4096 or value.dim() > 4):
                return False
        for env, scope in zip(self.envs, trial, strict=True):
            env.update({k: scope[k] for k in fresh})
        self.names += [k for k in fresh if isinstance(trial[0][k], torch.Tensor)]
        return True


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() > 0


def is_rows(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() == 2


def is_wide(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() == 2 and t.shape[1] == D


def is_full(t: torch.Tensor) -> bool:
    return is_wide(t) and t.dtype == torch.float32


def is_writable(t: torch.Tensor) -> bool:
    return is_float(t) and not any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


def is_index(t: torch.Tensor) -> bool:
    return t.dtype == torch.int64 and t.dim() == 1


UNARY = (
    "torch.relu({})", "torch.tanh({})", "{}.sigmoid()", "-{}", "{}.abs()", "F.gelu({})", "F.silu({})", "{} * 0.5",
    "{} + 1", "2 - {}", "{} / 3", "{}.clamp(-1, 2)", "torch.softmax({}, -1)", "{}.cumsum(0)", "{}.exp().clamp(max=4)",
    "{}.clone()", "{}.flip(0)", "{} * {}.shape[0]", "{} + {}.numel()", "{} / ({}.shape[0] + 1)", "{} * k", "{} + f",
    "torch.zeros_like({})", "{} * (2 if {}.shape[0] > 4 else 3)", "{}.double()", "{}.bfloat16()", "{}.half()",
    "{}.float()", "{}.to(torch.float32)", "{}.contiguous()", "{}.round().int().float()",
    "F.layer_norm({}, ({}.shape[-1],))", "{}.pow(2)", "{}.roll(1, 0)",
)  # fmt: skip
REDUCED = (
    "{}.mean(0)", "{}.sum(-1)", "{}.sum(0, keepdim=True)", "{}.amax(-1)", "{}.mean()", "{}.std(-1)", "{}.norm(dim=-1)",
    "{}.sum()", "{}.sum(-1, keepdim=True)", "{}.max(-1).values", "{}.min(0)[0]", "torch.logsumexp({}, -1)",
)  # fmt: skip
VIEWS = (
    "{}[1:]", "{}[:-1]", "{}[:, :4]", "{}[:, ::2]", "{}[:, 1]", "{}[0]", "{}[-1]", "{}.t()", "{}.transpose(0, 1)",
    "{}.reshape(-1)", "{}.view(-1)", "{}.reshape(-1, 4)", "{}.unsqueeze(0)", "{}.unsqueeze(1)", "{}.squeeze(0)",
    "{}.unsqueeze(0).expand(2, -1, -1)", "{}.flatten()", "{}.view({}.shape[0], 2, 4)", "{}.narrow(0, 0, 2)",
    "{}.select(1, 2)", "{}.diagonal()", "{}.detach()", "{}.view_as({})", "{}[..., :3]", "{}[None]", "{}.permute(1, 0)",
    "{}.unflatten(1, (2, 4))", "{}.view({}.size())", "{}[::2]", "{}.swapaxes(0, 1)", "{}[:, None]", "{}.movedim(0, 1)",
    "{}[:0]", "{}[2:5]", "{}.mT", "{}.view(torch.int32).view(torch.float32)", "{}.as_strided(({}.shape[0], 2), (8, 1))",
    "{}.expand_as({})", "{}.data",
)  # fmt: skip
SEVERAL = (
    "{}.chunk(2, 1)", "{}.split(4, 1)", "torch.split({}, [3, 5], 1)", "torch.unbind({}[:, :2], 1)",
    "torch.tensor_split({}, 2, 1)", "{}.sort(-1)", "torch.topk({}, 2, -1)", "torch.max({}, -1)",
    "torch.ops.sgc_prop.pair_of_views({})", "torch.aminmax({}, dim=-1)", "torch.ops.sgc_prop.halves({})",
    "({}[:, :4], {}[:, 4:])",
)  # fmt: skip
IN_PLACE = (
    "{}.add_(1)", "{}.mul_(0.5)", "{}.zero_()", "{}.clamp_(-1, 1)", "{}.fill_(0.25)", "{}[:, 0] = 2.0", "{}[0] = 1",
    "{}[1:] += 1", "{}[:, :2].mul_(0.5)", "{}.t().add_(1)", "{}.sub_({}.mean())", "{}.masked_fill_({} > 0, 0.5)",
    "{} += 1", "{} *= 0.5", "{}.relu_()", "{}.sigmoid_()", "{}.view(-1).add_(1)", "{}.tanh_()", "{}[-1].fill_(3)",
    "{}.add_({}.shape[0])", "{}.data.add_(1)", "torch.ops.sgc_prop.bump_({})", "torch.ops.sgc_prop.bump_({}[:, 1:])",
    "torch.ops.sgc_prop.bump_all_([{}])", "torch.ops.sgc_prop.bump_all_([{}[:, :2], {}[:, 4:]])", "{}.neg_()",
    "F.relu({}, inplace=True)", "{}[{} > 1] = 0.5", "torch.ops.sgc_prop.bump_({}[1:])",
)  # fmt: skip
BINARY = (
    "{} + {}", "{} - {}", "{} * torch.tanh({})", "torch.maximum({}, {})", "torch.where({} > 0, {}, 0.5)",
    "{}.masked_fill({} > 0.5, 0.0)", "torch.cat([{}, {}], 0)", "torch.cat([{}, {}], 1)", "torch.stack([{}, {}])",
    "({} > {}).float()", "torch.lerp({}, {}, 0.5)", "torch.ops.sgc_prop.joined([{}, {}])",
    "torch.ops.sgc_prop.maybe({}, {}, 1, 2.0)", "{} @ {}.t()", "{}.t() @ {}", "torch.hstack(({}, {}))",
    "torch.add({}, {}, alpha=2)", "torch.cat([{}, {}, {}], -1)",
)  # fmt: skip
WRITE_OTHER = (
    "{}.copy_({})", "{}.add_({})", "{}[:, :4] = {}[:, 4:]", "{}[1:] = {}[:-1]", "{}[:, :4].add_({}[:, :4])",
    "torch.ops.sgc_prop.swap_({}, {})", "torch.ops.sgc_prop.into({1}, {0})", "torch.add({0}, {1}, out={0})",
    "{}[:2] = {}[:2]", "{0}[: {1}.shape[0]] = {1}",
)  # fmt: skip
CACHE = (
    "m.cache[idx] = {}", "m.cache.index_copy_(0, idx, {})", "m.cache.index_put_((idx,), {}, accumulate=True)",
    "m.cache.index_add_(0, idx, {})", "m.cache.scatter_(0, idx[:, None].expand(-1, 8), {})",
    "m.cache[: {}.shape[0]] = {}", "m.cache[:{}.shape[0]].copy_({})", "{v} = m.cache[idx]",
    "{v} = m.cache.index_select(0, idx)", "{v} = m.cache[: idx.shape[0]]", "{v} = m.cache.view(2, 32, 8)",
    "{v} = torch.ops.sgc_prop.push_(m.cache, {}, idx)", "{v} = m.cache[2:10]", "{v} = F.embedding(idx, m.cache)",
    "m.cache[idx, 0] = 1.0", "{v} = m.cache.gather(0, idx[:, None].expand(-1, 8)) + {}", "m.cache.t()[:, idx] = {}.t()",
    "m.count.add_(1)", "m.count += {}.mean()", "torch.ops.sgc_prop.bump_(m.count)", "{v} = {} * m.count",
    "{v} = m.cache[5]", "m.cache[5] = {}[0]", "m.ring.copy_(m.ring.roll(1, 0))", "m.ring[0] = {}.mean(0)",
    "{v} = m.ring[1:] + 1", "torch.ops.sgc_prop.bump_(m.ring[2])", "{v} = m.ring.unbind(0)[1]",
)  # fmt: skip
WEIGHTS = (
    "{} @ m.w", "F.linear({}, m.w, m.b)", "F.layer_norm({}, (8,), m.b)", "F.rms_norm({}, (8,), m.b)", "{} + m.b",
    "{} @ m.w.t()", "torch.addmm(m.b, {}, m.w)", "{} * m.b[None]", "{} @ m.tied", "m.b.expand({}.shape[0], 8)",
    "m.w[:, :4]", "torch.mm({}, m.w)",
)  # fmt: skip
CUTS = (
    "torch.ops.sgc_prop.twice({})", "torch.ops.sgc_prop.unsafe({})",
    "torch.ops.sgc_prop.maybe({}, None, {}.shape[0], f)", "torch.ops.sgc_prop.left({})", "torch.ops.sgc_prop.same({})",
    "torch.ops.sgc_prop.halve_({})", "torch.ops.sgc_prop.transposed_result({})", "torch.ops.sgc_prop.left({}) + 1",
    "torch.ops.sgc_prop.twice({}[:, 1:])", "torch.ops.sgc_prop.left({}.t().contiguous().t())",
)  # fmt: skip
INDEX = (
    "{}.argmax(-1)", "{}.argsort(0)[:, 0]", "idx + 1", "idx % 4", "torch.arange({}.shape[0], device={}.device)",
    "idx.flip(0)", "torch.searchsorted({}[0].sort().values.contiguous(), {}[:, 0].contiguous())",
)  # fmt: skip
INDEXED = (
    # Never beyond the rows: a GPU ends the process over such an index, where the host raises.
    "torch.cat([{x}, {x}.new_zeros(2, *{x}.shape[1:])])[{i} % 2]",
    "torch.gather({x}, 1, ({i} % 4)[:, None])", "{i}.float()[:, None] * 0.1",
    "F.one_hot({i} % 8, 8).float()",
)  # fmt: skip
RANDOM = (
    "F.dropout({}, 0.5, True)", "torch.rand_like({})", "{} + torch.rand({}.shape[0], 8, device={}.device)",
    "torch.bernoulli(torch.sigmoid({}))", "torch.randn({}.shape[0], 4, device={}.device)",
)  # fmt: skip
FACTORY = (
    "torch.zeros({}.shape[0], 8, device={}.device)", "torch.ones_like({})",
    "torch.full(({}.shape[0],), 2.0, device={}.device)", "torch.empty_like({}).copy_({})",
    "{}.new_zeros({}.shape[0], 4)", "torch.eye({}.shape[0], device={}.device)", "torch.full_like({}, {}.shape[0])",
    "torch.ones({}.shape[0], {}.shape[0], device={}.device).tril()",
)  # fmt: skip
HOST = (
    "{} + {}.mean().item()", "{} * ({}.sum() > 0).item()", "{0}[{0} > 0].sum() + {0}", "{0}[{0}[:, 0] > 0].sum(0)",
    "torch.nonzero({0}[:, 0] > 0).float().sum() + {0}", "torch.masked_select({0}, {0} > 0).mean() + {0}",
    "{0}.cpu().to({0}.device)",
)  # fmt: skip


def _fill(template: str, name: str) -> str:
    return template.format(*[name] * 4)


def _one(texts: Sequence[str], fits: Callable[[torch.Tensor], bool]) -> Callable[[Scope], Any]:
    def make(s: Scope) -> Any:
        name = s.pick(fits)
        return name and f"{s.new()} = {_fill(s.choose(texts), name)}"

    return make


def _statement(s: Scope) -> Any:
    name = s.pick_target()
    if name is None:
        return None
    line = _fill(s.choose(IN_PLACE), name)
    if name.startswith("m.") and (" += " in line or " *= " in line):
        # It would assign the attribute besides, which only a module's own state may see.
        new = s.new()
        return f"{new} = {name}; {line.replace(name, new, 1)}"
    return line


def _several(s: Scope) -> Any:
    name = s.pick(is_wide)
    return name and f"{s.new()}, {s.new()} = {_fill(s.choose(SEVERAL), name)}"


def _three(s: Scope) -> Any:
    name = s.pick(is_rows)
    return name and f"{s.new()}, {s.new()}, {s.new()} = torch.ops.sgc_prop.three({name})"


def _two(texts: Sequence[str], assign: bool) -> Callable[[Scope], Any]:
    def make(s: Scope) -> Any:
        a = s.pick(is_float) if assign else s.pick_target()
        if a is None:
            return None
        value = s.value(a)
        b = s.pick(lambda t: is_float(t) and t.dim() == value.dim() and t.shape[-1] == value.shape[-1])
        text = s.choose(texts).format(a, b or a, b or a)
        return f"{s.new()} = {text}" if assign else text

    return make


def _cache(s: Scope) -> Any:
    name = s.pick(is_full)
    text = s.choose(CACHE)
    return name and (text.replace("{v}", s.new()) if "{v}" in text else text).format(name, name)


def _index(s: Scope) -> Any:
    i, x = s.pick(is_index), s.pick(is_rows)
    return i and x and f"{s.new()} = {s.choose(INDEXED).format(x=x, i=i)}"


def _optional(s: Scope) -> Any:
    name = s.pick(is_wide)
    return name and f"{s.new()} = {name} if z is None else {name} * z"


COMPLEX = (
    "torch.complex({0}, {0}).conj()", "torch.complex({0}, {0}).conj().imag", "torch.complex({0}, {0}).imag",
    "torch.view_as_real(torch.view_as_complex({0}.reshape(-1, 4, 2)) * 2)",
)  # fmt: skip
TEMPLATES: tuple[Callable[[Scope], Any], ...] = (
    *[_one(UNARY, is_float)] * 4,
    _one(REDUCED, is_float),
    *[_one(VIEWS, is_float)] * 5,
    *[_several] * 2,
    _three,
    *[_statement] * 4,
    *[_two(BINARY, True)] * 3,
    *[_two(WRITE_OTHER, False)] * 2,
    *[_cache] * 3,
    *[_one(WEIGHTS, is_wide)] * 3,
    *[_one(CUTS, is_rows)] * 4,
    _one(INDEX, is_wide),
    _index,
    _one(RANDOM, is_wide),
    _one(FACTORY, is_wide),
    _one(HOST, is_wide),
    _one(COMPLEX, is_full),
    _optional,
)

# What only Dynamo sees: regions, breaks, assignments to attributes.
REGIONS = (
    "with torch.autocast({0}.device.type, dtype=torch.bfloat16): {v} = {0} @ m.w",
    "with torch.no_grad(): {v} = {0} * 2",
    "with torch.enable_grad(): {v} = {0} - 2",
    "torch._dynamo.graph_break(); {v} = {0} + 1",
    "m.count = m.count + 1; {v} = {0} * m.count",
    "m.ring = m.ring + 1; {v} = m.ring[1:]",
    "{v} = [c * 2 for c in {0}.unbind(1)][0]",
    "{v} = {0} * {0}.mean().item()",
)


def _region(s: Scope) -> Any:
    name = s.pick(is_wide)
    return name and s.choose(REGIONS).format(name, v=s.new())


DYNAMO_TEMPLATES = (*TEMPLATES, *[_region] * 4)
