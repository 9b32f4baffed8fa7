"""Beginnings in the style of the text the demo model was trained on, of about 5 to 200 bytes."""

from __future__ import annotations

PROMPTS: tuple[bytes, ...] = (b'The "w',)
