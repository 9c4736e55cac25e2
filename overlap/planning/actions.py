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


def moves_of(steps: Sequence[Step]) -> tuple[Move, ...]:
    """The chunks of each step."""
    return tuple(
        (
            next((action.stage for action in step if action.work is Work.FORWARD), None),
            next((action.stage for action in step if action.work is Work.BACKWARD), None),
        )
        for step in steps
    )


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
