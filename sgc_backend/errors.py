"""Every error that users can meet.

::

    SgcError
    ├── OptionError (ValueError)          a bad option, name or argument, before anything ran
    │   └── CutOpError                    an op named in cut_ops or capturable_ops resolves to nothing
    ├── CaptureError (RuntimeError)       a recording could not be made; __cause__ is the real reason
    │   └── CaptureNestedError            a capture, or reset(), was begun inside a capture or a replay
    ├── ReplayError (RuntimeError)        a recording exists but must not be replayed now
    │   ├── NotCapturedError (KeyError)   no recording under this key
    │   ├── StalePoolError                the pool was reset after the recording was made
    │   └── NestedReplayError             a replay was begun inside a replay or a capture
    └── StrictError (RuntimeError)        strict=True and the call would have run uncaptured

A message names the piece or input, what was expected, what came, and what to do.
"""

from __future__ import annotations


class SgcError(Exception):
    """Base of every error that this package raises on purpose."""


class OptionError(SgcError, ValueError):
    """An option, key or argument is not valid. Raised before anything was captured or run."""


class CutOpError(OptionError):
    """A name in ``cut_ops`` or ``capturable_ops`` resolves to no operator."""


class CaptureError(SgcError, RuntimeError):
    """A recording could not be made. ``__cause__`` holds the first, real reason; the pool stays usable."""


class CaptureNestedError(CaptureError):
    """A capture, or reset(), was begun inside a capture or inside a replay from the same pool."""


class ReplayError(SgcError, RuntimeError):
    """A recording exists but must not be replayed as things stand."""


class NotCapturedError(ReplayError, KeyError):
    """Nothing was recorded under the key that was asked for."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0]) if self.args else ""


class StalePoolError(ReplayError):
    """The recording belongs to a pool that was reset since; record again."""


class NestedReplayError(ReplayError):
    """A replay was begun inside a replay or a capture of the same pool, whose memory it would overwrite, or inside a
    capture that is not this package's, whose replays would check nothing."""


class StrictError(SgcError, RuntimeError):
    """``strict=True`` and this call would have run compiled or eager instead of replayed."""
