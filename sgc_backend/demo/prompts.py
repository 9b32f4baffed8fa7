"""Beginnings in the style of the text that the demo model was trained on, from 5 to about 200 bytes each."""

from __future__ import annotations

PROMPTS: tuple[bytes, ...] = (
    b"In a ",
    b'The "w',
    b"If the ",
    b"It is ",
    b'The "for" statement ',
    b"A method is called when ",
    b"The following identifiers are used as ",
    b'The "with" statement is used to wrap the execution of a block with\nmethods defined by a ',
    b"When a generator function is called, it returns an iterator known as a\n"
    b"generator.  That generator then controls the ",
    b"object.__getitem__(self, key)\n\n"
    b'   Called to implement evaluation of "self[key]".  For sequence types,\n'
    b"   the accepted keys should be integers.  If the key is of an\n"
    b"   inappropriate type, ",
    b'The "try" statement specifies exception handlers and/or cleanup code\n'
    b'for a group of statements.  When no exception occurs in the "try"\n'
    b"clause, no exception handler is executed.  When an exception occurs, ",
)
