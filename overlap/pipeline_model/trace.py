"""A pipeline's run as a Chrome/Perfetto trace: one thread per rank, one event per step."""

from __future__ import annotations

from overlap.pipeline_model.actions import step_text
from overlap.pipeline_model.run import PipelineRun

_TO_MICROSECONDS = 1000.0


def pipeline_trace(run: PipelineRun) -> dict[str, object]:
    """The trace; steps are named as torch prints actions, `3F0` or `3F0;1B2` for a pair."""
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": run.schedule.name}}
    events: list[dict[str, object]] = [process]
    for rank, (steps, placed) in enumerate(zip(run.schedule.ranks, run.placed, strict=True)):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": step_text(step),
                "cat": "".join(action.work.value for action in step),
                "ts": start * _TO_MICROSECONDS,
                "dur": (end - start) * _TO_MICROSECONDS,
            }
            for step, (start, end) in zip(steps, placed, strict=True)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
