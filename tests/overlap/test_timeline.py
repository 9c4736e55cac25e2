"""Timelines: busy and idle time, the trace and back, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap.draw_timeline import draw_timelines
from overlap.ir import Lane, Slot
from overlap.timeline import Span, Timeline, chrome_trace, read_trace
from recompute import ConfigError


def span(slot: str, lane: Lane, start: float, end: float) -> Span:
    return Span(slot=Slot.parse(slot), lane=lane, start=start, end=end)


RUN = Timeline(
    name="run",
    spans=(
        span("F0.0.attn", Lane.COMPUTE, 0, 2),
        span("F0.0.dispatch", Lane.COMM, 2, 5),
        span("B1.0.experts", Lane.COMPUTE, 3, 4),
        span("W1.head", Lane.COMPUTE, 6, 7),
    ),
)


def test_busy_and_gaps() -> None:
    assert RUN.lanes == (Lane.COMPUTE, Lane.COMM)
    assert RUN.end == 7
    assert [s.milliseconds for s in RUN.on(Lane.COMM)] == [3]
    assert RUN.busy(Lane.COMPUTE, 1, 6.5) == 1 + 1 + 0.5
    assert RUN.gaps(Lane.COMPUTE, 0, 8) == [(2, 3), (4, 6), (7, 8)]
    assert RUN.gaps(Lane.COMPUTE, 2.5, 5) == [(2.5, 3), (4, 5)]
    assert RUN.gaps(Lane.P2P, 0, 1) == [(0, 1)]
    assert Timeline(name="", spans=()).end == 0


def test_a_trace_reads_back() -> None:
    other = Timeline(name="other", spans=())
    trace = json.loads(json.dumps(chrome_trace([RUN, other])))
    assert read_trace(trace) == (RUN, other)


def test_the_trace_is_what_viewers_want() -> None:
    events: Any = chrome_trace([RUN])["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["run", "compute", "comm"]
    (dispatch,) = [event for event in events if event["name"] == "F0.0.dispatch"]
    assert (dispatch["ts"], dispatch["dur"], dispatch["cat"]) == (2000, 3000, "F")


@pytest.mark.parametrize(
    "content",
    [None, [], {}, {"traceEvents": [{}]}, {"traceEvents": [{"ph": "X", "name": "F0.0.attn", "pid": 0}]},
     {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}},
                      {"ph": "X", "pid": 0, "name": "kernel", "ts": 0, "dur": 1, "args": {"lane": "comm"}}]}],
)  # fmt: skip
def test_other_traces_are_refused(content: Any) -> None:
    with pytest.raises(ConfigError, match="must be a Chrome trace that"):
        read_trace(content)


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "lanes.png"
    draw_timelines([RUN, RUN], path, start=1, end=6)
    assert path.read_bytes().startswith(b"\x89PNG")
