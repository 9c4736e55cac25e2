"""Timing: how long a plan takes on one rank, and when what it sends is ready. In milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.ir import Op
from overlap.lower import Event, Plan
from overlap.pipeline_model.run import StepTime
from overlap.simulate import MANY_QUEUES, Task, place_tasks

_HOST = 0.02
"""Host time to launch a slot."""
_KERNELS = 20
_SENDERS = ((Op.FORWARD, Op.NO_GRAD), (Op.BACKWARD,))
"""What ends when a forward's output, and when a backward's gradient, is ready."""


def plan_time(plan: Plan, times: Sequence[float]) -> StepTime:
    """How long a plan takes with many hardware queues.

    Args:
        plan: Its issue order and waits count.
        times: Of each issue on its lane.
    """
    ended: dict[tuple[int, Event], int] = {}
    tasks: list[Task] = []
    for place, (issue, time) in enumerate(zip(plan.issues, times, strict=True)):
        number = issue.slot.microbatch
        after = tuple(ended[number, event] for event in issue.waits if (number, event) in ended)
        tasks.append(Task(issue.lane, time, _KERNELS, after))
        ended[number, (issue.slot.op, issue.stage.key)] = place
    ends = [end for _, end in place_tasks(tasks, MANY_QUEUES, _HOST)]
    by_sender = ([e for e, i in zip(ends, plan.issues, strict=True) if i.slot.op in ops] for ops in _SENDERS)
    return StepTime(milliseconds=max(ends, default=0.0), ready=tuple(max(found) for found in by_sender if found))
