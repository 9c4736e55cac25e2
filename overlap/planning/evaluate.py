"""Evaluate: peak of every rank and time of a step, for one choice of recompute.

Microbatches share no storage, so a rank's memory is what its weights take, what each waiting microbatch keeps, and what
the plan that runs now holds: each distinct plan is walked once, the pipeline's actions say how many wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from overlap.ir import Lane
from overlap.lower import Plan, lower
from overlap.memory.device_model import DeviceModel
from overlap.memory.gap import gap_of
from overlap.orders import Order, load_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, make_schedule
from overlap.planning.actions import NOBODY, Action, rank_actions
from overlap.planning.bins import Bytes, RankBin, add, scaled, total
from overlap.planning.chunks import ChunkShape, chunk_shapes, stages_of_rank
from overlap.planning.job import Job
from overlap.planning.survey import Survey
from overlap.planning.timing import makespan, plan_milliseconds
from overlap.planning.walk import Point, RankWalk
from overlap.selective import modules_of
from overlap.side import Side
from recompute.config import Keep, RecomputeConfig
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule
from recompute.planner import Choice

Shapes = tuple[ChunkShape | None, ChunkShape | None]
"""The chunks that run forward and backward in an action; None: nobody does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A distinct plan."""

    bytes: Bytes
    """At its highest point, the microbatches of the plan alone."""
    milliseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """What one microbatch of a chunk keeps."""

    waiting: Bytes
    """Between forward and backward."""
    done: Bytes
    """After its backward: losses and counters, until the step ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """Where a pipeline rank's memory is highest."""

    rank: int
    bins: Bytes
    waiting: int
    """Microbatches of its chunks that wait for their backward then, those that run left out."""

    @property
    def total(self) -> int:
        """Bytes."""
        return total(self.bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a choice needs."""

    ranks: Sequence[RankPeak]
    milliseconds: float
    """Of a step, without the optimizer."""

    @property
    def fullest(self) -> RankPeak:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all choices share."""

    job: Job
    survey: Survey
    device: DeviceModel
    order: str
    """Name of a built-in order, or a file."""

    @cached_property
    def shapes(self) -> tuple[ChunkShape, ...]:
        """The pipeline's chunks."""
        return chunk_shapes(self.job)

    @cached_property
    def modules(self) -> frozenset[RecomputeModule]:
        """The modules that at least one chunk has."""
        return frozenset(module for chunk in self.survey.values() for module in modules_of(chunk.program))

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Of every rank."""
        return rank_actions(self.job)


class Evaluation:
    """One choice under a setting.

    Raises:
        ConfigError: Segment inputs are sharded, or no chunk has a module.
        ScheduleError: The order does not fit.
    """

    def __init__(self, setting: Setting, choice: Choice) -> None:
        if choice.recompute.keep is Keep.SHARDED:
            rule = "a job has no group here whose ranks hold the same segment inputs: take device or host"
            raise ConfigError(field="keep", value=Keep.SHARDED.value, rule=rule)
        _check_modules(setting, choice.recompute)
        self._setting = setting
        self._choice = choice
        self._order: Order = load_order(setting.order, choice.recompute.replay)
        self._planners = {
            shape: Planner(chunk.program, self._order, delayed=choice.delay_wgrad)
            for shape, chunk in setting.survey.items()
        }
        self._kinds: dict[Shapes, _Kind] = {}
        self._gaps = {shape: self._gap(shape) for shape in setting.survey}

    def outcome(self) -> Outcome:
        """Every rank's peak, and the step's time."""
        actions = self._setting.actions
        times = {
            shapes: self._kind(shapes).milliseconds
            for rank in actions
            for shapes in {self._shapes(action) for action in rank}
        }
        span = makespan(self._setting.job, actions, lambda action: times[self._shapes(action)], self._setting.device)
        return Outcome(ranks=[self.rank(number) for number in range(len(actions))], milliseconds=span)

    def rank(self, number: int) -> RankPeak:
        """One rank's peak."""
        setting = self._setting
        waiting: dict[int, int] = dict.fromkeys(stages_of_rank(setting.job, number), 0)
        done = dict(waiting)
        best = (-1, NOBODY, NOBODY, waiting, done)
        for action in setting.actions[number]:
            if action.backward != NOBODY:
                waiting[action.backward[0]] -= 1
            held = sum(self._waiting[s] * n for s, n in waiting.items()) + sum(
                self._done[s] * n for s, n in done.items()
            )
            height = held + total(self._kind(self._shapes(action)).bytes)
            if height > best[0]:
                best = (height, action.forward, action.backward, dict(waiting), dict(done))
            if action.forward != NOBODY:
                waiting[action.forward[0]] += 1
            if action.backward != NOBODY:
                done[action.backward[0]] += 1
        _, forward, backward, waiting, done = best
        bins = add(
            *(setting.survey[setting.shapes[stage]].fixed for stage in waiting),
            {RankBin.WORKSPACE: setting.device.workspace},
            self._kind(self._shapes(Action(forward, backward))).bytes,
            *(scaled(self._gaps[setting.shapes[stage]].waiting, count) for stage, count in waiting.items()),
            *(scaled(self._gaps[setting.shapes[stage]].done, count) for stage, count in done.items()),
        )
        return RankPeak(rank=number, bins=bins, waiting=sum(waiting.values()))

    @cached_property
    def _waiting(self) -> Mapping[int, int]:
        return {stage: total(self._gaps[shape].waiting) for stage, shape in enumerate(self._setting.shapes)}

    @cached_property
    def _done(self) -> Mapping[int, int]:
        return {stage: total(self._gaps[shape].done) for stage, shape in enumerate(self._setting.shapes)}

    def _shapes(self, action: Action) -> Shapes:
        shapes = self._setting.shapes
        forward, backward = (None if work == NOBODY else shapes[work[0]] for work in (action.forward, action.backward))
        return forward, backward

    def _kind(self, shapes: Shapes) -> _Kind:
        if shapes not in self._kinds:
            forward, backward = shapes
            members = [shape for shape in (backward, forward) if shape is not None]
            walk = self._walk(members)
            if backward is not None:
                walk.run([(self._plan(backward, None), 0, None)])
            before = len(walk.points)
            plan = self._plan(forward, backward)
            walk.run([(plan, None if forward is None else len(members) - 1, None if backward is None else 0)])
            points = walk.points[before:]
            self._kinds[shapes] = _Kind(
                bytes=max((point.bytes for point in points), key=total),
                milliseconds=plan_milliseconds(plan, [self._time(i.lane, p) for i, p in
                                                      zip(plan.issues, points, strict=True)]),
            )  # fmt: skip
        return self._kinds[shapes]

    def _gap(self, shape: ChunkShape) -> _Gap:
        walk = self._walk([shape])
        walk.run([(self._plan(shape, None), 0, None)])
        waiting = walk.now()
        walk.run([(self._plan(None, shape), None, 0)])
        kept = self._sent() if self._setting.job.keep_sends else {}
        sends = kept if not shape.last else {}
        returns = kept if not shape.first else {}
        return _Gap(waiting=add(waiting, sends), done=add(walk.now(), sends, returns))

    def _sent(self) -> Bytes:
        job = self._setting.job
        return {RankBin.PIPELINE: job.tokens * (job.model.mhc or 1) * job.model.hidden * job.item_size}

    def _walk(self, shapes: Sequence[ChunkShape]) -> RankWalk:
        config = self._choice.recompute
        planners = [self._planners[shape] for shape in shapes]
        return RankWalk(
            [self._setting.survey[shape].footprint for shape in shapes],
            [gap_of(planner, config, planner.program.trained()) for planner in planners],
            delayed=self._choice.delay_wgrad,
        )

    def _plan(self, forward: ChunkShape | None, backward: ChunkShape | None) -> Plan:
        sides: dict[int, Side] = {}
        kept = {}
        for number, shape in ((FORWARD_SIDE, forward), (BACKWARD_SIDE, backward)):
            if shape is not None:
                planner = self._planners[shape]
                sides[number] = planner.side(self._choice.recompute, planner.program.trained())
                if number == FORWARD_SIDE:
                    kept[number] = planner.survivors(self._choice.recompute, planner.program.trained())
        schedule = make_schedule(
            self._order, sides.get(FORWARD_SIDE), sides.get(BACKWARD_SIDE), delayed=self._choice.delay_wgrad
        )
        return lower(schedule, sides, kept)

    def _time(self, lane: Lane, point: Point) -> float:
        job = self._setting.job
        if lane is Lane.COPY:
            return self._setting.device.copy_milliseconds(point.traffic)
        if lane is not Lane.COMM:
            return point.milliseconds
        rows = max(job.copies, job.received)
        away = rows * job.model.hidden * job.item_size * (job.ep - 1) / job.ep
        return self._setting.device.transfer_milliseconds(away)


def _check_modules(setting: Setting, config: RecomputeConfig) -> None:
    for module in config.modules:
        if module not in setting.modules:
            have = ", ".join(sorted(setting.modules)) or "none"
            raise ConfigError(field="modules", value=module.value, rule=f"no chunk has such a module; they have {have}")
