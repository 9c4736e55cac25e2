"""What `from overlap import ...` and `from recompute import ...` promise; a change here is a change for users."""

from __future__ import annotations

import overlap
import recompute


def test_overlap() -> None:
    assert overlap.__all__ == [
        "ORDER_NAMES", "Effect", "GraphedStep", "Input", "Lane", "Loss", "Losses", "ModelChunk", "Op", "Order",
        "PerMicrobatch", "PerToken", "Program", "ProgramBuilder", "ProgramError", "ScheduleError", "Slot", "Stage",
        "Value", "format_schedule", "forward_only", "get_order", "parse_schedule", "reference_step", "train_step",
    ]  # fmt: skip
    assert all(hasattr(overlap, name) for name in overlap.__all__)


def test_recompute() -> None:
    assert recompute.__all__ == [
        "FLAG_NAMES", "ConfigError", "FlagSettings", "Granularity", "Keep", "Method", "RecomputeConfig",
        "RecomputeError", "RecomputeModule", "RecomputeSegment", "Replay", "format_segments", "plan_segments",
        "read_flags",
    ]  # fmt: skip
    assert all(hasattr(recompute, name) for name in recompute.__all__)
