"""Timeline: which slot ran on which lane from when to when, simulated or recorded; as a Chrome/Perfetto trace.

Owns the record and its text form. Pictures are draw_timeline's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlap.errors import ScheduleError
from overlap.ir import Lane, Slot
from recompute.errors import ConfigError

_TO_MICROSECONDS = 1000.0
_SCHEMA = "must be a Chrome trace that `overlap timeline` wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One slot's run. Times are milliseconds since the timeline's start."""

    slot: Slot
    """Its microbatch is the number within the step."""
    lane: Lane
    start: float
    end: float

    @property
    def milliseconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of a run, in issue order."""

    name: str
    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes that ran something."""
        used = {span.lane for span in self.spans}
        return tuple(lane for lane in Lane if lane in used)

    @property
    def end(self) -> float:
        """When the last slot ended, in milliseconds; 0 if there is none."""
        return max((span.end for span in self.spans), default=0.0)

    def on(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of one lane, in order."""
        return tuple(span for span in self.spans if span.lane is lane)

    def busy(self, lane: Lane, start: float, end: float) -> float:
        """Milliseconds between `start` and `end` in which a lane ran something."""
        return sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in self.on(lane))

    def gaps(self, lane: Lane, start: float, end: float) -> list[tuple[float, float]]:
        """The (from, to) between `start` and `end` in which a lane ran nothing."""
        found: list[tuple[float, float]] = []
        free = start
        for span in self.on(lane):
            if span.start > free:
                found.append((free, min(span.start, end)))
            free = max(free, span.end)
        return [(a, b) for a, b in [*found, (free, end)] if b > a]


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, object]:
    """A trace that chrome://tracing and ui.perfetto.dev open: a process per timeline, a thread per lane."""
    events: list[dict[str, object]] = []
    for number, timeline in enumerate(timelines):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": timeline.name}})
        for lane in timeline.lanes:
            thread: dict[str, object] = {"pid": number, "tid": _thread(lane)}
            events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": lane.value}})
        events += [_event(number, span) for span in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(number: int, span: Span) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": number,
        "tid": _thread(span.lane),
        "name": str(span.slot),
        "cat": span.slot.op.value,
        "ts": span.start * _TO_MICROSECONDS,
        "dur": span.milliseconds * _TO_MICROSECONDS,
        "args": {"lane": span.lane.value},
    }


def read_trace(content: Any) -> tuple[Timeline, ...]:
    """The timelines in a trace that `chrome_trace` made, in order.

    Raises:
        ConfigError: It is no such trace.
    """
    try:
        names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
        spans: dict[int, list[Span]] = {number: [] for number in names}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                spans[event["pid"]].append(_span(event))
    except (KeyError, TypeError, ValueError, ScheduleError) as error:
        raise ConfigError(field="trace", value="...", rule=f"{_SCHEMA} ({error})") from error
    return tuple(Timeline(name=name, spans=tuple(spans[number])) for number, name in names.items())


def _span(event: Mapping[str, Any]) -> Span:
    start = float(event["ts"]) / _TO_MICROSECONDS
    return Span(
        slot=Slot.parse(event["name"]),
        lane=Lane(event["args"]["lane"]),
        start=start,
        end=start + float(event["dur"]) / _TO_MICROSECONDS,
    )


def _thread(lane: Lane) -> int:
    return list(Lane).index(lane)
