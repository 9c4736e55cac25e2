"""Pipelines: every chunk and microbatch once in each direction, in an order that can run; layers in their place."""

from __future__ import annotations

from collections import Counter

import pytest

from overlap.model import ModelConfig
from overlap.planning.actions import NOBODY, Action, in_flight, rank_actions
from overlap.planning.chunks import chunk_shapes, rank_of_stage, stages_of_rank
from overlap.planning.job import Job
from overlap.planning.presets import DEEPSEEK_V3
from overlap.planning.timing import makespan
from tests.planning.tools import DEVICE

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
    actions = rank_actions(job)
    everything = Counter((stage, number) for stage in range(job.stages) for number in range(job.microbatches))
    for side in ("forward", "backward"):
        found = Counter(getattr(a, side) for rank in actions for a in rank if getattr(a, side) != NOBODY)
        assert found == everything
    for rank, own in enumerate(actions):
        assert {a.forward[0] for a in own} - {-1} <= set(stages_of_rank(job, rank))
        assert all(a.forward != a.backward for a in own)
    # A forward and a backward of a chunk take one each; no rank can be done sooner than its own work.
    span = makespan(job, actions, lambda a: 2.0 - (a.forward, a.backward).count(NOBODY), DEVICE)
    assert 2 * job.microbatches * job.virtual <= span < 2 * (job.microbatches + 4 * job.pp) * job.virtual


def test_actions_in_a_circle_are_seen() -> None:
    """Negative control: a backward before its forward never starts."""
    job = grid("1f1b", 1, 1, 1)
    with pytest.raises(RuntimeError, match="wait for each other"):
        makespan(job, [[Action(backward=(0, 0)), Action(forward=(0, 0))]], lambda action: 1.0, DEVICE)


@pytest.mark.parametrize(
    ("schedule", "virtual", "first", "last"), [("dualpipev", 2, 33, 33), ("zbv", 2, 32, 32), ("1f1b", 1, 32, 2)]
)
def test_microbatches_in_flight(schedule, virtual, first, last) -> None:
    """1F1B with one more of warm-up: 2 * (pp - rank) at most; V shapes spread them evenly."""
    job = Job(model=DEEPSEEK_V3, schedule=schedule, pp=16, virtual=virtual, ep=64, dp=64, microbatches=64, seq=4096)
    actions = rank_actions(job)
    assert (in_flight(actions[0]), in_flight(actions[-1])) == (first, last)


def test_pairs_of_dualpipev() -> None:
    pairs = [a for a in rank_actions(grid("dualpipev", 4, 2, 16))[0] if NOBODY not in (a.forward, a.backward)]
    assert len(pairs) > 10


def test_layers_of_deepseek_v3() -> None:
    job = Job(model=DEEPSEEK_V3, schedule="dualpipev", pp=16, virtual=2, ep=64, dp=64, microbatches=64, seq=4096)
    shapes = chunk_shapes(job)
    assert sum(shape.layers for shape in shapes) == 61
    assert sum(shape.dense for shape in shapes) == 3
    assert [str(shape) for shape in (*shapes[:3], *shapes[-2:])] == ["embed+1D", "2D", "2M", "1M", "1M+head"]
    assert [rank_of_stage(job, stage) for stage in (0, 15, 16, 31)] == [0, 15, 15, 0]
