"""Shared graph capture: a torch.compile backend and wrappers that record CUDA graphs from one memory pool."""

from . import emulated
from ._version import __version__
from .attention import register_attention
from .backend import explain, reset, sgc_piecewise
from .breakable import BreakableCudaGraphBackend
from .breaks import break_graph, eager_on_graph
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
from .full import FullCudaGraphBackend
from .input_spec import InputSpec
from .memory import MemoryReport, memory_report
from .pools import (
    get_or_create_global_capture_stream,
    get_or_create_global_graph_memory_pool,
    static_output_generation,
)
from .prefix_ops import register_prefix_rule
from .report import Explanation, stats
from .rows import ROWS, Rows
from .runner import Runner
from .runners import DecodeRunner, PrefillRunner
from .shape_key import ShapeKey
from .tc_piecewise import TcPiecewiseCudaGraphBackend
from .wrapper import CudaGraphBackend

__all__ = [
    "ROWS",
    "BreakableCudaGraphBackend",
    "CaptureError",
    "CaptureNestedError",
    "CudaGraphBackend",
    "CutOpError",
    "DecodeRunner",
    "Explanation",
    "FullCudaGraphBackend",
    "InputSpec",
    "MemoryReport",
    "NestedReplayError",
    "NotCapturedError",
    "OptionError",
    "PrefillRunner",
    "ReplayError",
    "Rows",
    "Runner",
    "SgcError",
    "ShapeKey",
    "StalePoolError",
    "StrictError",
    "TcPiecewiseCudaGraphBackend",
    "__version__",
    "break_graph",
    "eager_on_graph",
    "emulated",
    "explain",
    "get_or_create_global_capture_stream",
    "get_or_create_global_graph_memory_pool",
    "memory_report",
    "register_attention",
    "register_prefix_rule",
    "reset",
    "sgc_piecewise",
    "static_output_generation",
    "stats",
]
