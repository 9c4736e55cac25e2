"""A rank's peak from separate plans is the peak of the whole step; what waits, what stays, what a worst case adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap.chunk import ModelChunk
from overlap.memory import fake_chunk, gaps_of
from overlap.memory.predict import Walk
from overlap.model import ModelConfig
from overlap.orders import format_order, get_order
from overlap.planning.bins import RankBin, total
from overlap.planning.chunk_model import ChunkModel
from overlap.planning.evaluate import Evaluation
from overlap.planning.explore import explore
from overlap.planning.job import Job
from overlap.planning.survey import survey
from overlap.step import step_plans
from recompute.config import Keep, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.planner import SELECTIONS, Choice, choices
from tests.planning.tools import DEVICE, SMALL, piped, setting, single

NONE, UNIFORM, BLOCK = RecomputeConfig.none(), RecomputeConfig.uniform, RecomputeConfig.block
CHOICES = [
    Choice(rule, delayed)
    for rule in (NONE, UNIFORM(1), UNIFORM(3), BLOCK(2), UNIFORM(1, replay=Replay.HIDDEN), *SELECTIONS[-2:])
    for delayed in (False, True)
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_parts_add_up_to_the_whole_step(choice) -> None:
    """The step walked as one, three microbatches, against plans walked alone and what waits beside them."""
    whole = single()
    (shape,) = whole.shapes
    job = whole.job
    with fake_chunk(
        lambda: ModelChunk(ChunkModel(job, shape), recompute=choice.recompute, delay_wgrad=choice.delay_wgrad)
    ) as chunk:
        walk = Walk([whole.survey[shape].footprint] * 3, gaps_of(chunk, 3), delayed=choice.delay_wgrad, streams=True)
        walk.run(step_plans(chunk, 3))
    rank = Evaluation(whole, choice).rank(0)
    fixed = total(whole.survey[shape].fixed) + whole.device.workspace
    assert rank.total - fixed == max(top.bytes for top in walk.tops)


def test_inputs_on_the_host_are_not_on_the_device() -> None:
    """They cost time on the way, and what is on its way."""
    near, far = (
        Evaluation(piped(), Choice(UNIFORM(1, keep=keep), False)).outcome() for keep in (Keep.DEVICE, Keep.HOST)
    )
    assert far.fullest.bins[RankBin.SEGMENT_INPUTS] < near.fullest.bins[RankBin.SEGMENT_INPUTS]
    assert far.fullest.total == sum(far.fullest.bins.values()) < near.fullest.total
    assert far.milliseconds > near.milliseconds


def test_rebuilding_parts_takes_less_and_longer() -> None:
    """Their rebuilding is counted within the backward that they are part of."""
    kept = Evaluation(piped(), Choice(NONE, False)).outcome()
    for config in (*SELECTIONS[:3], *SELECTIONS[-2:]):
        found = Evaluation(piped(), Choice(config, False)).outcome()
        assert found.fullest.total < kept.fullest.total
        assert found.milliseconds > kept.milliseconds


def test_inputs_over_a_group_are_cut() -> None:
    """1/n of each waits; gathered ones are in the live segment; a link within a host is faster than one to it."""
    outcomes = {}
    for keep, shards in ((Keep.DEVICE, 1), (Keep.HOST, 1), (Keep.SHARDED, 2), (Keep.SHARDED, 4)):
        asked = replace(piped(), job=replace(piped().job, shards=shards))
        outcomes[keep, shards] = Evaluation(asked, Choice(UNIFORM(1, keep=keep), False)).outcome()
    near, host, two, four = (outcome.ranks[0].bins for outcome in outcomes.values())
    assert two[RankBin.LIVE_SEGMENT] > near[RankBin.LIVE_SEGMENT]
    assert two[RankBin.LIVE_SEGMENT] == host[RankBin.LIVE_SEGMENT]
    kept, half, quarter = (bins[RankBin.SEGMENT_INPUTS] - host[RankBin.SEGMENT_INPUTS] for bins in (near, two, four))
    assert half == 2 * quarter > 0
    assert kept > half
    times = [outcome.milliseconds for outcome in outcomes.values()]
    assert times[0] <= times[3] <= times[2] <= times[1]
    assert DEVICE.gather_milliseconds(2**20) < DEVICE.copy_milliseconds(2**20)


def test_a_gather_brings_what_the_others_hold() -> None:
    """Over a slow link nothing else counts: three quarters of each input beside a half."""
    times = []
    for shards in (2, 4):
        asked = replace(piped(), job=replace(piped().job, shards=shards), device=replace(DEVICE, link_gbytes=1e-6))
        times.append(Evaluation(asked, Choice(UNIFORM(1, keep=Keep.SHARDED), True)).outcome().milliseconds)
    assert times[1] == pytest.approx(1.5 * times[0], rel=1e-3)


def test_what_no_job_can_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="shards above 1"):
        Evaluation(piped(), Choice(UNIFORM(1, keep=Keep.SHARDED), False))


def test_choices_that_come_to_the_same_have_equal_forms(tmp_path) -> None:
    """Chunks have one layer each; and a control of each kind that differs."""

    def forms(rule: RecomputeConfig, *, delayed: bool = False) -> object:
        return Evaluation(piped(), Choice(rule, delayed)).forms

    one = forms(UNIFORM(1))
    assert one == forms(UNIFORM(2)) == forms(BLOCK(1))
    others = [NONE, UNIFORM(1, replay=Replay.HIDDEN), UNIFORM(1, keep=Keep.HOST), SELECTIONS[0]]
    assert one not in [forms(rule) for rule in others]
    assert one != forms(UNIFORM(1), delayed=True)
    # A file's order is the same for both replays.
    path = tmp_path / "order.txt"
    path.write_text(format_order(get_order("multi_queue", Replay.HIDDEN)))
    asked = replace(piped(), order=str(path))
    late, soon = (Evaluation(asked, Choice(UNIFORM(1, replay=replay), False)).forms for replay in Replay)
    assert late != soon


def test_a_search_of_long_chunks_mixes_what_is_best() -> None:
    one = Job(model=ModelConfig(layers=9, dense_layers=9), microbatches=2)
    job = replace(single(), job=one, survey=survey(one, DEVICE, SELECTIONS))
    decision = explore(job, 2**40, lambda name: None)
    started = choices(9, mtp=False, modules=job.modules, keeps=job.keeps)
    names = [str(candidate.choice) for candidate in decision.candidates]
    assert len(names) == len(set(names)) > len(started)
    # Those that come to the same are all there.
    assert names[: len(started)] == [str(choice) for choice in started]
    last = decision.candidates[-1]
    assert last.peak == Evaluation(replace(job), last.choice).outcome().fullest.total


def test_bins_of_a_pipeline_rank() -> None:
    """Each kind is where it should be, and they add up."""
    kept = Evaluation(piped(), Choice(NONE, False)).rank(0)
    redone = Evaluation(piped(), Choice(UNIFORM(1), False)).rank(0)
    late = Evaluation(piped(), Choice(UNIFORM(1, replay=Replay.HIDDEN), True)).rank(0)
    assert kept.total == sum(kept.bins.values())
    assert kept.bins[RankBin.SEGMENT_INPUTS] == kept.bins[RankBin.LIVE_SEGMENT] == 0
    assert kept.bins[RankBin.TRANSPORT] > 0 < kept.bins[RankBin.PIPELINE]
    assert redone.bins[RankBin.SEGMENT_INPUTS] > 0 < redone.bins[RankBin.PINNED_ROUTING]
    assert redone.bins[RankBin.ACTIVATIONS] < kept.bins[RankBin.ACTIVATIONS]
    assert redone.bins[RankBin.PENDING_WGRAD] == 0 < late.bins[RankBin.LIVE_SEGMENT]
    for name in (RankBin.WEIGHTS, RankBin.GRADIENTS, RankBin.OPTIMIZER):
        assert kept.bins[name] == redone.bins[name] > 0


def test_segment_inputs_follow_the_schedule() -> None:
    """DualPipeV keeps 2 * pp + 1 (chunk, microbatch) of a rank in flight; one runs at the peak."""
    rank = Evaluation(piped(), Choice(UNIFORM(8), False)).rank(1)
    assert rank.waiting in (3, 4)


def test_worst_routing_needs_more_than_balanced() -> None:
    model = ModelConfig(layers=1, experts=8, topk=4, expert_width=256)
    peaks = {}
    for name, more in (("balanced", {}), ("skewed", {"skew": 1.5}), ("worst", {})):
        job = setting(model=model, ep=4, dp=4, seq=128, routing=name, **more)
        peaks[name] = Evaluation(job, Choice(UNIFORM(1), False)).rank(0).total
    assert peaks["balanced"] < peaks["skewed"] < peaks["worst"]


def test_kept_sends_are_counted() -> None:
    """Every boundary's outputs and gradients of all microbatches, at the end of the step."""
    waited = Evaluation(piped(), Choice(UNIFORM(1), False)).rank(1)
    kept = Evaluation(replace(piped(), job=replace(piped().job, keep_sends=True)), Choice(UNIFORM(1), False)).rank(1)
    job: Job = piped().job
    sent = job.tokens * SMALL.hidden * job.item_size
    more = kept.bins[RankBin.PIPELINE] - waited.bins[RankBin.PIPELINE]
    assert more > 0
    assert more % sent == 0
