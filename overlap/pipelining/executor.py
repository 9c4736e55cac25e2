"""Executor: runs the actions of torch's pipeline runtime as plans of our engine.

Every kind of compute action has a handler here, OVERLAP_F_B among them: the runtime's own paths, which call a module
and autograd, are never taken. Sends, receives and hand-over within a rank are stages of the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.engine import Engine, MicrobatchState
from overlap.model.decoder import ARRIVING
from overlap.parallel.actions import ActingLanes
from overlap.pipelining import compat
from overlap.pipelining.runs import StepRuns
from overlap.pipelining.stage import ChunkStage, local_stages
from overlap.plan import BACKWARD_SIDE
from recompute.errors import RecomputeError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStep:
    """What a step runs on."""

    engine: Engine
    lanes: ActingLanes
    """The engine's."""
    planned: StepRuns


class Executor:
    """Handlers of one rank.

    Args:
        stages: Its virtual stages.
    """

    def __init__(self, stages: Sequence[ChunkStage]) -> None:
        self._stages = local_stages(stages)
        self._running: list[RunningStep] = []

    def register(self, schedule: compat.Runtime) -> None:
        """Take over all compute actions of a schedule."""
        for kind, handler in (
            (compat.FORWARD, self.forward),
            (compat.FULL_BACKWARD, self.backward),
            (compat.BACKWARD_INPUT, self.backward_input),
            (compat.BACKWARD_WEIGHT, self.backward_weight),
            (compat.OVERLAP_F_B, self.overlap),
        ):
            schedule.register_custom_function(kind, handler)

    def open_step(self, step: RunningStep) -> None:
        """Run actions of this step from now on."""
        self._running = [step]

    def close_step(self) -> None:
        """Forget it."""
        self._running = []

    def forward(self, action: compat.Action, ctx: compat.Context) -> None:
        """FORWARD: one chunk's forward alone."""
        self._begin_forward(action, ctx)
        self._run(action)

    def backward(self, action: compat.Action, ctx: compat.Context) -> None:
        """FULL_BACKWARD: one chunk's backward alone."""
        self._begin_backward(action, ctx)
        if self._run(action):
            self._end_backward(action, whole=True)

    def backward_input(self, action: compat.Action, ctx: compat.Context) -> None:
        """BACKWARD_INPUT: gradients of the inputs, and weight gradients that need not wait (R13)."""
        self._begin_backward(action, ctx)
        if self._run(action):
            self._end_backward(action, whole=False)

    def backward_weight(self, action: compat.Action, ctx: compat.Context) -> None:
        """BACKWARD_WEIGHT: the other weight gradients."""
        if self._run(action):
            self._check_done(action)

    def overlap(self, action: compat.Action, ctx: compat.Context) -> None:
        """OVERLAP_F_B: forward of one chunk and backward of another as one plan."""
        forward, backward = compat.sub_actions(action)
        self._begin_forward(forward, ctx)
        self._begin_backward(backward, ctx)
        if self._run(action):
            self._end_backward(backward, whole=True)

    def _stage(self, action: compat.Action) -> tuple[ChunkStage, int]:
        return self._stages[action.stage_index], compat.microbatch_of(action)

    def _begin_forward(self, action: compat.Action, ctx: compat.Context) -> None:
        stage, microbatch = self._stage(action)
        compat.take_receive(ctx, action)
        stage.border.forward = microbatch
        if not stage.is_first:
            stage.states[microbatch].values[ARRIVING, 0] = stage.border.arrivals.coming(microbatch)

    def _begin_backward(self, action: compat.Action, ctx: compat.Context) -> None:
        stage, microbatch = self._stage(action)
        compat.take_receive(ctx, action)
        stage.border.open_backward(microbatch)

    def _end_backward(self, action: compat.Action, *, whole: bool) -> None:
        stage, microbatch = self._stage(action)
        stage.border.close_backward(stage.shape(microbatch), first=stage.is_first, last=stage.is_last)
        if whole:
            self._check_done(action)

    def _check_done(self, action: compat.Action) -> None:
        stage, microbatch = self._stage(action)
        check_done(stage, stage.states[microbatch])

    def _run(self, action: compat.Action) -> bool:
        """Run the action's plan; whether a backward was part of it. An evaluation has none."""
        (step,) = self._running
        if action not in step.planned.runs:
            return False
        run = step.planned.runs[action]
        step.lanes.use(step.planned.around[action])
        states = {side: self._stages[stage].states[microbatch] for side, (stage, microbatch) in run.sides.items()}
        step.engine.run(run.plan, states)
        return BACKWARD_SIDE in run.sides


def check_done(stage: ChunkStage, owner: MicrobatchState) -> None:
    """A microbatch whose backward is over leaves nothing behind.

    Raises:
        RecomputeError: It does; our own mistake.
    """
    if leftovers := owner.leftovers():
        raise RecomputeError(f"stage {stage.stage_index} of the pipeline does not consume what it makes: {leftovers}")
