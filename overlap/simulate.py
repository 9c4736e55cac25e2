"""simulate: when the slots of lowered plans would run, given what they cost; and what of it is idle or exposed.

A lane runs its slots in issue order. A slot starts when its lane is free, what it waits for has ended and the host
has launched it. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel also waits for the start of the one
launched before it, whatever lane that is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from overlap.costs import StageCosts
from overlap.ir import Lane, Op
from overlap.lower import Event, Issue, Plan
from overlap.timeline import Span, Timeline
from recompute.errors import ConfigError

ONE_QUEUE = 1
MANY_QUEUES = 32
"""As many as CUDA allows: no kernel waits for another lane's."""
QUEUES = (ONE_QUEUE, MANY_QUEUES)

Run = tuple[Plan, Mapping[int, int]]
"""A plan, and for each microbatch number of its slots the number within the step."""


@dataclass(frozen=True, slots=True)
class Task:
    """A slot as the queue model sees it."""

    lane: Lane
    milliseconds: float
    kernels: int
    after: tuple[int, ...]
    """Places of tasks that must have ended; all earlier in the list."""


def place_tasks(tasks: Sequence[Task], queues: int, host_milliseconds: float = 0.0) -> list[tuple[float, float]]:
    """Start and end of each task in milliseconds, for tasks in launch order."""
    ends: list[float] = []
    times: list[tuple[float, float]] = []
    free = dict.fromkeys(Lane, 0.0)
    head = 0.0
    """Start of the kernel launched last."""
    launched = 0.0
    for task in tasks:
        launched += host_milliseconds
        start = max(free[task.lane], launched)
        for place in task.after:
            start = max(start, ends[place])
        if queues == ONE_QUEUE:
            start = max(start, head)
        end = start + task.milliseconds
        head = end - task.milliseconds / task.kernels
        free[task.lane] = end
        ends.append(end)
        times.append((start, end))
    return times


def cost_of(issue: Issue, costs: StageCosts) -> float:
    """Milliseconds of an issue: a backward that does not delay its weight gradients runs them too."""
    name = issue.stage.name
    time = costs.of(issue.slot.op, name)
    merged = issue.slot.op is Op.BACKWARD and issue.stage.wgrad and not issue.delays
    return time + (costs.of(Op.WGRAD, name) if merged and costs.has(Op.WGRAD, name) else 0.0)


def task_of(issue: Issue, costs: StageCosts, after: Iterable[int]) -> Task:
    """What the queue model needs of an issue."""
    kernels = costs.kernels if issue.lane is Lane.COMPUTE else 1
    return Task(issue.lane, cost_of(issue, costs), kernels, tuple(after))


def simulate(name: str, runs: Sequence[Run], costs: StageCosts, queues: int) -> Timeline:
    """Run plans one after another in the model.

    Args:
        name: Of the timeline.
        runs: The plans of a step, in order.
        costs: Milliseconds of slots.
        queues: Hardware queues, 1 or 32.

    Raises:
        ConfigError: A cost is missing, or `queues` is another number.
    """
    if queues not in QUEUES:
        raise ConfigError(field="queues", value=queues, rule="must be 1 or 32")
    ended: dict[tuple[int, Event], int] = {}
    tasks: list[Task] = []
    issues: list[tuple[Issue, int]] = []
    for plan, numbers in runs:
        for issue in plan.issues:
            number = numbers[issue.slot.microbatch]
            # What ended before these plans began is not waited for.
            waits = [ended[number, event] for event in issue.waits if (number, event) in ended]
            tasks.append(task_of(issue, costs, waits))
            ended[number, (issue.slot.op, issue.stage.key)] = len(issues)
            issues.append((issue, number))
    times = place_tasks(tasks, queues, costs.host_milliseconds)
    spans = (
        Span(slot=replace(issue.slot, microbatch=number), lane=issue.lane, start=start, end=end)
        for (issue, number), (start, end) in zip(issues, times, strict=True)
    )
    return Timeline(name=name, spans=tuple(spans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Where the compute lane's time went, in milliseconds, between two points in time."""

    milliseconds: float
    """Between the two."""
    compute_idle: float
    exposed: Mapping[str, float]
    """Idle compute while a transfer runs, per kind as `F.dispatch`; N counts as F."""


def exposure(timeline: Timeline, start: float, end: float, transfers: Iterable[str]) -> Exposure:
    """Measure a part of a timeline.

    Args:
        timeline: Simulated or recorded.
        start: In milliseconds.
        end: In milliseconds.
        transfers: Kinds that the result names even where nothing of them is exposed.
    """
    exposed = dict.fromkeys(transfers, 0.0)
    idle = timeline.gaps(Lane.COMPUTE, start, end)
    for span in timeline.on(Lane.COMM):
        op = Op.FORWARD if span.slot.op is Op.NO_GRAD else span.slot.op
        kind = f"{op.value}.{span.slot.stage}"
        time = sum(max(0.0, min(span.end, b) - max(span.start, a)) for a, b in idle)
        if time > 0:
            exposed[kind] = exposed.get(kind, 0.0) + time
    return Exposure(milliseconds=end - start, compute_idle=sum(b - a for a, b in idle), exposed=exposed)
