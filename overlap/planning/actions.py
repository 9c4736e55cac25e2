"""Actions: what each pipeline rank of a job runs, in order: the simulated pipeline's lists, backwards made whole.

Delayed weight gradients run inside the backward's own action, as R13 has it: W actions of zero-bubble schedules go, and
their I actions are whole backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from overlap.pipeline_model.actions import BACKWARDS, Action, PipelineSchedule, Step, Work
from overlap.pipeline_model.torch_lists import make_schedule
from overlap.planning.job import Job

Move = tuple[int | None, int | None]
"""The chunks that run forward and backward in a step; None: nobody does."""
_NAMES = {"1f1b": "interleaved"}
"""1F1B with a paired steady state, one chunk a rank or several."""


def pipeline_of(job: Job) -> PipelineSchedule:
    """What every pipeline rank runs."""
    ranks: Sequence[Sequence[Step]] = [tuple(_one_rank(job.microbatches))]
    if job.pp > 1:
        name = _NAMES.get(job.schedule, str(job.schedule))
        ranks = make_schedule(name, job.pp, job.virtual, job.microbatches).ranks
    return PipelineSchedule(
        name=str(job.schedule),
        ranks=tuple(tuple(_whole(steps)) for steps in ranks),
        num_stages=job.stages,
        microbatches=job.microbatches,
    )


def move_of(step: Step) -> Move:
    """The chunks of a step."""
    forward = backward = None
    for action in step:
        if action.work is Work.FORWARD:
            forward = action.stage
        elif action.work is Work.BACKWARD:
            backward = action.stage
    return forward, backward


def distances_of(steps: Sequence[Step]) -> tuple[int, ...]:
    """Of each step of a rank, how many steps ago the microbatch that runs backward ran forward; 0: none does."""
    begun: dict[tuple[int, int], int] = {}
    found = []
    for place, step in enumerate(steps):
        ended = [begun[action.stage, action.microbatch] for action in step if action.work is Work.BACKWARD]
        found.append(place - ended[0] if ended else 0)
        begun.update({(a.stage, a.microbatch): place for a in step if a.work is Work.FORWARD})
    return tuple(found)


def _one_rank(microbatches: int) -> Iterator[Step]:
    """Without pipelining: each microbatch's forward beside the backward of the one before."""
    yield (Action(0, Work.FORWARD, 0),)
    for number in range(1, microbatches):
        yield Action(0, Work.FORWARD, number), Action(0, Work.BACKWARD, number - 1)
    yield (Action(0, Work.BACKWARD, microbatches - 1),)


def _whole(steps: Sequence[Step]) -> Iterator[Step]:
    for step in steps:
        kept = [action for action in step if action.work is not Work.WGRAD]
        if kept:
            yield tuple(replace(action, work=Work.BACKWARD) if action.work in BACKWARDS else action for action in kept)
