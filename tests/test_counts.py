"""What one call of the demo's phases does, exactly: a change that makes every call do more shows here without a GPU.

What a call does is what it costs the host. Where a number falls, write the smaller one down; where one rises, the
failure prints the functions and how often each was entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgc_backend import DecodeRunner, PrefillRunner, emulated, sgc_piecewise
from sgc_backend.bench.counting import count, functions
from sgc_backend.demo import serve
from sgc_backend.demo.engine import Engine
from sgc_backend.demo.model import Decoder, DecoderConfig
from sgc_backend.seen import calls_seen

SMALL = DecoderConfig(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=128)
TABLES = (4, 8)  # requests, and blocks of each
CALLS = 8  # after so many, everything that is done now and then has been done once


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PREFILL_SIZES", (8, 16))


@pytest.fixture
def model() -> Decoder:
    model = Decoder(SMALL).eval().requires_grad_(False)
    Engine(model, max_requests=TABLES[0], max_prefill=16, block_size=8, max_context=8 * TABLES[1])
    return model


def inputs(n: int, tables: int, *, lists: bool = False) -> dict[str, Any]:
    """Inputs of ``n`` rows; tensors of the emulated device, which are the host's, or lists, which are packed first."""
    given = {
        "tokens": torch.arange(n),
        "positions": torch.arange(n) % 8,
        "slots": torch.arange(n),
        "token_req": torch.zeros(n, dtype=torch.int32),
        "block_tables": torch.zeros(tables, TABLES[1], dtype=torch.int32),
    }
    return {name: value.tolist() for name, value in given.items()} if lists else given


def prefill(model: Decoder) -> PrefillRunner:
    runner = serve.prefill_runner(model, TABLES, options={"inner": "eager"}, device_module=emulated)
    runner.capture()
    return runner


def decode(model: Decoder) -> DecodeRunner:
    runner = serve.decode_runner(model, TABLES, device_module=emulated)
    runner.capture()
    return runner


def did(call: Callable[[], Any]) -> dict[str, float]:
    """What one call does, and how many functions of ours it enters; in the mean, once all is settled.

    Launches are left out: how many ops a model's line comes to is torch's affair.
    """
    for _ in range(2 * CALLS):
        call()
    entered = functions(lambda: [call() for _ in range(CALLS)])
    assert functions(lambda: [call() for _ in range(CALLS)]) == entered, "calls differ"
    print("\n".join(f"{number / CALLS:8g} {name}" for name, number in entered.most_common()))
    counted = count(call).as_dict()
    del counted["launches"]
    return {**counted, "functions": sum(entered.values()) / CALLS}


def expected(graphs: int, copies: int, clones: int, ops: int, allocations: int, functions: float) -> dict[str, float]:
    return locals()


def test_a_decode_step(model: Decoder) -> None:
    runner = decode(model)
    plain = expected(graphs=1, copies=5, clones=0, ops=0, allocations=0, functions=13)
    for rows in (4, 3, 1):
        given = inputs(rows, rows)
        assert did(lambda given=given: runner(**given)) == plain, f"{rows} rows"
    lists = inputs(4, 4, lists=True)
    # how many ops it takes to make tensors of lists is torch's affair too; _turn is entered by every fourth call
    assert did(lambda: runner(**lists))["functions"] == 25.5


def test_a_prefill(model: Decoder) -> None:
    runner = prefill(model)
    for rows, entered in ((16, 31), (11, 32)):
        given = inputs(rows, TABLES[0])
        assert did(lambda given=given: runner(**given)) == expected(
            graphs=3, copies=5, clones=0, ops=2, allocations=0, functions=entered
        ), f"{rows} rows"


@torch.no_grad()
def test_a_compiled_prefill_behind_dynamo(model: Decoder) -> None:
    options = {"inner": "eager", "device_module": emulated}
    compiled = torch.compile(model, backend=sgc_piecewise, dynamic=True, options=options)
    for rows, copies in ((16, 4), (11, 6)):
        given = inputs(rows, TABLES[0])
        for _ in range(3):  # two warm up and record where nothing else happens
            compiled(**given)
        with calls_seen() as seen:
            compiled(**given)
        (replayed,) = seen.replayed
        assert did(lambda replayed=replayed: replayed.graph(*replayed.args)) == expected(
            graphs=3, copies=copies, clones=1, ops=4, allocations=3, functions=27
        ), f"{rows} rows"
