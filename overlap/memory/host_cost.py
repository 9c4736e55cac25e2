"""What the engine itself costs the host: microseconds per slot beside the stages, and the time to make plans (R19)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op, Program, Stage, StageKey
from overlap.lanes import NullLanes
from overlap.lower import Issue
from overlap.memory.trivial import Trivial
from overlap.orders import get_order
from overlap.plan import Planner, PlanRequest, StepPlan
from overlap.step import step_plans
from recompute.config import RecomputeConfig
from recompute.rng import default_generators, seeded, stage_seed
from recompute.tape import Tape

_LAYERS = 8
_MICROBATCHES = 4
_PLANS = 5
_DRAWS = 200
_PLAN_LAYERS = 61
"""Layers of DeepSeek-V3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Best of several repeats: other work on the machine only ever adds, and the best is what repeats."""

    slots: int
    """Slots of the measured step."""
    engine_us: float
    """Microseconds per slot: the engine running stages that do next to nothing."""
    stage_us: float
    """Microseconds per slot: the same stages and graphs without the engine."""
    draw_us: float
    """Microseconds that a slot costs on top of that if its stage draws random numbers: seeding, and putting back."""
    plan_ms: float
    """Milliseconds to build and lower the plan of a pair of 61-layer chunks."""
    cached_plan_us: float
    """Microseconds to ask for it again."""

    @property
    def own_us(self) -> float:
        """Microseconds per slot that the engine adds."""
        return self.engine_us - self.stage_us

    def as_json(self) -> dict[str, float]:
        """All numbers by name."""
        return {
            "slots": self.slots,
            "engine_us": self.engine_us,
            "stage_us": self.stage_us,
            "own_us": self.own_us,
            "draw_us": self.draw_us,
            "plan_ms": self.plan_ms,
            "cached_plan_us": self.cached_plan_us,
        }


def measure_host_cost(repeats: int = 25) -> HostCost:
    """Run the micro-benchmarks; well under two seconds.

    Args:
        repeats: Steps that are timed; the best one counts.
    """
    chunk = ModelChunk(Trivial(_LAYERS), recompute=RecomputeConfig.uniform(1))
    plans = step_plans(chunk, _MICROBATCHES)
    slots = sum(len(plan.issues) for plan, _ in plans)
    stages = _Direct(chunk.program)
    engine_s, stage_s = [], []
    for _ in range(repeats):
        # Side by side, so that a change of the machine's speed meets both.
        engine_s.append(_seconds(lambda: _run_engine(plans)))
        stage_s.append(_seconds(lambda: stages.run(plans)))
    plan_s, cached_s = _plan_seconds()
    return HostCost(
        slots=slots,
        engine_us=1e6 * min(engine_s) / slots,
        stage_us=1e6 * min(stage_s) / slots,
        draw_us=1e6 * min(_seconds(_draw) for _ in range(_DRAWS)),
        plan_ms=1e3 * plan_s,
        cached_plan_us=1e6 * cached_s,
    )


def _run_engine(plans: Sequence[StepPlan]) -> None:
    engine = Engine(NullLanes(), run_seed=0, step=0, generators=())
    states = [MicrobatchState(number, {"hidden": torch.ones(())}, 1.0) for number in range(_MICROBATCHES)]
    for plan, numbers in plans:
        engine.run(plan, {side: states[number] for side, number in numbers.items()})


class _Direct:
    """The work of the stages alone: the same calls of forward, adjoint and tape, on tensors that are at hand."""

    def __init__(self, program: Program) -> None:
        self._inputs = {stage.key: [torch.ones(()) for _ in stage.reads] for stage in program.stages}
        self._grads = [torch.ones(())]

    def run(self, plans: Sequence[StepPlan]) -> None:
        """Call what the slots of the plans call."""
        # An eager graph may wait for the next plan; a stage never has two.
        tapes: dict[StageKey, Tape] = {}
        for plan, _ in plans:
            for issue in plan.issues:
                self._issue(issue, issue.stage, tapes)

    def _issue(self, issue: Issue, stage: Stage, tapes: dict[StageKey, Tape]) -> None:
        inputs = self._inputs[stage.key]
        if issue.slot.op is Op.BACKWARD and stage.adjoint is not None:
            with torch.no_grad():
                stage.adjoint(self._grads, ())
        elif issue.slot.op is Op.BACKWARD:
            tape = tapes.pop(stage.key)
            tape.backward(self._grads)
            tape.take_gradients(issue.tracked)
        elif issue.records:
            tapes[stage.key], _ = Tape.record(stage.forward, inputs, issue.tracked, issue.differentiable, {})
        else:
            with torch.no_grad():
                stage.forward(*inputs)


def _draw() -> None:
    """What the engine does around a stage that draws."""
    with seeded(stage_seed(0, 0, 0, 0, "attn"), default_generators(torch.device("cpu"))):
        pass


def _plan_seconds() -> tuple[float, float]:
    """Seconds for an uncached and for a cached plan."""
    config = RecomputeConfig.uniform(1)
    first, again = [], []
    module = Trivial(_PLAN_LAYERS)
    for _ in range(_PLANS):
        # A new program each time: it keeps indexes of its own.
        program = module.program()
        planner = Planner(program, get_order("multi_queue"), delayed=False)
        request = PlanRequest(config, config, program.trained())
        first.append(_seconds(lambda: planner.plan(request)))  # noqa: B023 (called at once)
        again.append(_seconds(lambda: planner.plan(request)))  # noqa: B023
    return min(first), min(again)


def _seconds(work: Callable[[], object]) -> float:
    """Time without garbage collection, which would charge one piece of work for the waste of another."""
    gc.collect(0)
    gc.disable()
    try:
        start = perf_counter()
        work()
        return perf_counter() - start
    finally:
        gc.enable()
