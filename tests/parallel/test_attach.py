"""Data parallelism beside expert parallelism: which group reduces what, and what the sum is divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.replicas import Replicas
from overlap.step import train_step
from overlap.verify import compare
from recompute import ConfigError, RecomputeConfig
from recompute.config import Replay
from tests.distributed.ranks import RankPool
from tests.parallel.models import (
    experts_of_all,
    feeds_of,
    gradients,
    parallel_chunk,
    small_chunk,
    verify_parallel,
    world_of,
)

pytestmark = pytest.mark.distributed
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
LAYERS = {"layers": 2}
"""One dense and one with experts."""


def beside_experts(ep: int, fsdp: bool) -> dict[str, object]:
    """Bits against the reference, and largest difference to the same step without expert parallelism."""
    world = world_of(ep=ep)
    data = DataSettings(fsdp=fsdp)
    chunk = small_chunk(LAYERS, world, recompute=HIDDEN, delay_wgrad=True)
    verdict = verify_parallel(world, data, chunk)
    found, wanted = [], parallel_chunk(world_of(), DataSettings(), {**LAYERS, "dtype": "float64"})
    train_step(wanted, feeds_of(world.rank, 2))
    split = parallel_chunk(world, data, {**LAYERS, "dtype": "float64"}, recompute=HIDDEN)
    train_step(split, feeds_of(world.rank, 2))
    whole = experts_of_all(split, gradients(split))
    for name, gradient in gradients(wanted).items():
        assert gradient is not None
        found.append(float((whole[name] - gradient).abs().max()))
    alone = isinstance(split.parallel, Replicas) and any(
        bucket.reduction.group is None for bucket in split.parallel.buckets(split.program)
    )
    return {"equal": verdict.equal, "worst": max(found), "compared": len(found), "alone": alone}


@pytest.mark.parametrize(("size", "ep", "fsdp"), [(2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True)])
def test_gradients_are_those_without_expert_parallelism(ranks: RankPool, size: int, ep: int, fsdp: bool) -> None:
    """An expert's gradient holds the tokens of all ranks that it serves, so it is divided by all data ranks too."""
    for found in ranks(size, beside_experts, ep, fsdp):
        assert found["equal"]
        assert found["alone"] == (size == ep and not fsdp), "nobody to reduce with"
        assert found["compared"] == len(list(small_chunk(LAYERS).parameters()))
        assert float(str(found["worst"])) < 1e-13


def wide_types() -> tuple[bool, tuple[str, ...]]:
    world = world_of(ep=2)
    model = {**LAYERS, "dtype": "bfloat16"}
    chunk = small_chunk(model, world, recompute=HIDDEN)
    data = DataSettings(fsdp=True, reduce_dtype=torch.float32)
    kept = DataSettings(fsdp=True, reduce_dtype=torch.float32, keep_together=True)
    chunks = [parallel_chunk(world, settings, model, recompute=HIDDEN) for settings in (data, kept)]
    for one in chunks:
        train_step(one, feeds_of(world.rank, 2))
    return verify_parallel(world, data, chunk).equal, compare(gradients(chunks[0]), gradients(chunks[1])).different


def test_shards_in_bfloat16_and_parameters_kept_together(ranks: RankPool) -> None:
    assert ranks(4, wide_types) == [(True, ())] * 4


def odd_rows() -> str:
    world = world_of(ep=2)
    try:
        make_parallel(small_chunk({"expert_width": 7}, world), DataSettings(fsdp=True))
    except ConfigError as error:
        return str(error)
    return ""


def test_rows_of_experts_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    assert all("rows of an expert matrix" in text for text in ranks(4, odd_rows))


def test_one_process_is_left_as_it_is() -> None:
    chunk = small_chunk()
    before = chunk.parallel
    assert make_parallel(chunk, DataSettings()) is chunk
    assert chunk.parallel is before
    with pytest.raises(ConfigError, match="several data ranks"):
        make_parallel(chunk, DataSettings(fsdp=True))


def on_top(fsdp: bool) -> float:
    """Largest difference between two steps that add up and the sum of their gradients alone."""
    world = world_of(ep=2)
    model = {"experts": 4, "dtype": "float64"}
    once, both = (parallel_chunk(world, DataSettings(fsdp=fsdp), model) for _ in range(2))
    alone: list[dict[str, Any]] = []
    for step in range(2):
        for chunk in (once, both):
            train_step(chunk, feeds_of(world.rank, 1, step))
        alone.append(gradients(once))
        once.zero_grad()
    found = gradients(both)
    return max(float((alone[0][name] + alone[1][name] - found[name]).abs().max()) for name in found)


@pytest.mark.parametrize("fsdp", [False, True])
def test_steps_add_to_gradients_of_the_step_before(ranks: RankPool, fsdp: bool) -> None:
    """An expert's gradient is divided by more ranks than it is summed over: once, not again in every later step."""
    assert max(ranks(2, on_top, fsdp)) < 1e-14
