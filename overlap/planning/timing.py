"""Timing: how long a plan takes on one rank, and a step on a pipeline of ranks. In milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from overlap.lower import Event, Plan
from overlap.memory.device_model import DeviceModel
from overlap.planning.actions import NOBODY, Action, Work
from overlap.planning.chunks import rank_of_stage
from overlap.planning.job import Job
from overlap.simulate import MANY_QUEUES, Task, place_tasks

_HOST = 0.02
"""Host time to launch a slot."""
_KERNELS = 20

Done = tuple[str, int, int]
"""("F" or "B", chunk, microbatch)."""


def plan_milliseconds(plan: Plan, times: Sequence[float]) -> float:
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
    return max((end for _, end in place_tasks(tasks, MANY_QUEUES, _HOST)), default=0.0)


def makespan(
    job: Job, actions: Sequence[Sequence[Action]], time: Callable[[Action], float], device: DeviceModel
) -> float:
    """How long a step takes: an action starts when its rank is free and what it receives has arrived.

    Raises:
        RuntimeError: The actions wait for each other in a circle.
    """
    hop = device.transfer_milliseconds(job.tokens * (job.model.mhc or 1) * job.model.hidden * job.item_size)
    done: dict[Done, float] = {}
    free = [0.0] * len(actions)
    places = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while places[rank] < len(own):
                action = own[places[rank]]
                needs = list(_needs(job, action))
                if any(need not in done for need, _ in needs):
                    break
                arrivals = [done[need] + (0.0 if source == rank else hop) for need, source in needs]
                free[rank] = max([free[rank], *arrivals]) + time(action)
                done.update((key, free[rank]) for key in _makes(action))
                places[rank] += 1
                moved = True
    if any(place < len(own) for place, own in zip(places, actions, strict=True)):
        raise RuntimeError("the pipeline's actions wait for each other")
    return max(free)


def _needs(job: Job, action: Action) -> Iterator[tuple[Done, int]]:
    """What an action waits for, each with the rank that makes it."""
    stage, number = action.forward
    if action.forward != NOBODY and stage > 0:
        yield ("F", stage - 1, number), rank_of_stage(job, stage - 1)
    stage, number = action.backward
    if action.backward == NOBODY:
        return
    if stage < job.stages - 1:
        yield ("B", stage + 1, number), rank_of_stage(job, stage + 1)
    else:
        yield ("F", stage, number), rank_of_stage(job, stage)


def _makes(action: Action) -> Iterator[Done]:
    kinds: tuple[tuple[str, Work], ...] = (("F", action.forward), ("B", action.backward))
    return ((kind, *work) for kind, work in kinds if work != NOBODY)
