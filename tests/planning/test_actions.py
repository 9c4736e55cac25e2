"""Pipelines: every chunk and microbatch once in each direction, in an order that can run; layers in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from overlap.errors import ScheduleError
from overlap.model import ModelConfig
from overlap.pipeline_model.actions import Action, PipelineSchedule, Step, Work
from overlap.pipeline_model.run import PlainTimes, run_pipeline
from overlap.planning.actions import moves_of, pipeline_of
from overlap.planning.chunks import chunk_shapes, stages_of_rank
from overlap.planning.job import Job
from overlap.planning.presets import DEEPSEEK_V3

GRIDS = [
    ("1f1b", 1, 1, 3), ("1f1b", 2, 1, 2), ("1f1b", 4, 1, 8), ("1f1b", 4, 2, 8), ("1f1b", 2, 3, 4),
    ("dualpipev", 2, 2, 4), ("dualpipev", 4, 2, 9), ("zbv", 4, 2, 8), ("zbv", 2, 2, 5),
]  # fmt: skip


def grid(schedule: str, pp: int, virtual: int, microbatches: int) -> Job:
    model = ModelConfig(layers=12, dense_layers=2)
    return Job(model=model, schedule=schedule, pp=pp, virtual=virtual, microbatches=microbatches)


@pytest.mark.parametrize("case", GRIDS, ids=str)
def test_every_microbatch_goes_through_every_chunk_once(case) -> None:
    job = grid(*case)
    schedule = pipeline_of(job)
    everything = Counter((stage, number) for stage in range(job.stages) for number in range(job.microbatches))
    steps = [step for rank in schedule.ranks for step in rank]
    for work in (Work.FORWARD, Work.BACKWARD):
        assert Counter((a.stage, a.microbatch) for step in steps for a in step if a.work is work) == everything
    for rank, own in enumerate(schedule.ranks):
        assert {action.stage for step in own for action in step} == set(stages_of_rank(job, rank))
        assert all(len({(a.stage, a.microbatch) for a in step}) == len(step) for step in own)
    # A forward and a backward of a chunk take one each; no rank can be done sooner than its own work.
    times = PlainTimes(forward=1.0, backward=1.0, wgrad=0.0, pair=2.0)
    span = run_pipeline(schedule, times).milliseconds
    assert 2 * job.microbatches * job.virtual <= span < 2 * (job.microbatches + 4 * job.pp) * job.virtual


def test_a_backward_before_its_forward_is_seen() -> None:
    """Negative control."""
    steps = ((Action(0, Work.BACKWARD, 0),), (Action(0, Work.FORWARD, 0),))
    with pytest.raises(ScheduleError, match="out of order"):
        PipelineSchedule(name="wrong", ranks=(steps,), num_stages=1, microbatches=1)


def in_flight(steps: Sequence[Step]) -> int:
    """Most (chunk, microbatch) whose forward began and whose backward has not ended."""
    live: set[tuple[int, int]] = set()
    most = 0
    for step in steps:
        live |= {(a.stage, a.microbatch) for a in step if a.work is Work.FORWARD}
        most = max(most, len(live))
        live -= {(a.stage, a.microbatch) for a in step if a.work is Work.BACKWARD}
    return most


@pytest.mark.parametrize(
    ("schedule", "virtual", "first", "last"), [("dualpipev", 2, 33, 33), ("zbv", 2, 32, 32), ("1f1b", 1, 32, 2)]
)
def test_microbatches_in_flight(schedule, virtual, first, last) -> None:
    """1F1B with one more of warm-up: 2 * (pp - rank) at most; V shapes spread them evenly."""
    job = Job(model=DEEPSEEK_V3, schedule=schedule, pp=16, virtual=virtual, ep=64, dp=64, microbatches=64, seq=4096)
    ranks = pipeline_of(job).ranks
    assert (in_flight(ranks[0]), in_flight(ranks[-1])) == (first, last)


def test_pairs_of_dualpipev() -> None:
    moves = moves_of(pipeline_of(grid("dualpipev", 4, 2, 16)).ranks[0])
    assert sum(None not in move for move in moves) > 10


def test_layers_of_deepseek_v3() -> None:
    job = Job(model=DEEPSEEK_V3, schedule="dualpipev", pp=16, virtual=2, ep=64, dp=64, microbatches=64, seq=4096)
    shapes = chunk_shapes(job)
    assert sum(shape.layers for shape in shapes) == 61
    assert sum(shape.dense for shape in shapes) == 3
    assert [str(shape) for shape in (*shapes[:3], *shapes[-2:])] == ["embed+1D", "2D", "2M", "1M", "1M+head"]
    assert [pipeline_of(job).rank_of[stage] for stage in (0, 15, 16, 31)] == [0, 15, 15, 0]
