"""Files that are written whole or not at all: into a draft beside them, which then takes their place."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from .errors import OptionError


@contextlib.contextmanager
def draft_of(path: str, option: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A draft for ``path`` in its folder, and what puts it into its place; a draft that is left is removed.

    Raises:
        OptionError: the folder can't be written to, or ``path`` is one; ``option`` names who asked for the file.
    """
    if os.path.isdir(path):
        raise OptionError(f"{option} {path}: it is a folder; name a file")
    try:
        folder, ending = os.path.dirname(os.path.abspath(path)), os.path.splitext(path)[1]
        descriptor, draft = tempfile.mkstemp(dir=folder, suffix=ending)
        os.close(descriptor)
    except OSError as error:
        raise OptionError(f"{option} {path}: {error}") from error
    try:
        yield draft, lambda: os.replace(draft, path)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)


@contextlib.contextmanager
def json_to(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A writer of a result to ``path``, which is replaced when the result is written and not before; None: of nothing.

    Raises:
        OptionError: the folder can't be written to, or ``path`` is one.
    """
    if path is None:
        yield lambda result: None
        return
    with draft_of(path, "--json") as (draft, keep):

        def write(result: dict[str, Any]) -> None:
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
            keep()

        yield write
