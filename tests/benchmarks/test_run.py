"""What a suite writes: figures and tables after each part, timelines beside them."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.memory.run import write
from overlap.ir import Lane, Op, Slot
from overlap.timeline import Span, Timeline, read_trace


def test_timelines_go_to_a_trace_of_their_own(tmp_path) -> None:
    slot = Slot(op=Op.FORWARD, microbatch=0, layer=1, stage="attn")
    timeline = Timeline(name="a step", spans=(Span(slot=slot, lane=Lane.COMPUTE, start=0.0, end=2.0),))
    payload: dict[str, Any] = {
        "suite": "x", "environment": {"command": "y"},
        "first": [{"name": "one", "step": 2.0}], "second": [{"name": "two", "timeline": timeline}],
    }  # fmt: skip
    write(tmp_path / "x.json", payload)
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["second"] == [{"name": "two"}]
    assert written["first"] == payload["first"]
    assert [found.name for found in read_trace(json.loads((tmp_path / "x_trace.json").read_text()))] == ["a step"]
    assert "| two |" in (tmp_path / "x.md").read_text()
    assert payload["second"][0]["timeline"] is timeline, "a later part writes it again"


def test_no_trace_without_timelines(tmp_path) -> None:
    write(tmp_path / "x.json", {"suite": "x", "environment": {}, "part": [{"name": "one"}]})
    assert not (tmp_path / "x_trace.json").exists()
