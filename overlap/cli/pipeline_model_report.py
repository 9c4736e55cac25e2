"""What `simulate --pp` and `timeline --pp` show and write."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from overlap.cli.report import console, table
from overlap.pipeline_model.draw import draw_pipeline
from overlap.pipeline_model.run import PipelineRun
from overlap.pipeline_model.trace import pipeline_trace
from recompute.errors import ConfigError

_MIB = 2**20
_ROWS = 16
"""Ranks that the table shows at most; the first and the last ones."""


def show_pipeline(payload: dict[str, Any]) -> None:
    """Print the payload for people."""
    config, ranks = payload["config"], list(enumerate(payload["per_rank"]))
    stages = f"{config['pp']} x {config['vpp']} stages, {config['microbatches']} microbatches"
    title = f"{config['schedule']}, {stages}: ms, exposed ms, most held"
    columns = ["rank", "working", "A2A", "P2P", "bubble", "in flight", "inputs", "layers"]
    columns += ["MiB"] if "peak_bytes" in ranks[0][1] else []
    half = _ROWS // 2
    shown = ranks if len(ranks) <= _ROWS else ranks[:half] + ranks[-half:]
    console.print(table(title, columns, [_row(*pair) for pair in shown]))
    console.print(
        f"a step: {payload['milliseconds']:.1f} ms, bubble {payload['bubble_share']:.1%}, "
        f"{payload['paired_share']:.0%} of the forwards overlap with a backward"
    )


def _row(number: int, rank: dict[str, Any]) -> list[str]:
    times = [f"{rank[name]:.1f}" for name in ("working", "exposed_a2a", "exposed_p2p", "bubble")]
    counts = [f"{rank[f'peak_{name}']}" for name in ("inflight", "segment_inputs", "layer_activations")]
    return [str(number), *times, *counts, *([f"{rank['peak_bytes'] / _MIB:,.0f}"] if "peak_bytes" in rank else [])]


def check_ends(start: float, end: float) -> None:
    """Refuse a picture that does not begin before its end.

    Raises:
        ConfigError: Names the option.
    """
    if not end < math.inf:
        raise ConfigError(field="to_ms", value=end, rule="must be finite")
    if not 0 <= start < end:
        raise ConfigError(field="from_ms", value=start, rule="must be from 0 to below the picture's end")


def write_pipeline(run: PipelineRun, out: Path, start: float, end: float | None) -> dict[str, str]:
    """Write OUT/timeline.json and OUT/timeline.png; returns their paths.

    Raises:
        ConfigError: The picture would begin behind its end.
    """
    last = run.milliseconds if end is None else end
    check_ends(start, last)
    trace, picture = out / "timeline.json", out / "timeline.png"
    trace.write_text(json.dumps(pipeline_trace(run)), encoding="utf-8")
    draw_pipeline(run, picture, start=start, end=last)
    return {"trace": str(trace), "picture": str(picture)}
