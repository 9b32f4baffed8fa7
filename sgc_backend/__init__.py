"""Shared graph capture: a torch.compile backend and wrappers that record CUDA graphs from one memory pool."""

from ._version import __version__
from .backend import reset, sgc_piecewise
from .capturable import register_attention
from .errors import (
    CaptureError,
    CaptureNestedError,
    CutOpError,
    NestedReplayError,
    NotCapturedError,
    OptionError,
    ReplayError,
    SgcError,
    StalePoolError,
    StrictError,
)
from .pool import get_or_create_global_capture_stream, get_or_create_global_graph_memory_pool
from .shape_key import ShapeKey

__all__ = [
    "CaptureError",
    "CaptureNestedError",
    "CutOpError",
    "NestedReplayError",
    "NotCapturedError",
    "OptionError",
    "ReplayError",
    "SgcError",
    "ShapeKey",
    "StalePoolError",
    "StrictError",
    "__version__",
    "get_or_create_global_capture_stream",
    "get_or_create_global_graph_memory_pool",
    "register_attention",
    "reset",
    "sgc_piecewise",
]
