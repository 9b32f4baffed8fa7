"""Host numbers of a graph, evaluated from a call's inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from models import CUTS, ops
from torch import fx

import sgc_backend
import sgc_backend.emulated
from sgc_backend import symbols as symbols_module
from sgc_backend.facts import example
from sgc_backend.forms import expression
from sgc_backend.symbols import Symbols, UnboundSymbolError, kind_of, number


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    yield
    torch._dynamo.reset()


class Watched(fx.Interpreter):
    """Runs a graph and compares each host number that it computes with the one that is evaluated."""

    def __init__(self, gm: fx.GraphModule, symbols: Symbols) -> None:
        super().__init__(gm)
        self.symbols, self.compared = symbols, 0

    def check(self, args: tuple[Any, ...]) -> None:
        self.args_given = args
        self.run(*args)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op.startswith("call") and isinstance(example(n), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found = self.symbols.evaluate(expression(example(n)), self.args_given, kind_of(example(n)))
            assert type(found) is type(value), f"{n.name}: {found!r} instead of {value!r}"
            assert found == value, f"{n.name}: {found!r} instead of {value!r}"
            self.compared += 1
        return value


def watch(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> int:
    """Compare on every call of the one graph of ``fn``; returns how many numbers were compared."""
    watched = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        watcher = Watched(gm, Symbols(gm))
        watched.append(watcher)

        def call(*args: Any) -> Any:
            watcher.check(args)
            return gm(*args)

        return call

    with torch.no_grad():
        compiled = torch.compile(fn, backend=backend, dynamic=True, fullgraph=True)
        for args in calls:
            compiled(*args)
    assert len(watched) == 1, "the graph was specialised"
    return watched[0].compared


def rows(*counts: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ones(n, 3) for n in counts)


INTEGERS: dict[str, Callable[[int, int], Any]] = {
    "sum": lambda n, m: n + m,
    "product": lambda n, m: n * m,
    "floor division": lambda n, m: (n + m) // 3,
    "remainder": lambda n, m: n % 3,
    "power": lambda n, m: n**2,
    "max": lambda n, m: max(n, m),
    "min": lambda n, m: min(n, m) * 2,
    "negative": lambda n, m: n - 3 * m,
    "rounded up": lambda n, m: -(-n // 4) * 4,
    "shifts": lambda n, m: (n << 2) + (m >> 1),
    "ceil": lambda n, m: math.ceil(n / 2),
    "truncated": lambda n, m: int(m / 2),
    "nested": lambda n, m: (n * m + n) // (m + 1) % 7,
}


@pytest.mark.parametrize("case", INTEGERS)
def test_an_integer_is_what_python_computes(case: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() * INTEGERS[case](x.shape[0], y.shape[0])

    assert watch(fn, rows(6, 9), rows(7, 9), rows(12, 5), rows(9, 9), rows(31, 17)) > 0


FLOATS: dict[str, Callable[[int, int], Any]] = {
    "quotient": lambda n, m: n / m,
    "root": lambda n, m: n**-0.5,
    "square root": lambda n, m: math.sqrt(n),
    "float": lambda n, m: float(n) * 0.5,
    "scaled once": lambda n, m: n * 0.1,
    "scaled twice": lambda n, m: n * 0.3 * 0.7,
    "summed": lambda n, m: 0.1 * n + 0.2 * m + 0.3 * n,
    "difference": lambda n, m: n - 0.5 * m + 0.1 * n,
    "zero": lambda n, m: (n - m) * 0.5,
}


@pytest.mark.parametrize("case", FLOATS)
def test_a_float_is_bitwise_what_python_computes(case: str) -> None:
    # sympy would sum constants up and reorder terms, so a float crosses as the nodes that compute it
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factor = FLOATS[case](x.shape[0], y.shape[0])
        first = x.double().sum() * factor
        return torch.full((2,), factor, dtype=torch.float64), ops.double(first) * factor

    options = {"inner": "eager", "cut_ops": CUTS, "capture_sizes": None, "device_module": sgc_backend.emulated}
    compiled = torch.compile(fn, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    with torch.no_grad():
        for n in (6, 7, 12):
            for m in (9, 12, 23):
                for _ in range(3):
                    args = rows(n, m)
                    for got, expected in zip(compiled(*args), fn(*args), strict=True):
                        assert torch.equal(got, expected)
    sgc_backend.reset()


def test_a_wrapped_number_is_read_from_its_tensor() -> None:
    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.sum() * scale * x.shape[0]

    assert watch(fn, (torch.ones(4), 0.25), (torch.ones(5), 1e-300), (torch.ones(5), 3.0)) > 0


def test_numbers_are_told_from_sizes() -> None:
    found: list[Symbols] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Any:
        found.append(Symbols(gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(lambda x, s: x * s * x.shape[0], backend=backend, dynamic=True)(torch.ones(4, 5), 0.25)
    (symbols,) = found
    assert len(symbols.numbers) == 1
    assert not set(symbols.numbers) & set(symbols.sizes)


# -- by hand ---------------------------------------------------------------------------------------------------------


def symbol_graph(*shapes: tuple[Any, ...], sizes: tuple[str, ...] = ()) -> tuple[fx.GraphModule, dict[str, Any]]:
    """A graph whose inputs are sizes by name, then tensors of the given shapes (a name is a symbol)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    made: dict[str, torch.SymInt] = {}

    def size(name: Any) -> Any:
        if isinstance(name, int):
            return name
        if name not in made:
            from torch._dynamo.source import ConstantSource

            source = ConstantSource(name)
            symbol = env.create_symbol(7 + len(made), source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            made[name] = env.create_symintnode(symbol, hint=7 + len(made), source=source)
        return made[name]

    graph = fx.Graph()
    for name in sizes:
        graph.placeholder(f"size_{name}").meta["example_value"] = size(name)
    for index, shape in enumerate(shapes):
        dims = [size(n) if not callable(n) else n(size) for n in shape]
        with mode:
            graph.placeholder(f"x{index}").meta["example_value"] = torch.empty(dims)
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph), {name: value.node.expr for name, value in made.items()}


def test_a_symbol_is_read_from_a_size_that_is_passed() -> None:
    gm, names = symbol_graph(("a", 3), sizes=("a",))
    symbols = Symbols(gm)
    assert symbols.sizes == {names["a"]: 0}
    assert symbols.evaluate(names["a"], (5, torch.ones(9, 3))) == 5


def test_a_symbol_is_read_from_a_tensors_shape_where_no_size_is_passed() -> None:
    gm, names = symbol_graph((2, "a"), ("b", "a"))
    symbols = Symbols(gm)
    args = (torch.ones(2, 5), torch.ones(6, 5))
    assert symbols.evaluate(names["a"], args) == 5
    assert symbols.evaluate(names["b"] * names["a"], args) == 30
    assert symbols.read(names["b"], args) == 6


def test_a_symbol_that_no_input_shows_plainly_is_an_error_that_names_it() -> None:
    gm, names = symbol_graph((lambda size: 2 * size("a"),))
    symbols = Symbols(gm)
    with pytest.raises(UnboundSymbolError, match=f"no input shows the size {names['a']}"):
        symbols.evaluate(names["a"], (torch.ones(4),))
    with pytest.raises(UnboundSymbolError):
        symbols.evaluate(names["a"] + 1, (torch.ones(4),))


def test_bound_symbols_come_in_a_stable_order_without_repeats() -> None:
    gm, names = symbol_graph(("c", "b", "a"))
    symbols = Symbols(gm)
    every = [names["a"], names["c"], names["b"]]
    assert symbols.bound(every) == symbols.bound(reversed([*every, *every])) == tuple(sorted(every, key=str))
    assert symbols.bound(()) == ()


@pytest.mark.parametrize("plain", [3, 2.5, True, None, "a", torch.float32])
def test_what_is_no_expression_is_itself(plain: Any) -> None:
    gm, _ = symbol_graph(("a",))
    assert expression(plain) is plain
    assert Symbols(gm).evaluate(plain, (torch.ones(2),)) is plain


def test_a_closed_expression_needs_no_input() -> None:
    gm, _ = symbol_graph(("a",))
    assert Symbols(gm).evaluate(sympy.Integer(6) / 2, (torch.ones(2),)) == 3


def test_a_comparison_is_a_bool() -> None:
    gm, names = symbol_graph(("a", "b"))
    symbols = Symbols(gm)
    assert symbols.evaluate(names["a"] > names["b"], (torch.ones(3, 2),)) is True
    assert symbols.evaluate(sympy.Eq(names["a"], names["b"]), (torch.ones(3, 2),)) is False


def test_evaluations_are_kept_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols_module, "CACHED_CALLS", 8)
    gm, names = symbol_graph(("a",))
    symbols = Symbols(gm)
    for n in range(50):
        assert symbols.evaluate(names["a"] * 2 + 1, (torch.empty(n, 0),)) == 2 * n + 1
        assert len(symbols._cache) <= 8
    assert symbols.evaluate(names["a"] * 2 + 1, (torch.empty(49, 0),)) == 99


def test_a_kept_value_is_that_of_its_own_expression_and_size() -> None:
    gm, names = symbol_graph(("a", "b"))
    symbols = Symbols(gm)
    for shape in ((2, 3), (3, 2), (2, 3), (6, 1)):
        args = (torch.empty(shape),)
        assert symbols.evaluate(names["a"] * names["b"], args) == 6
        assert symbols.evaluate(names["a"] - names["b"], args) == shape[0] - shape[1]


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        (sympy.Integer(3), 3),
        (sympy.Integer(0), 0),
        (sympy.Float(2.5), 2.5),
        (sympy.Float(2.0), 2.0),
        (sympy.true, True),
        (sympy.false, False),
        (sympy.oo, math.inf),
        (sympy.Rational(1, 2), 0.5),
        (sympy.Float(0.0), 0.0),
    ],
)
def test_a_closed_number_keeps_its_type(expr: Any, value: Any) -> None:
    found = number(expr)
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_the_host_reads_of_an_input_of_its_own_is_told_by_the_call(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGC_DEVICE", "emulated")

    def fn(x: torch.Tensor, start: torch.Tensor) -> Any:
        number = start.item()
        h = ops.double(x) + 1
        return h * number, x + number, ops.double(h) - number, number

    options = {"inner": inner, "cut_ops": CUTS}
    call = torch.compile(fn, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for k in (0, 0, 1, 1, 0, 0):
            args = torch.randn(5, 4), torch.tensor(3 * k)
            got, wanted = call(*args), fn(*args)
            assert got[3] == wanted[3] and type(got[3]) is type(wanted[3])
            torch.testing.assert_close(got[:3], wanted[:3], rtol=0, atol=0)
    assert sum(sum(s["replayed"].values()) for s in sgc_backend.stats().values())
    sgc_backend.reset()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_cut_may_be_sliced_by_what_the_host_reads_of_an_input(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGC_DEVICE", "emulated")

    def fn(x: torch.Tensor, count: torch.Tensor) -> Any:
        n = count.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        h = x + 1
        return h, ops.double(h)[:n]

    options = {"inner": inner, "cut_ops": CUTS}
    call = torch.compile(fn, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for rows, n in ((8, 3), (8, 3), (8, 5), (5, 2), (5, 0), (5, 5)):
            args = torch.randn(rows, 4), torch.tensor(n)
            torch.testing.assert_close(call(*args), fn(*args), rtol=0, atol=0)
    assert sum(sum(s["replayed"].values()) for s in sgc_backend.stats().values())
    sgc_backend.reset()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_what_the_host_reads_is_what_it_was_before_the_graph_writes_it(
    inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGC_DEVICE", "emulated")

    def fn(x: torch.Tensor, start: torch.Tensor) -> Any:
        n = start.item()
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        h = x + 1
        ops.add_one_(start)
        return h.relu() + n, ops.double(h)[:n], h[:n], {"n": n, "more": n + 1}

    options = {"inner": inner, "cut_ops": CUTS}
    call = torch.compile(fn, backend=sgc_backend.sgc_piecewise, dynamic=True, options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for rows, number in ((8, 3), (8, 3), (8, 3), (8, 5), (8, 5), (5, 2), (5, 2), (8, 4)):
            x, starts = torch.randn(rows, 4), [torch.tensor(number), torch.tensor(number)]
            got, wanted = call(x, starts[0]), fn(x, starts[1])
            assert got[3] == wanted[3]
            torch.testing.assert_close((got[:3], starts[0]), (wanted[:3], starts[1]), rtol=0, atol=0)
    assert sum(sum(s["replayed"].values()) for s in sgc_backend.stats().values())
    sgc_backend.reset()


def test_a_replay_by_key_refuses_another_number_of_a_host_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGC_DEVICE", "emulated")

    def fn(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return ops.double(x + 1) * 2 + start.item()

    x, start = torch.randn(8, 4), torch.tensor(3)
    options = {"inner": "eager", "cut_ops": CUTS}
    backend = sgc_backend.TcPiecewiseCudaGraphBackend(fn, capture_sizes=[8], options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        with backend.capture_session():
            backend.capture_one(8, lambda: backend.compiled(x, start))
        for number, refused in ((3, False), (5, True), (3, False)):
            start.fill_(number)
            if refused:
                with pytest.raises(sgc_backend.ReplayError, match="was 3 when key 8 was captured and is 5 now"):
                    backend.replay(8)
            else:
                torch.testing.assert_close(backend.replay(8), fn(x, start), rtol=0, atol=0)
    sgc_backend.reset()
