"""Beginnings in the style of the text that the demo model was trained on, from 5 to about 200 bytes each."""

from __future__ import annotations

PROMPTS: tuple[bytes, ...] = (
    b'The "',
    b"If the ",
    b"Changed in version 3",
    b"Note that the name of the ",
    b"A function definition is an executable statement. Its ",
    b"The following example shows how a class can be used as a context manager:\n\n   class ",
    b"When a generator function is called, it returns an iterator known as a generator. "
    b"That generator then controls the ",
    b"Special method names\n********************\n\nA class can implement certain operations that are invoked by "
    b"special syntax, such as arithmetic operations. This is the way in which ",
    b'object.__getitem__(self, key)\n\n   Called to implement evaluation of "self[key]". For sequence types, the '
    b'accepted keys should be integers. If the key is of an inappropriate type, a "TypeError" ',
    b'The "try" statement specifies exception handlers and/or cleanup code for a group of statements. When no '
    b'exception occurs in the "try" clause, no exception handler is executed. When an exception occurs, ',
)
