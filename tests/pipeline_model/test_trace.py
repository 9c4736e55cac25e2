"""The pipeline's trace and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overlap.pipeline_model.draw import draw_pipeline
from overlap.pipeline_model.run import PlainTimes, run_pipeline
from overlap.pipeline_model.trace import pipeline_trace
from tests.pipeline_model.tools import schedule

RUN = run_pipeline(
    schedule("0F0 0F1 0B0 0B1", "1F0 1F1;1B0 1I1 1W1", microbatches=2),
    PlainTimes(forward=1, backward=2, wgrad=1, pair=2.5),
)


def test_an_event_per_step_on_its_rank() -> None:
    events: Any = json.loads(json.dumps(pipeline_trace(RUN)))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["mine", "rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans if e["tid"] == 1] == ["1F0", "1F1;1B0", "1I1", "1W1"]
    (pair,) = [e for e in spans if e["cat"] == "FB"]
    assert (pair["ts"], pair["dur"]) == (2000, 2500)


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.png"
    draw_pipeline(RUN, path, start=1, end=6)
    assert path.read_bytes().startswith(b"\x89PNG")
