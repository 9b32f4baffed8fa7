"""What may run padded: every rule against its neighbours, and against runs with garbage in the other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from prefix_cases import CASES, Case
from prefix_oracle import POISONS, SIZES, Program, differences, program


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Nothing here captures; only what Dynamo compiled is forgotten."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def all_differences(made: Program, *, trust: bool = False) -> list[str]:
    wrong = []
    for exact, padded in SIZES:
        for poison in POISONS:
            try:
                wrong += differences(made, exact, padded, poison, trust=trust)
            except (RuntimeError, IndexError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rule_says_what_padded_runs_show(case: Case) -> None:
    made = program(case.fn, case.inputs)
    blame = made.found.blame
    assert {b.op.partition("::")[2] for b in blame.values()} == set((case.blamed or "").split()), blame
    assert not all_differences(made)
    if case.blamed and case.shows:
        assert all_differences(made, trust=True), "the padded run shows no difference: is it safe after all?"
