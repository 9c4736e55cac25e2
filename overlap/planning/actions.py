"""Actions: what each pipeline rank runs, in order, from torch.distributed.pipelining's own schedule classes.

The only file of this package that names torch's private API; nothing is distributed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from overlap.planning.job import Job, PipelineSchedule

Work = tuple[int, int]
"""(chunk, microbatch)."""
NOBODY: Work = (-1, -1)
_KINDS = schedules._ComputationType
_BACKWARDS = (_KINDS.FULL_BACKWARD, _KINDS.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """A forward, a backward, or a pair of both that runs interleaved; NOBODY where there is none."""

    forward: Work = NOBODY
    backward: Work = NOBODY


def rank_actions(job: Job) -> tuple[tuple[Action, ...], ...]:
    """The actions of every pipeline rank.

    Delayed weight gradients run inside the backward's own action, as R13 has it: the W actions of a zero-bubble
    schedule are left out.
    """
    if job.pp == 1 and job.virtual == 1:
        return (tuple(_step(job.microbatches)),)
    return tuple(tuple(_MAKERS[job.schedule](job, rank)) for rank in range(job.pp))


def _step(microbatches: int) -> Iterator[Action]:
    """Without pipelining: each microbatch's forward beside the backward of the one before."""
    yield Action(forward=(0, 0))
    for number in range(1, microbatches):
        yield Action(forward=(0, number), backward=(0, number - 1))
    yield Action(backward=(0, microbatches - 1))


def _one_f_one_b(job: Job, rank: int) -> Iterator[Action]:
    """1F1B with one more microbatch of warm-up, so that the steady state's pairs are of two microbatches (R20)."""
    rounds = max(1, job.microbatches // job.pp)
    per_round, total = job.microbatches // rounds, job.virtual * job.microbatches
    least = schedules._get_warmup_ops(rank, job.virtual, per_round, job.pp, job.microbatches, multiply_factor=2)
    warmup = min(least + 1, total)

    def forward_stage(step: int) -> int:
        return (step // per_round) % job.virtual * job.pp + rank

    def backward_stage(step: int) -> int:
        return (job.virtual - 1 - ((step - warmup) // per_round) % job.virtual) * job.pp + rank

    operations: Sequence[Any] = schedules._get_1f1b_rank_ops(  # type: ignore[no-untyped-call]  # torch's
        job.virtual, job.pp, warmup, total - warmup, warmup, rank, forward_stage, backward_stage
    )
    pending: Action | None = None
    for number, action in enumerate(_actions(operations)):
        # The warm-up's forwards stand alone, and so do the last backwards.
        if number >= warmup and action.backward == NOBODY:
            pending = action
        elif pending is not None:
            if pending.forward == action.backward:
                yield pending
                yield action
            else:
                yield Action(pending.forward, action.backward)
            pending = None
        else:
            yield action


def _by_class(kind: Any, job: Job, rank: int) -> Iterator[Action]:
    described = SimpleNamespace(pp_group_size=job.pp, _n_microbatches=job.microbatches, num_stages=job.stages)
    for action in _actions(kind._calculate_single_rank_operations(described, rank)):
        if max(action.forward[1], action.backward[1]) < job.microbatches:
            yield action


def _actions(operations: Sequence[Any]) -> Iterator[Action]:
    for operation in operations:
        if operation is None:
            continue
        parts = operation.sub_actions or (operation,)
        work = {part.computation_type: (part.stage_index, part.microbatch_index) for part in parts}
        forward = work.get(_KINDS.FORWARD, NOBODY)
        backward = next((work[kind] for kind in _BACKWARDS if kind in work), NOBODY)
        if (forward, backward) != (NOBODY, NOBODY):
            yield Action(forward, backward)


_MAKERS: Any = {
    PipelineSchedule.ONE_F_ONE_B: _one_f_one_b,
    PipelineSchedule.DUALPIPEV: lambda job, rank: _by_class(schedules.ScheduleDualPipeV, job, rank),
    PipelineSchedule.ZBV: lambda job, rank: _by_class(schedules.ScheduleZBVZeroBubble, job, rank),
}


def in_flight(actions: Sequence[Action]) -> int:
    """Most (chunk, microbatch) whose forward began and whose backward has not ended."""
    live: set[Work] = set()
    most = 0
    for action in actions:
        live |= {action.forward} - {NOBODY}
        most = max(most, len(live))
        live -= {action.backward}
    return most
