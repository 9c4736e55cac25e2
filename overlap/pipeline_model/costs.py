"""costs: what the steps of a pipeline take, from simulated plans of its chunks under an order of slots.

Each kind of step is simulated once: a forward, a backward, or a forward beside another chunk's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlap.ir import Op
from overlap.lower import Issue, Plan
from overlap.pipeline_model.actions import Step, Work
from overlap.pipeline_model.layout import is_empty
from overlap.pipeline_model.run import StepTime
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.simulate import exposure, simulate
from overlap.synthetic import System, plan_chunks
from overlap.timeline import Timeline

_FORWARDS = (Op.FORWARD, Op.NO_GRAD)
_NUMBERS = {FORWARD_SIDE: FORWARD_SIDE, BACKWARD_SIDE: BACKWARD_SIDE}


class ChunkTimes:
    """Times of steps.

    Args:
        chunks: The chunk of each virtual stage, as `layout.cut` gives them.
        queues: Hardware queues, 1 or 32.
        defer_wgrad: Whether a split backward puts off the weight gradients of recomputed layers too, and not only
            those of layers that keep their activations anyway (R13).
    """

    def __init__(self, chunks: Sequence[System], queues: int, *, defer_wgrad: bool = False) -> None:
        self._chunks = chunks
        self._queues = queues
        self._defer = defer_wgrad
        numbers: dict[int, int] = {}
        self._shapes = [numbers.setdefault(id(chunk), len(numbers)) for chunk in chunks]
        self._known: dict[tuple[tuple[Work, int], ...], StepTime] = {}

    def of(self, step: Step) -> StepTime:
        """The time of a step.

        Raises:
            ScheduleError: The order does not fit.
            ConfigError: A cost is missing.
        """
        key = tuple((action.work, self._shapes[action.stage]) for action in step)
        if key not in self._known:
            self._known[key] = self._time(step)
        return self._known[key]

    def _time(self, step: Step) -> StepTime:
        stages = [(action.work, self._chunks[action.stage]) for action in step]
        chunks = {work: chunk for work, chunk in stages if not is_empty(chunk)}
        if not chunks:
            return StepTime(milliseconds=0.0, ready=(0.0,) * len(step))
        forward, backward = chunks.get(Work.FORWARD), chunks.get(Work.BACKWARD)
        if forward is not None or backward is not None:
            return self._measure(step, plan_chunks(forward, backward))
        ((work, chunk),) = chunks.items()
        plan = plan_chunks(None, split(chunk))
        late = work is Work.WGRAD
        issues = tuple(issue for issue in plan.issues if self._is_put_off(issue, chunk) is late)
        return self._measure(step, replace(plan, issues=issues))

    def _is_put_off(self, issue: Issue, chunk: System) -> bool:
        return issue.slot.op is Op.WGRAD and (self._defer or chunk.side.segment(issue.stage) is None)

    def _measure(self, step: Step, plan: Plan) -> StepTime:
        chunk = self._chunks[step[0].stage]
        timeline = simulate("step", [(plan, _NUMBERS)], chunk.costs, self._queues)
        return StepTime(
            milliseconds=timeline.end,
            ready=tuple(_ready(timeline, action.work) for action in step),
            exposed_a2a=sum(exposure(timeline, 0.0, timeline.end, ()).exposed.values()),
        )


def split(chunk: System) -> System:
    """The chunk with weight gradients in slots of their own, as a split backward needs them."""
    return chunk if chunk.delayed else replace(chunk, delayed=True)


def _ready(timeline: Timeline, work: Work) -> float:
    """When what the chunk sends on is there: its last forward slot, or its last backward slot, has ended."""
    ops = _FORWARDS if work is Work.FORWARD else (Op.BACKWARD,)
    return max((span.end for span in timeline.spans if span.slot.op in ops), default=timeline.end)
