from __future__ import annotations

from typing import Any

import pytest

from overlap.parallel.attach import DataSettings
from overlap.parallel.counters import share_logged_losses
from overlap.parallel.scale import PerTokenOfRanks
from overlap.reference import reference_step
from overlap.scale import PerToken
from overlap.step import train_step
from tests.distributed.ranks import RankPool
from tests.parallel.models import feeds_of, gradients, parallel_chunk, small_chunk, world_of

pytestmark = pytest.mark.distributed
SHAPE = {"dtype": "float64", "per_token_loss": True, "aux_coefficient": 0.0, "z_coefficient": 0.0}


def ignoring(rank: int) -> list[Any]:
    """A rank's microbatches; rank 1 has loss on fewer tokens."""
    feeds = [dict(item) for item in feeds_of(rank, 2)]
    for item in feeds[: rank + 1]:
        item["labels"] = item["labels"].clone()
        item["labels"][:, : 3 * rank] = -100
    return feeds


def against_one_process() -> tuple[float, str]:
    """Largest difference to one process that has all ranks' microbatches."""
    world = world_of()
    together = parallel_chunk(world, DataSettings(), SHAPE, loss_scale=PerTokenOfRanks(world))
    train_step(together, ignoring(world.rank))
    alone = small_chunk(SHAPE, loss_scale=PerToken())
    reference_step(alone, [item for rank in range(world.size) for item in ignoring(rank)])
    pairs = zip(gradients(together).values(), gradients(alone).values(), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)
    return worst, repr(together.loss_scale)


def test_a_per_token_loss_counts_the_tokens_of_all_ranks(ranks: RankPool) -> None:
    found = ranks(2, against_one_process)
    assert max(worst for worst, _ in found) < 1e-14
    # ranks compare it before their first step
    assert found[0][1] == found[1][1]


def logged() -> tuple[float, float, float]:
    world = world_of()
    chunk = parallel_chunk(world, DataSettings())
    train_step(chunk, feeds_of(world.rank, 2))
    sums = dict(chunk.module.named_buffers())["layers.1.router.aux_loss_sum"]
    own = float(sums)
    share_logged_losses(chunk, world)
    once = float(sums)
    share_logged_losses(chunk, world)
    return own, once, float(sums)


def test_logged_losses_become_the_mean_of_all_ranks(ranks: RankPool) -> None:
    (own, once, again), (other, *shared) = ranks(2, logged)
    assert own != other
    assert once == pytest.approx((own + other) / 2, rel=1e-6)
    assert [once, again] == shared
    assert again == once


def test_the_factor_is_of_the_tokens_of_all_calls(ranks: RankPool) -> None:
    assert ranks(2, several_calls, (30, 70)) == [2 / 100] * 2
    # Nothing but padding: every loss is a sum of nothing, and no factor makes it infinite.
    assert ranks(2, several_calls, (0, 0)) == [2.0] * 2


def several_calls(tokens: tuple[int, int]) -> float:
    world = world_of()
    return PerTokenOfRanks(world).factor(feeds_of(world.rank, 1), 2, tokens[world.rank])
