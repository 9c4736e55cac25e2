"""What lanes hold of each other's memory: a rank's plans walked one by one, against one walk over its steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.chunk import ModelChunk
from overlap.memory import fake_chunk
from overlap.memory.crossing import CrossLanes
from overlap.memory.gap import gaps_of
from overlap.memory.predict import Walk
from overlap.orders import ORDER_NAMES
from overlap.pipeline_model.actions import Action, Work
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.planning.bins import total
from overlap.planning.chunk_model import ChunkModel
from overlap.planning.chunks import stages_of_rank
from overlap.planning.evaluate import Evaluation, Setting
from overlap.step import step_plans
from recompute.config import Keep, RecomputeConfig, Replay
from recompute.planner import SELECTIONS, Choice
from tests.planning.tools import piped, setting, single

NONE, UNIFORM, BLOCK = RecomputeConfig.none(), RecomputeConfig.uniform, RecomputeConfig.block
RULES = st.one_of(
    st.just(NONE),
    st.sampled_from(SELECTIONS[-2:]),
    st.builds(
        lambda rule, count, replay, keep: rule(count, replay=replay, keep=keep),
        st.sampled_from((UNIFORM, BLOCK)),
        st.integers(1, 3),
        st.sampled_from(list(Replay)),
        st.sampled_from((Keep.DEVICE, Keep.HOST)),
    ),
)


def planned(asked: Setting, choice: Choice) -> int:
    """The planner's figure for the only rank of a job, without what stays."""
    (shape,) = asked.shapes
    rank = Evaluation(asked, choice).rank(0)
    assert rank.total == sum(rank.bins.values())
    return rank.total - total(asked.survey[shape].fixed) - asked.device.workspace


def oracle(asked: Setting, choice: Choice, *, streams: bool = True) -> int:
    """The oracle's: the step walked as one."""
    (shape,) = asked.shapes
    with fake_chunk(
        lambda: ModelChunk(
            ChunkModel(asked.job, shape),
            recompute=choice.recompute,
            delay_wgrad=choice.delay_wgrad,
            order=asked.order,
        )
    ) as chunk:
        count = asked.job.microbatches
        found = [asked.survey[shape].footprint] * count
        walk = Walk(found, gaps_of(chunk, count), delayed=choice.delay_wgrad, host=False, streams=streams)
        walk.run(step_plans(chunk, count))
        return max(top.bytes for top in walk.tops)


def ordered(name: str, microbatches: int) -> Setting:
    """The small job of one rank in another order."""
    base = setting(microbatches=microbatches)
    return Setting(job=base.job, survey=base.survey, device=base.device, order=name)


@settings(max_examples=12, deadline=None)
@given(rule=RULES, delayed=st.booleans(), order=st.sampled_from(ORDER_NAMES), microbatches=st.integers(2, 4))
def test_one_rank_is_the_oracle_to_the_byte(rule, delayed, order, microbatches) -> None:
    if rule.replay is Replay.HIDDEN and order != "multi_queue":
        order = "single_queue"
    asked = ordered(order, microbatches)
    choice = Choice(rule, delayed)
    assert planned(asked, choice) == oracle(asked, choice)


def test_what_lanes_hold_is_part_of_the_figure() -> None:
    """Negative control: without it the step would need less."""
    choice = Choice(UNIFORM(2), True)
    assert oracle(single(), choice) > oracle(single(), choice, streams=False)


@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b"])
def test_lanes_that_do_not_settle_pile_up(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: backwards in a row never make the copy lane wait."""
    choice = Choice(UNIFORM(1, keep=Keep.HOST), True)
    asked = of_schedule(schedule)
    settled = rank_walk(asked, choice, 1)
    monkeypatch.setattr(CrossLanes, "settle", lambda lanes: None)
    assert rank_walk(asked, choice, 1) > settled


def of_schedule(schedule: str) -> Setting:
    """A job of two pipeline ranks."""
    return piped() if schedule == "dualpipev" else setting(pp=2, virtual=1, ep=4, dp=8, microbatches=6)


def rank_walk(asked: Setting, choice: Choice, rank: int) -> int:
    """Highest point of one walk over all steps of a pipeline rank, each microbatch of each chunk beside the others."""
    forms = Evaluation(asked, choice).forms
    pieces, schedule = asked.pieces, asked.schedule.ranks[rank]
    places = {
        (stage, number): place
        for place, (stage, number) in enumerate(
            (stage, number) for stage in stages_of_rank(asked.job, rank) for number in range(asked.job.microbatches)
        )
    }
    footprints = [asked.survey[asked.shapes[stage]].footprint for stage, _ in places]
    gaps = [pieces.gap(forms[stage]) for stage, _ in places]
    walk = Walk(footprints, gaps, delayed=choice.delay_wgrad, ranks=asked.job.shards, host=False, streams=True)
    for step in schedule:
        sides: dict[Work, Action] = {action.work: action for action in step}
        given = [sides.get(work) for work in (Work.FORWARD, Work.BACKWARD)]
        forward, backward = (None if action is None else forms[action.stage] for action in given)
        numbers = {
            side: places[action.stage, action.microbatch]
            for side, action in zip((FORWARD_SIDE, BACKWARD_SIDE), given, strict=True)
            if action is not None
        }
        walk.run([(pieces.plan(forward, backward), numbers)])
    return max(top.bytes for top in walk.tops)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "choice",
    [
        Choice(NONE, True),
        Choice(UNIFORM(1), False),
        Choice(UNIFORM(1, keep=Keep.HOST), True),
        Choice(UNIFORM(1, replay=Replay.HIDDEN), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b"])
def test_a_pipeline_rank_is_its_steps_walked_in_a_row(schedule, rank, choice) -> None:
    asked = of_schedule(schedule)
    fixed = sum(total(asked.survey[asked.shapes[stage]].fixed) for stage in stages_of_rank(asked.job, rank))
    found = Evaluation(asked, choice).rank(rank).total - fixed - asked.device.workspace
    assert found == rank_walk(asked, choice, rank)
