"""The errors: the tree that the module draws is the tree of its classes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

import sgc_backend
from sgc_backend import errors

CLASSES = {name: c for name, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__}


@pytest.fixture(autouse=True)
def clean_slate() -> None:
    """Nothing here compiles or captures, so nothing is left to clean up after."""


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Class -> (parent in the drawing, base in parentheses), read from the module's docstring."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w*Error)(?: \((?P<base>\w+)\))?", line)
        if match is None:
            continue
        depth = len(match["indent"])
        while above and above[-1][0] >= depth:
            above.pop()
        found[match["name"]] = (above[-1][1] if above else None, match["base"])
        above.append((depth, match["name"]))
    return found


def test_the_drawing_holds_every_class() -> None:
    assert set(drawn()) == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_has_the_bases_that_are_drawn(name: str) -> None:
    parent, builtin = drawn()[name]
    bases = [base.__name__ for base in CLASSES[name].__bases__]
    assert bases == [b for b in (parent or "Exception", builtin) if b is not None]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_is_public(name: str) -> None:
    assert getattr(sgc_backend, name) is CLASSES[name]
    assert name in sgc_backend.__all__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_shows_its_message_as_it_is(name: str) -> None:
    error = CLASSES[name]("piece 3: expected 'a', got\n'b'")
    assert str(error) == "piece 3: expected 'a', got\n'b'"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_error_without_a_message_can_be_shown(name: str) -> None:
    assert str(CLASSES[name]()) == ""


def test_one_except_clause_catches_them_all() -> None:
    assert all(issubclass(c, errors.SgcError) for c in CLASSES.values())
    assert not issubclass(errors.SgcError, (ValueError, RuntimeError))


def test_a_bad_option_and_a_failed_run_are_told_apart() -> None:
    assert not issubclass(errors.OptionError, RuntimeError)
    assert not issubclass(errors.ReplayError, errors.CaptureError)
    assert not issubclass(errors.NotCapturedError, ValueError)
