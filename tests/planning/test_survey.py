"""Layers that are alike are dry-run once; weights and optimizer state are shared by the right ranks."""

from __future__ import annotations

from functools import partial

import pytest

from overlap.chunk import ModelChunk
from overlap.memory import fake_chunk, take_footprint
from overlap.memory.facts import Kind
from overlap.memory.refs import Source
from overlap.memory.trace import highest
from overlap.model import ModelConfig
from overlap.planning.bins import RankBin
from overlap.planning.chunk_model import ChunkModel, feeds_of
from overlap.planning.chunks import ChunkShape, chunk_shapes
from overlap.planning.device_kernels import DeviceKernels
from overlap.planning.job import Job
from overlap.planning.survey import CUDA_BLOCK, covering, distinct_layers, spread, stand_in, survey
from tests.planning.tools import DEVICE


def build(job: Job, shape: ChunkShape) -> ModelChunk:
    return ModelChunk(ChunkModel(job, shape))


def test_few_layers_stand_for_all() -> None:
    job = Job(model=ModelConfig(layers=4, dense_layers=2, shared_width=0))
    (shape,) = chunk_shapes(job)
    few = distinct_layers(shape)
    assert (few.layers, shape.layers) == (3, 4)
    found = {}
    for name in (shape, few):
        with fake_chunk(partial(build, job, name)) as chunk, DeviceKernels():
            found[name] = take_footprint(chunk, feeds_of(job, name), (False,)), chunk.program
    whole, program = found[shape]
    assert spread(found[few][0], program, partial(stand_in, shape, few)).facts == whole.facts


def test_a_chunk_with_more_layers_stands_for_one_with_fewer() -> None:
    """One layer before the last chunk, where the others have two."""
    job = Job(model=ModelConfig(layers=9, dense_layers=1, shared_width=0), pp=5, microbatches=5)
    shapes = chunk_shapes(job)
    assert [str(shape) for shape in shapes] == ["embed+1D1M", "2M", "2M", "2M", "1M+head"]
    one = ChunkShape(dense=0, moe=1, first=False, last=False)
    two = covering(one, [*shapes, one])
    assert two == shapes[1]
    assert covering(shapes[-1], shapes) == shapes[-1]
    found = {}
    for few in (one, two):
        with fake_chunk(partial(build, job, few)) as chunk, DeviceKernels():
            found[few] = take_footprint(chunk, feeds_of(job, few), (False,)), chunk.program
    whole, program = found[one]
    assert spread(found[two][0], program, partial(stand_in, one, two)).facts == whole.facts


@pytest.mark.parametrize(("optimizer", "shares"), [("adamw", (1, 1)), ("distributed", (8, 2))])
def test_fixed_bytes(optimizer, shares) -> None:
    """bfloat16 weights and gradients, 12 bytes of optimizer state: experts over dp/ep ranks, all else over dp."""
    model = ModelConfig(layers=1, experts=8, dtype="bfloat16", max_seq=16)
    job = Job(model=model, ep=4, dp=8, optimizer=optimizer)
    (chunk,) = survey(job, DEVICE, ()).values()
    experts = 2 * 3 * model.hidden * model.expert_width
    with fake_chunk(lambda: ModelChunk(ChunkModel(job, chunk_shapes(job)[0]))) as whole:
        count = sum(p.numel() for p in whole.module.parameters())
        tensors = len(list(whole.module.parameters()))
    assert count > experts
    slack = tensors * CUDA_BLOCK
    wanted = 12 * ((count - experts) / shares[0] + experts / shares[1])
    assert 0 <= chunk.fixed[RankBin.WEIGHTS] - 2 * count < slack
    assert chunk.fixed[RankBin.WEIGHTS] == chunk.fixed[RankBin.GRADIENTS]
    assert 0 <= chunk.fixed[RankBin.OPTIMIZER] - wanted < slack + tensors


def test_operators_take_within_themselves_what_they_do_on_a_device() -> None:
    """Backward of an embedding of more than 3072 ids sums runs of equal ones in float32."""
    model = ModelConfig(layers=1, max_seq=4096, vocab=5000)
    (chunk,) = survey(Job(model=model, seq=4096), DEVICE, ()).values()
    embed = chunk.footprint.facts[False][Kind((None, "embed"), Source.BACKWARD, True, False)]
    assert highest(embed.trace, 0, {}) > (5000 + 4096) * model.hidden * 4
