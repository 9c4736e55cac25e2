"""What all ranks compute together is what one process computes on all their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap import ModelChunk, train_step
from overlap.model import Router
from overlap.model.router import update_expert_bias
from overlap.parallel.world import SOLO
from tests.distributed.chunks import chunk_in, feeds_of, gradients, join
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.distributed
MICROBATCHES = 2
SHAPE: dict[str, Any] = {"experts": 4, "dtype": "float64", "mtp": 1}
LENGTHS = (8, 12, 6, 10)


def biases(chunk: ModelChunk) -> list[Tensor]:
    return [module.expert_bias for module in chunk.modules() if isinstance(module, Router)]


def on_ranks(ep: int, size: int, shape: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Gradients of a rank before and after they are summed, and its biases after the update."""
    world = join(ep, size)
    chunk = chunk_in(world, **shape)
    train_step(chunk, feeds_of(world.rank, MICROBATCHES, LENGTHS[world.rank]))
    own = {name: gradient.clone() for name, gradient in gradients(chunk).items()}
    summed = {}
    for name, gradient in gradients(chunk).items():
        routed = ".experts." in name
        dist.all_reduce(gradient, group=world.expert_data_group if routed else world.data_group)
        summed[name] = gradient
    update_expert_bias(chunk, world)
    return own, summed, biases(chunk)


@pytest.mark.parametrize(
    ("ep", "size", "more"), [(2, 2, {}), (4, 4, {"layers": 1}), (2, 4, {"layers": 1}), (2, 2, {"capacity": 3})]
)
def test_gradients_sum_to_those_of_one_process(ranks: RankPool, ep: int, size: int, more: dict[str, Any]) -> None:
    shape = {**SHAPE, **more}
    found = ranks(size, on_ranks, ep, size, shape)
    alone = chunk_in(SOLO, **shape)
    feeds = [item for rank in range(size) for item in feeds_of(rank, MICROBATCHES, LENGTHS[rank])]
    train_step(alone, feeds)
    update_expert_bias(alone)
    for rank, (own, summed, bias) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(bias, biases(alone), strict=True))
        differs = 0
        for name, expected in gradients(alone).items():
            # a rank's loss is the mean over its own microbatches, the process's over those of all ranks
            wanted = expected * size
            if ".experts." in name:
                each = shape["experts"] // ep
                wanted = wanted[rank % ep * each : (rank % ep + 1) * each]
            torch.testing.assert_close(summed[name], wanted, rtol=1e-11, atol=1e-15)
            differs += not torch.allclose(own[name], wanted, rtol=1e-3)
        # negative control: what a rank has before the sum is something else
        assert differs > 20
    assert any(bias.any() for bias in biases(alone))
