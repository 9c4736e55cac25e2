"""FSDP2 under the schedule: bitwise what it gives without overlap or recompute, and no more there than planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.fsdp import ParameterGroup
from overlap.parallel.sharded import Sharded
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
from overlap.verify import compare
from recompute import ConfigError, RecomputeConfig
from recompute.config import Replay
from tests.distributed.ranks import RankPool
from tests.parallel.models import feeds_of, gradients, parallel_chunk, small_chunk, verify_parallel, world_of

pytestmark = pytest.mark.distributed
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
FSDP = DataSettings(fsdp=True)
WIDE = DataSettings(fsdp=True, reduce_dtype=torch.float32)


def every_setting() -> dict[str, bool]:
    world = world_of()
    verdicts = {}
    for recompute, delayed, model in (
        (RecomputeConfig.none(), False, {"layers": 2, "mtp": 1, "tied": True}),
        (RecomputeConfig.uniform(2), False, {"dropout": 0.1}),
        (HIDDEN, True, {"layers": 2, "mtp": 2, "mtp_repeat": True}),
        (HIDDEN, True, {"layers": 1, "dropout": 0.1, "cut_attention": True}),
    ):
        chunk = small_chunk(model, recompute=recompute, delay_wgrad=delayed, world=world)
        verdicts[str(model)] = verify_parallel(world, FSDP, chunk).equal
    chunk = small_chunk({"dtype": "bfloat16"}, recompute=HIDDEN, delay_wgrad=True, world=world)
    verdicts["bfloat16"] = verify_parallel(world, WIDE, chunk).equal
    return verdicts


def test_the_overlapped_step_is_the_sharded_reference(ranks: RankPool) -> None:
    for verdicts in ranks(2, every_setting):
        assert verdicts == dict.fromkeys(verdicts, True)
        assert len(verdicts) == 5


def without_wide_sums() -> tuple[str, ...]:
    """A control: the gradients of a group stay in bfloat16 between microbatches, as without post_backward."""
    world, original = world_of(), ParameterGroup.backward_done

    def only_last(self: ParameterGroup, planned: frozenset[int], *, reduce: bool) -> None:
        if reduce:
            original(self, planned, reduce=True)

    overlapped = parallel_chunk(world, WIDE, {"dtype": "bfloat16"}, recompute=HIDDEN)
    reference = parallel_chunk(world, WIDE, {"dtype": "bfloat16"})
    reference_step(reference, feeds_of(world.rank, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "backward_done", only_last)
        train_step(overlapped, feeds_of(world.rank, 3))
    return compare(gradients(reference), gradients(overlapped)).different


def test_sums_over_microbatches_in_the_narrow_type_are_seen(ranks: RankPool) -> None:
    assert all(ranks(2, without_wide_sums))


def sharded_and_replicated() -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """With two ranks a sum has one order, so both ways to keep replicas in step give the same bits."""
    world = world_of()
    chunks = [parallel_chunk(world, data, recompute=HIDDEN) for data in (FSDP, DataSettings())]
    losses = [train_step(chunk, feeds_of(world.rank, 2)) for chunk in chunks]
    evaluated = [forward_only(chunk, feeds_of(world.rank, 1)) for chunk in chunks]
    alone = small_chunk()
    reference_step(alone, feeds_of(world.rank, 2))
    same = torch.equal(losses[0][1]["loss"], losses[1][1]["loss"])
    same &= torch.equal(evaluated[0][0]["loss"], evaluated[1][0]["loss"])
    found = gradients(chunks[0])
    return compare(found, gradients(chunks[1])).different, compare(found, gradients(alone)).different, same


def test_shards_give_what_replicas_give(ranks: RankPool) -> None:
    for different, from_alone, same in ranks(2, sharded_and_replicated):
        assert different == ()
        assert len(from_alone) > 10
        assert same


def parameters_together(settings: dict[str, Any], steps: int = 2) -> tuple[list[int], list[int], bool]:
    """Per step, the most layers together at a time and how often one was brought together; whether none stays so."""
    world = world_of()
    chunk = parallel_chunk(world, FSDP, {"layers": 6, "dense_layers": 6}, **settings)
    assert isinstance(chunk.parallel, Sharded)
    layers = [group for group in chunk.parallel.groups if group.name]
    peaks, brought, scattered, original = [0] * steps, [0] * steps, True, ParameterGroup.prefetch

    def counted(self: ParameterGroup) -> None:
        brought[step] += self in layers and not self.together
        original(self)
        peaks[step] = max(peaks[step], sum(group.together for group in layers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "prefetch", counted)
        for step in range(steps):
            train_step(chunk, feeds_of(world.rank, 3, step), observers=())
            scattered &= not any(group.together for group in chunk.parallel.groups)
            # the first step also checks every stage
            chunk.zero_grad()
    return peaks, brought, scattered


@pytest.mark.parametrize(
    ("settings", "most", "count"),
    [
        # forward and backward side one layer each, and the next on its way
        ({}, 3, 36),
        ({"recompute": RecomputeConfig.uniform(1), "delay_wgrad": True}, 3, 36),
        # a second segment of the backward side is replayed beside the first; in the middle both sides are at one layer
        ({"recompute": HIDDEN}, 4, 34),
    ],
)
def test_no_more_is_together_than_the_schedule_needs(
    ranks: RankPool, settings: dict[str, Any], most: int, count: int
) -> None:
    for peaks, brought, scattered in ranks(2, parameters_together, settings):
        assert peaks[1] == most
        # once per layer and side of a pair: two sides of three microbatches
        assert brought[1] == count
        assert scattered


def thawed() -> tuple[str, ...]:
    """A group of parameters that were frozen when they were sharded trains later; what differs from one that did."""
    world = world_of()
    later = small_chunk({"dtype": "bfloat16"}, world=world)
    for name, parameter in later.module.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    make_parallel(later, WIDE)
    train_step(later, feeds_of(world.rank, 2))
    always = parallel_chunk(world, WIDE, {"dtype": "bfloat16"})
    always.steps_done = 1
    later.module.requires_grad_(True)
    later.zero_grad()
    for chunk in (later, always):
        train_step(chunk, feeds_of(world.rank, 2))
    return compare(gradients(always), gradients(later)).different


def test_a_group_that_trains_later_is_reduced_in_its_types(ranks: RankPool) -> None:
    assert ranks(2, thawed) == [(), ()]


def after_a_failure() -> tuple[bool, bool, tuple[str, ...]]:
    """R16: a stage raises on every rank; then everything is scattered, and a retry is the step that never failed."""
    world = world_of()
    chunk = parallel_chunk(world, WIDE, {"dtype": "bfloat16"}, recompute=HIDDEN, delay_wgrad=True)
    fresh = parallel_chunk(world, WIDE, {"dtype": "bfloat16"}, recompute=HIDDEN, delay_wgrad=True)

    class Fail:
        def before(self, issue: Any, owner: Any) -> None:
            if issue.slot.op == "B" and owner.number == 1 and issue.stage.key == (1, "experts"):
                raise ValueError("planted")

        def after(self, issue: Any, owner: Any) -> None: ...

    with pytest.raises(ValueError, match="planted"):
        train_step(chunk, feeds_of(world.rank, 3), observers=(Fail(),))
    assert isinstance(chunk.parallel, Sharded)
    scattered = not any(group.together for group in chunk.parallel.groups)
    clean = all(p.grad is None for p in chunk.parameters())
    for one in (chunk, fresh):
        train_step(one, feeds_of(world.rank, 3))
    return scattered, clean, compare(gradients(fresh), gradients(chunk)).different


def test_a_failed_step_leaves_nothing_together(ranks: RankPool) -> None:
    assert ranks(2, after_a_failure) == [(True, True, ())] * 2


def refused() -> str:
    world = world_of()
    try:
        make_parallel(small_chunk(world=world), FSDP)
    except ConfigError as error:
        return str(error)
    return ""


def test_one_rank_has_nothing_to_shard_over(ranks: RankPool) -> None:
    assert "several data ranks" in ranks(1, refused)[0]
