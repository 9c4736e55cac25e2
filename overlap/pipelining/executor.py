"""Executor: runs the actions of torch's pipeline runtime as plans of our engine.

Every kind of compute action has a handler here, OVERLAP_F_B among them: the runtime's own paths, which call a module
and autograd, are never taken. Sends, receives and hand-over within a rank are stages of the plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap.engine import Engine, MicrobatchState
from overlap.ir import Lane
from overlap.lanes import Lanes
from overlap.lower import Plan
from overlap.model.decoder import ARRIVING
from overlap.pipelining import compat
from overlap.pipelining.plans import PairPlans
from overlap.pipelining.stage import ChunkStage, local_stages
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from recompute.errors import RecomputeError


class Executor:
    """Handlers of one rank.

    Args:
        stages: Its virtual stages.
        plans: Their plans.
        lanes: Where issues run; between two actions the compute lane is current, since the runtime works there.
    """

    def __init__(self, stages: Sequence[ChunkStage], plans: PairPlans, lanes: Lanes) -> None:
        self._stages = local_stages(stages)
        self._plans = plans
        self._lanes = lanes
        self._engines: list[Engine] = []

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

    def open_step(self, engine: Engine) -> None:
        """Use this engine from now on."""
        self._engines = [engine]

    def close_step(self) -> None:
        """Forget it."""
        self._engines = []

    def forward(self, action: compat.Action, ctx: compat.Context) -> None:
        """FORWARD: one chunk's forward alone."""
        stage, microbatch = self._begin_forward(action, ctx)
        if stage.has_backward:
            plan = self._plans.pair(stage.half(microbatch), None)
        else:
            plan = self._plans.evaluation(stage.stage_index)
        self._run(plan, {FORWARD_SIDE: stage.states[microbatch]})

    def backward(self, action: compat.Action, ctx: compat.Context) -> None:
        """FULL_BACKWARD: one chunk's backward alone."""
        stage, microbatch = self._begin_backward(action, ctx)
        if stage.has_backward:
            self._run(self._plans.pair(None, stage.half(microbatch)), {BACKWARD_SIDE: stage.states[microbatch]})
            self._end_backward(stage, microbatch, whole=True)

    def backward_input(self, action: compat.Action, ctx: compat.Context) -> None:
        """BACKWARD_INPUT: gradients of the inputs, and weight gradients that need not wait (R13)."""
        stage, microbatch = self._begin_backward(action, ctx)
        if stage.has_backward:
            first, _ = self._plans.halves(stage.half(microbatch))
            self._run(first, {BACKWARD_SIDE: stage.states[microbatch]})
            self._end_backward(stage, microbatch, whole=False)

    def backward_weight(self, action: compat.Action, ctx: compat.Context) -> None:
        """BACKWARD_WEIGHT: the other weight gradients."""
        stage, microbatch = self._stage(action, ctx)
        if stage.has_backward:
            _, second = self._plans.halves(stage.half(microbatch))
            self._run(second, {BACKWARD_SIDE: stage.states[microbatch]})
            check_done(stage, stage.states[microbatch])

    def overlap(self, action: compat.Action, ctx: compat.Context) -> None:
        """OVERLAP_F_B: forward of one chunk and backward of another as one plan."""
        forward, backward = compat.sub_actions(action)
        ahead, first = self._begin_forward(forward, ctx)
        behind, second = self._begin_backward(backward, ctx)
        if not behind.has_backward:
            self._run(self._plans.evaluation(ahead.stage_index), {FORWARD_SIDE: ahead.states[first]})
            return
        states = {FORWARD_SIDE: ahead.states[first], BACKWARD_SIDE: behind.states[second]}
        self._run(self._plans.pair(ahead.half(first), behind.half(second)), states)
        self._end_backward(behind, second, whole=True)

    def _stage(self, action: compat.Action, ctx: compat.Context) -> tuple[ChunkStage, int]:
        stage = self._stages[action.stage_index]
        compat.wait_unsharded(ctx, stage)
        return stage, compat.microbatch_of(action)

    def _begin_forward(self, action: compat.Action, ctx: compat.Context) -> tuple[ChunkStage, int]:
        stage, microbatch = self._stage(action, ctx)
        compat.take_receive(ctx, action)
        stage.border.forward = microbatch
        if not stage.is_first:
            stage.states[microbatch].values[ARRIVING, 0] = stage.border.arrivals.coming(microbatch)
        return stage, microbatch

    def _begin_backward(self, action: compat.Action, ctx: compat.Context) -> tuple[ChunkStage, int]:
        stage, microbatch = self._stage(action, ctx)
        compat.take_receive(ctx, action)
        stage.border.open_backward(microbatch)
        return stage, microbatch

    def _end_backward(self, stage: ChunkStage, microbatch: int, *, whole: bool) -> None:
        stage.border.close_backward(stage.shape(microbatch), first=stage.is_first, last=stage.is_last)
        if whole:
            check_done(stage, stage.states[microbatch])

    def _run(self, plan: Plan, states: Mapping[int, MicrobatchState]) -> None:
        (engine,) = self._engines
        engine.run(plan, states)
        self._lanes.enter(Lane.COMPUTE)


def check_done(stage: ChunkStage, owner: MicrobatchState) -> None:
    """A microbatch whose backward is over leaves nothing behind.

    Raises:
        RecomputeError: It does; our own mistake.
    """
    if leftovers := owner.leftovers():
        raise RecomputeError(f"stage {stage.stage_index} of the pipeline does not consume what it makes: {leftovers}")
