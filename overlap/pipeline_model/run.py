"""run: when every rank's steps would run, given what they cost; and what of a rank's time is idle or exposed.

A rank runs its steps in order. A step starts when all of its actions have what they need from other stages. What a
step sends leaves on the rank's p2p lane as soon as it is ready, which may be before the step ends; a rank hands over to
its own next stage without a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from overlap.errors import ScheduleError
from overlap.pipeline_model.actions import BACKWARDS, Action, PipelineSchedule, Step, Work, step_text
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What a step costs, in milliseconds."""

    milliseconds: float
    ready: tuple[float, ...]
    """Per action, when what it sends is ready, since the step's start."""
    exposed_a2a: float = 0.0
    """Idle compute while an all-to-all runs."""


class Times(Protocol):
    """Knows what steps cost."""

    def of(self, step: Step) -> StepTime:
        """The time of a step; asked for once per step, so it should look up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTimes:
    """The same times for every virtual stage, in any one unit; nothing is ready before its step ends."""

    forward: float
    backward: float
    wgrad: float
    """The part of the backward that may be deferred."""
    pair: float
    """A forward and a backward that overlap."""

    def of(self, step: Step) -> StepTime:
        """The time of a step."""
        single = {
            Work.FORWARD: self.forward,
            Work.BACKWARD: self.backward,
            Work.INPUT: self.backward - self.wgrad,
            Work.WGRAD: self.wgrad,
        }
        time = self.pair if len(step) > 1 else single[step[0].work]
        return StepTime(milliseconds=time, ready=(time,) * len(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Where a rank's time goes, in milliseconds; working, exposed_p2p and bubble add up to the pipeline's."""

    working: float
    """A step runs; exposed all-to-all is in it."""
    exposed_a2a: float
    exposed_p2p: float
    """No step runs, and the one to come waits for a transfer that is under way."""
    bubble: float
    """No step runs, and what the one to come needs is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A schedule placed in time."""

    schedule: PipelineSchedule
    milliseconds: float
    placed: tuple[tuple[tuple[float, float], ...], ...]
    """Per rank, start and end of each of its steps."""
    ranks: tuple[RankTime, ...]

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time."""
        return sum(rank.bubble for rank in self.ranks) / (self.milliseconds * len(self.ranks))


_Message = tuple[Work, int, int]
"""What a stage waits for: (forward or backward, the stage that sends, microbatch)."""


def run_pipeline(schedule: PipelineSchedule, times: Times, p2p_milliseconds: float = 0.0) -> PipelineRun:
    """Place a schedule in time.

    Args:
        schedule: What runs.
        times: What it costs.
        p2p_milliseconds: One transfer of a chunk's output, or of its gradient, to another rank.

    Raises:
        ScheduleError: Ranks wait for each other; names a step that never runs.
        ConfigError: The transfer takes less than no time.
    """
    if not 0 <= p2p_milliseconds < float("inf"):
        raise ConfigError(field="p2p_ms", value=p2p_milliseconds, rule="must be a number of at least 0")
    walk = _Walk(schedule, times, p2p_milliseconds)
    walk.run()
    total = max(rank.clock for rank in walk.ranks)
    return PipelineRun(
        schedule=schedule,
        milliseconds=total,
        placed=tuple(tuple(rank.placed) for rank in walk.ranks),
        ranks=tuple(rank.result(total) for rank in walk.ranks),
    )


class _Rank:
    """Where a rank is."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.clock = 0.0
        self.lane_free = 0.0
        """When the rank's p2p lane has sent everything so far."""
        self.placed: list[tuple[float, float]] = []
        self.exposed_a2a = 0.0
        self.exposed_p2p = 0.0

    def result(self, total: float) -> RankTime:
        working = sum(end - start for start, end in self.placed)
        return RankTime(
            working=working,
            exposed_a2a=self.exposed_a2a,
            exposed_p2p=self.exposed_p2p,
            bubble=total - working - self.exposed_p2p,
        )


class _Walk:
    """Runs each rank until it has to wait, and goes on with whom that lets go on."""

    def __init__(self, schedule: PipelineSchedule, times: Times, p2p: float) -> None:
        self._times = times
        self._p2p = p2p
        self._rank_of = schedule.rank_of
        self._last = schedule.num_stages - 1
        self._arrived: dict[_Message, tuple[float, float]] = {}
        """When a message was there, and when it was ready at the sender."""
        self._waiting: dict[_Message, _Rank] = {}
        self.ranks = [_Rank(steps) for steps in schedule.ranks]

    def run(self) -> None:
        todo = list(self.ranks)
        while todo:
            rank = todo.pop()
            while len(rank.placed) < len(rank.steps):
                step = rank.steps[len(rank.placed)]
                needs = [message for action in step for message in self._needs(action)]
                missing = [message for message in needs if message not in self._arrived]
                if missing:
                    self._waiting[missing[0]] = rank
                    break
                todo += self._place(rank, step, needs)
        for number, rank in enumerate(self.ranks):
            if len(rank.placed) < len(rank.steps):
                reason = (
                    f"ranks wait for each other: rank {number} never runs {step_text(rank.steps[len(rank.placed)])}"
                )
                raise ScheduleError(reason, [step_text(step) for step in rank.steps], len(rank.placed))

    def _needs(self, action: Action) -> list[_Message]:
        if action.work is Work.FORWARD and action.stage > 0:
            return [(Work.FORWARD, action.stage - 1, action.microbatch)]
        if action.work in BACKWARDS and action.stage < self._last:
            return [(Work.BACKWARD, action.stage + 1, action.microbatch)]
        return []

    def _place(self, rank: _Rank, step: Step, needs: Sequence[_Message]) -> list[_Rank]:
        """Run a step; returns the ranks that waited for what it sends."""
        there, ready = max((self._arrived[message] for message in needs), default=(0.0, 0.0))
        start = max(rank.clock, there)
        rank.exposed_p2p += max(0.0, start - max(rank.clock, ready))
        time = self._times.of(step)
        rank.clock = start + time.milliseconds
        rank.exposed_a2a += time.exposed_a2a
        rank.placed.append((start, rank.clock))
        woken: list[_Rank] = []
        for offset, action in sorted(zip(time.ready, step, strict=True), key=lambda pair: pair[0]):
            woken += self._send(rank, action, start + offset)
        return woken

    def _send(self, rank: _Rank, action: Action, ready: float) -> list[_Rank]:
        forward = action.work is Work.FORWARD
        target = action.stage + 1 if forward else action.stage - 1
        if action.work is Work.WGRAD or not 0 <= target <= self._last:
            return []
        there = ready
        if self.ranks[self._rank_of[target]] is not rank:
            there = rank.lane_free = max(ready, rank.lane_free) + self._p2p
        message = (Work.FORWARD if forward else Work.BACKWARD, action.stage, action.microbatch)
        self._arrived[message] = (there, ready)
        woken = self._waiting.pop(message, None)
        return [] if woken is None else [woken]
