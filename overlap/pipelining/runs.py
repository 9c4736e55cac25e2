"""Runs: the plans of a rank's step, action by action, and what its replicas do around them.

All is decided before the step and kept for the next one of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from overlap.lower import Plan
from overlap.parallel.actions import Actions
from overlap.parallel.data import ChunkRun
from overlap.parallel.uses import trainable
from overlap.pipelining import compat
from overlap.pipelining.plans import PairPlans
from overlap.pipelining.stage import ChunkStage, local_stages
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE

Who = tuple[int, int]
"""A virtual stage and a microbatch of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """What one action runs."""

    plan: Plan
    sides: Mapping[int, Who]
    """Who runs, by side of the plan."""

    def of(self, stage: int) -> ChunkRun | None:
        """One stage's share of it; None: it has none."""
        own = {side for side, (number, _) in self.sides.items() if number == stage}
        if not own:
            return None
        issues = tuple(issue for issue in self.plan.issues if issue.slot.microbatch in own)
        backward = self.sides[BACKWARD_SIDE][1] if BACKWARD_SIDE in own else None
        return ChunkRun(plan=replace(self.plan, issues=issues), backward=backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRuns:
    """A step of one rank. Actions that run nothing are left out."""

    runs: Mapping[compat.Action, PlanRun]
    around: Mapping[compat.Action, Actions]
    """What to do around the issues of each."""


class StepPlanner:
    """Plans steps of one rank.

    Args:
        stages: Its virtual stages, their microbatches given when a step is planned.
        plans: Their plans.
    """

    def __init__(self, stages: Sequence[ChunkStage], plans: PairPlans) -> None:
        self._stages = local_stages(stages)
        self._plans = plans
        self._steps: dict[tuple[object, ...], StepRuns] = {}

    def step(self, actions: Sequence[compat.Action], *, training: bool, reduce: bool) -> StepRuns:
        """The plans of a step.

        Args:
            actions: The rank's compute actions, in order; the same for the same number of microbatches.
            training: Whether backward runs.
            reduce: Whether gradients are reduced over the replicas.

        Raises:
            ScheduleError: The order does not fit the programs.
        """
        flags = tuple((stage.halves(), trainable(stage.chunk.program)) for stage in self._stages.values())
        key = (len(actions), training, reduce, flags)
        if key not in self._steps:
            found = {action: self._run(action, training) for action in actions}
            runs = {action: run for action, run in found.items() if run is not None}
            self._steps[key] = StepRuns(runs=runs, around=self._around(runs, reduce=reduce))
        return self._steps[key]

    def _around(self, runs: Mapping[compat.Action, PlanRun], *, reduce: bool) -> Mapping[compat.Action, Actions]:
        around = {action: Actions() for action in runs}
        for number, stage in self._stages.items():
            shares = {action: share for action, run in runs.items() if (share := run.of(number)) is not None}
            own = stage.chunk.parallel.around(stage.chunk.program, tuple(shares.values()), reduce=reduce)
            for action, actions in zip(shares, own, strict=True):
                around[action].add(actions)
        return around

    def _run(self, action: compat.Action, training: bool) -> PlanRun | None:
        ahead, behind = compat.parts_of(action)
        sides = {side: who for side, who in ((FORWARD_SIDE, ahead), (BACKWARD_SIDE, behind)) if who is not None}
        if training:
            return PlanRun(plan=self._trains(action, ahead, behind), sides=sides)
        if ahead is None:
            return None
        return PlanRun(plan=self._plans.evaluation(ahead[0]), sides={FORWARD_SIDE: ahead})

    def _trains(self, action: compat.Action, ahead: Who | None, behind: Who | None) -> Plan:
        forward, backward = (None if who is None else self._stages[who[0]].half(who[1]) for who in (ahead, behind))
        if backward is not None and action.computation_type in (compat.BACKWARD_INPUT, compat.BACKWARD_WEIGHT):
            first, second = self._plans.halves(backward)
            return first if action.computation_type is compat.BACKWARD_INPUT else second
        return self._plans.pair(forward, backward)
