"""What operators allocate within themselves, against the CPU allocator's own events."""

from __future__ import annotations

import pytest
import torch

from overlap.chunk import ModelChunk
from overlap.memory import fake_chunk, take_footprint
from overlap.memory.facts import Kind
from overlap.memory.inside import ON_CPU, logsumexp_bytes
from overlap.memory.oracle import allocator_peak
from overlap.memory.refs import Source
from overlap.memory.trace import highest
from overlap.model import Decoder, ModelConfig
from tests.memory.compare import tokens


@pytest.mark.parametrize("shape", [(12, 100), (2, 3, 50), (7, 1)])
def test_logsumexp(shape) -> None:
    x, kept = torch.randn(shape, dtype=torch.float64), []
    peak = allocator_peak(lambda: kept.append(x.logsumexp(-1)))
    assert peak == logsumexp_bytes(x, -1) + kept[0].nbytes


def test_experts_add_their_gradients_one_by_one() -> None:
    into, x, grad, ends = (
        torch.zeros(3, 8, 4),
        torch.randn(6, 8),
        torch.randn(6, 4),
        torch.tensor([2, 2, 6], dtype=torch.int32),
    )
    add = torch.ops.overlap.grouped_mm_wgrad_add
    peak = allocator_peak(lambda: add(into, x, grad, ends, True))
    assert peak == ON_CPU[add.default](into, x, grad, ends, True) == 8 * 4 * 4


@pytest.mark.parametrize("config", [{}, {"tied": True}, {"mhc": 2, "mhc_iterations": 2}], ids=str)
def test_the_heads_forward(config) -> None:
    """Its highest point is inside a logsumexp."""

    def build() -> ModelChunk:
        return ModelChunk(Decoder(ModelConfig(vocab=512, layers=1, hidden=16, kv_rank=8, **config)))

    (feeds,) = tokens(1)
    with fake_chunk(build) as chunk:
        facts = take_footprint(chunk, feeds, (False,), constants=True).facts[False]
    predicted = highest(facts[Kind((None, "head"), Source.FORWARD, True, False)].trace, 0, {})
    chunk, kept = build(), []
    (stage,) = (stage for stage in chunk.program.stages if stage.name == "head")
    streams = (config["mhc"],) if "mhc" in config else ()
    state = torch.randn(2, 6, *streams, 16, requires_grad=True)
    tied = (chunk.module.embedding,) if "tied" in config else ()
    assert predicted == allocator_peak(lambda: kept.append(stage.forward(state, feeds["labels"], *tied)))
