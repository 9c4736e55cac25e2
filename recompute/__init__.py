"""Layer-granular activation recompute: what to keep for backward and how to rebuild the rest.

Knows nothing of streams, orders or overlap; overlap/ builds on it, never the reverse.
"""

from recompute.config import Granularity, Keep, Method, RecomputeConfig, Replay
from recompute.errors import ConfigError, RecomputeError
from recompute.flags import FLAG_NAMES, FlagSettings, read_flags
from recompute.modules import RecomputeModule
from recompute.segments import RecomputeSegment, format_segments, plan_segments

__all__ = [
    "FLAG_NAMES",
    "ConfigError",
    "FlagSettings",
    "Granularity",
    "Keep",
    "Method",
    "RecomputeConfig",
    "RecomputeError",
    "RecomputeModule",
    "RecomputeSegment",
    "Replay",
    "format_segments",
    "plan_segments",
    "read_flags",
]
