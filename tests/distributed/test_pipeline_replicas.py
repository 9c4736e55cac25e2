"""Pipelines whose stages are replicated or sharded over data ranks: bits, quantities, clipping, accumulation."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap.engine import Engine, MicrobatchState
from overlap.lower import Issue
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.clip import clip_together, global_norm
from overlap.parallel.collective_log import CollectiveLog
from overlap.parallel.fsdp import ParameterGroup
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.sharded import Sharded
from overlap.parallel.world import open_world
from overlap.pipelining import Pipeline, ScheduleKind, evaluate_pipeline, train_pipeline
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from recompute.config import RecomputeConfig, Replay
from tests.distributed.ranks import RankPool
from tests.distributed.run import TINY, command_on
from tests.pipelining.models import batch, different, make_pipeline, make_reference, small, uniform

pytestmark = pytest.mark.distributed
HIDDEN = "--method uniform --num-layers 1 --replay hidden"
MICROBATCHES = 3
VERIFY = f"verify {TINY} --pp 2 --fsdp --layers 4 --microbatches 4 --json --debug-collectives"


@pytest.mark.parametrize(
    "words",
    [
        f"--vpp 2 {HIDDEN} --mtp 1 --dropout 0.1 --delay-wgrad --dtype bfloat16 --steps 1",
        f"--schedule dualpipev --ep 2 {HIDDEN} --dropout 0.1 --steps 2",
        "--schedule zbv --ep 2 --method block --num-layers 1 --mtp 1 --dtype bfloat16 --steps 1",
    ],
)
def test_sharded_stages_change_no_bit(ranks: RankPool, words: str) -> None:
    statuses, found, _ = command_on(ranks, 4, f"{VERIFY} {words}")
    assert statuses == [0] * 4
    assert found["equal"]
    assert found["gradients"]["compared"] > 100


def test_a_wrong_gradient_is_seen_with_shards(ranks: RankPool) -> None:
    """Negative control of the comparison."""
    statuses, found, _ = command_on(ranks, 4, f"{VERIFY} --schedule zbv --control wrong_gradient --steps 1")
    assert statuses == [1] * 4
    assert "embedding" in found["gradients"]["different"]


def test_one_data_rank_has_nobody_to_shard_over(ranks: RankPool) -> None:
    statuses, _, answers = command_on(ranks, 2, VERIFY)
    assert statuses == [2, 2]
    assert all("fsdp=True: needs several data ranks" in answer.err for answer in answers)


def test_training_clips_over_stages_and_shards(ranks: RankPool) -> None:
    """As a V both copies of the shared embedding are on one rank: they count once, and each is scaled once."""
    words = f"train {TINY} --pp 2 --schedule dualpipev --layers 4 --mtp 1 --batch 1 --steps 2 --json"
    losses = [command_on(ranks, 4, f"{words} {shards}")[1]["losses"] for shards in ("", "--fsdp")]
    assert losses[0] == losses[1]
    assert losses[0][1] != losses[0][0]


class Kept(CollectiveLog):
    """A log that outlives its step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []

    def clear(self) -> None:
        """Keep what the step did."""
        self.steps.append([*self.entries])
        super().clear()


class Together:
    """An observer: most groups of parameters that were together at once, those apart that never part."""

    def __init__(self, pipeline: Pipeline) -> None:
        parallels = [chunk.parallel for chunk in pipeline.chunks]
        self.groups: list[ParameterGroup] = [
            group
            for chunk, parallel in zip(pipeline.chunks, parallels, strict=True)
            if isinstance(parallel, Sharded)
            for number, group in enumerate(parallel.groups)
            if number not in parallel.uses(chunk.program).held
        ]
        self.peak = 0

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing to see before a slot."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Count."""
        self.peak = max(self.peak, sum(group.together for group in self.groups))


class FailsOnce(Engine):
    """Fails in the first backward of a layer, on every rank."""

    armed = True

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        if FailsOnce.armed and issue.slot.layer == 1:
            FailsOnce.armed = False
            raise RuntimeError("once")
        super()._backward(issue, owner)


def side(kind: ScheduleKind, settings: DataSettings, rule: RecomputeConfig, log: Kept, **more: Any) -> Any:
    """A pipeline of one rank of two stages on each of two data ranks, its reference, and the data rank."""
    world = replace(open_world(ParallelLayout(world_size=2)), debug=log)
    config = small(layers=4, **more)
    common: dict[str, Any] = {"world": world, "prepare": lambda chunk: make_parallel(chunk, settings)}
    pipeline = make_pipeline(kind, config, rule, group=world.formed.pp, **common)
    return pipeline, make_reference(kind, config, rule, **common), config, world.data_rank


def accumulate(fsdp: bool) -> list[str]:
    """A step that fails, then two calls that reduce once, an evaluation between them; what differs."""
    settings = DataSettings(fsdp=fsdp, bucket_bytes=1)
    pipeline, reference, config, rank = side(ScheduleKind.ZBV, settings, uniform(), Kept(), mtp=1)
    FailsOnce.armed = True
    with suppress(RuntimeError):
        train_pipeline(pipeline, batch(config, 2), engine_type=FailsOnce)
    assert not FailsOnce.armed
    assert not any(group.together for group in Together(pipeline).groups)
    for chunk in pipeline.chunks:
        chunk.zero_grad()
    found = []
    for step, last in enumerate((False, True)):
        feeds = batch(config, 2, 2 * step + rank)
        expected = reference_step(reference, feeds, 2, last=last)
        losses = train_pipeline(pipeline, feeds, 2, last=last)
        evaluate_pipeline(pipeline, feeds)
        if last:
            merge_embedding(reference)
            found += different(pipeline, reference, losses, expected)
    return found


@pytest.mark.parametrize("fsdp", [True, False])
def test_calls_accumulate_and_reduce_once(ranks: RankPool, fsdp: bool) -> None:
    assert ranks(2, accumulate, fsdp) == [[], []]


def quantities() -> tuple[Counter[str], Counter[str], int, list[str], bool]:
    """Of a sharded step: gathers and reductions by group, most groups together, the groups of both stages.

    Then a step of the whole model: whether the pipeline's norm is the same, and what clipping leaves of it.
    """
    log = Kept()
    rule = uniform(1, Replay.HIDDEN)
    pipeline, reference, config, rank = side(ScheduleKind.INTERLEAVED, DataSettings(fsdp=True), rule, log)
    feeds = batch(config, MICROBATCHES, rank)
    train_pipeline(pipeline, feeds)  # the first step checks the stages, which gathers too
    log.steps.clear()
    watch = Together(pipeline)
    train_pipeline(pipeline, feeds, observers=(watch,))
    entries = [entry.rsplit(" ", 3) for entry in log.steps[0]]
    gathered = Counter(what for operation, what, *_ in entries if operation.endswith("all_gather"))
    scattered = Counter(what for operation, what, *_ in entries if operation.endswith("reduce_scatter"))
    names = [group.name for chunk in pipeline.chunks for group in chunk.parallel.groups]
    for chunk in (reference, *pipeline.chunks):
        chunk.zero_grad()
        chunk.steps_done = 2
    reference_step(reference, feeds)
    train_pipeline(pipeline, feeds)
    norm = global_norm((reference,))
    said = clip_together(pipeline.chunks, 1e-3)
    left = global_norm(pipeline.chunks)
    close = torch.allclose(norm.float(), said) and torch.allclose(left.float(), torch.tensor(1e-3), rtol=1e-2)
    return gathered, scattered, watch.peak, names, close


def test_groups_are_gathered_around_use_and_reduced_once(ranks: RankPool) -> None:
    """Two visits of a group per microbatch, forward and backward.

    With hidden replays the layers and experts of two segments are together, and the group that comes next.
    """
    for gathered, scattered, peak, names, close in ranks(2, quantities):
        assert len(names) == 10
        assert scattered == Counter(names)
        assert gathered == Counter({name: 2 * MICROBATCHES * count for name, count in scattered.items()})
        assert peak == 5
        assert close


def reductions() -> list[str]:
    """The reductions of one replicated step, each with the slot that launched it."""
    log = Kept()
    pipeline, _, config, rank = side(ScheduleKind.ZBV, DataSettings(bucket_bytes=1 << 10), uniform(), log)
    train_pipeline(pipeline, batch(config, 3, rank))
    return [entry for entry in log.steps[0] if "all_reduce gradients" in entry]


def test_replicas_reduce_within_the_step(ranks: RankPool) -> None:
    """Every bucket is launched by a slot of the last microbatch, not when the step is over."""
    for entries in ranks(2, reductions):
        assert len(entries) > 4
        assert all(entry[:2] in ("B2", "W2") for entry in entries)
