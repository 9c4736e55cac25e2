"""Data ranks draw their own masks: a step's microbatches are numbered through all of them (R4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap.contiguous import contiguous_step
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import World
from overlap.reference import reference_step
from overlap.step import forward_only, train_step
from overlap.verify import compare
from recompute import RecomputeConfig
from recompute.config import Replay
from tests.distributed.ranks import RankPool
from tests.parallel.models import experts_of_all, feeds_of, gradients, parallel_chunk, small_chunk, world_of

pytestmark = pytest.mark.distributed
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
SHAPE: dict[str, Any] = {"dropout": 0.2, "dtype": "float64", "mtp": 1}
KINDS = [(1, False), (1, True), (2, False)]
"""Ranks of an expert group, and whether the rest is sharded."""


def losses_of(results: list[dict[str, Any]]) -> list[Tensor]:
    return [loss for result in results for loss in result.values()]


def on_the_same_data(ep: int, fsdp: bool) -> tuple[list[Tensor], bool]:
    """Losses of two microbatches that are the same on both ranks, and whether all ways to run them agree."""
    world, data, feeds = world_of(ep=ep), DataSettings(fsdp=fsdp), feeds_of(0, 2)
    chunk = parallel_chunk(world, data, SHAPE, recompute=HIDDEN, delay_wgrad=True)
    reference = parallel_chunk(world, data, SHAPE)
    found, wanted = losses_of(train_step(chunk, feeds)), losses_of(reference_step(reference, feeds))
    same = all(map(torch.equal, found, wanted)) and not compare(gradients(reference), gradients(chunk)).different
    # the next step's masks, in train mode
    evaluated, again = losses_of(forward_only(chunk, feeds)), losses_of(reference_step(reference, feeds))
    same &= all(map(torch.equal, evaluated, again)) and not torch.equal(evaluated[0], found[0])
    return found, same


@pytest.mark.parametrize(("ep", "fsdp"), KINDS)
def test_each_rank_draws_its_own(ranks: RankPool, ep: int, fsdp: bool) -> None:
    (first, same), (second, also_same) = ranks(2, on_the_same_data, ep, fsdp)
    assert same
    assert also_same
    assert not any(map(torch.equal, first, second))


def contiguous_and_overlapped() -> bool:
    world = world_of()
    shape = {**SHAPE, "mtp": 0}
    chunks = [make_parallel(small_chunk(shape, world, recompute=HIDDEN), DataSettings()) for _ in range(2)]
    feeds = feeds_of(0, 2)
    wanted, found = losses_of(train_step(chunks[0], feeds)), losses_of(contiguous_step(chunks[1], feeds))
    return all(map(torch.equal, found, wanted))


def test_the_contiguous_step_draws_alike(ranks: RankPool) -> None:
    assert ranks(2, contiguous_and_overlapped) == [True, True]


def on_its_own_data(ep: int, fsdp: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    world = world_of(ep=ep)
    chunk = parallel_chunk(world, DataSettings(fsdp=fsdp), SHAPE, recompute=HIDDEN)
    losses = losses_of(train_step(chunk, feeds_of(world.rank, 2)))
    return losses, experts_of_all(chunk, gradients(chunk))


@pytest.mark.parametrize(("ep", "fsdp"), KINDS)
def test_ranks_draw_what_one_process_would(ranks: RankPool, ep: int, fsdp: bool) -> None:
    alone = small_chunk(SHAPE)
    wanted = losses_of(train_step(alone, [feeds for rank in range(2) for feeds in feeds_of(rank, 2)]))
    found = ranks(2, on_its_own_data, ep, fsdp)
    torch.testing.assert_close([loss for losses, _ in found for loss in losses], wanted, rtol=1e-12, atol=0.0)
    expected = {name: gradient for name, gradient in gradients(alone).items() if gradient is not None}
    for _, own in found:
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-14)


def test_stages_of_one_replica_count_alike() -> None:
    layout = ParallelLayout(world_size=4, pp=2)
    worlds = [World(layout=layout, rank=rank, device=torch.device("cpu"), groups=None) for rank in range(4)]
    assert [small_chunk(world=world).first_draw(3) for world in worlds] == [0, 3, 0, 3]
    assert small_chunk().first_draw(3) == 0
