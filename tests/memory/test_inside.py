"""What operators allocate within themselves, against the CPU allocator's own events."""

from __future__ import annotations

from functools import partial

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
from tests.memory.compare import tokens, within

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("shape", [(12, 100), (2, 3, 50), (7, 1)])
def test_logsumexp(shape) -> None:
    x, kept = torch.randn(shape, dtype=torch.float64), []
    peak = allocator_peak(lambda: kept.append(x.logsumexp(-1)))
    assert peak == logsumexp_bytes(x, -1) + kept[0].nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 2, 16, 16), (2, 2, 128, 128)], ids=str)
def test_softmax_of_masked_rows(shape, dtype) -> None:
    """Two masks and a zero at every size, though they are a step's highest point from some length on only."""
    x = torch.randn(shape, dtype=dtype)
    func = aten._safe_softmax.default
    assert within(func, x, -1) == ON_CPU[func](x, -1) == x.numel() + x.numel() // shape[-1] + dtype.itemsize


@pytest.mark.parametrize("length", [1, 31, 32, 33, 191, 192, 511, 513, 767, 768])
def test_attention_in_blocks(length) -> None:
    """Lengths on both sides of where the blocks grow; gradients that lie token by token, and head by head."""
    query, key, value = (torch.randn(1, 2, length, 8) for _ in range(3))
    assert within(FLASH, query, key, value, 0.0, True) == ON_CPU[FLASH](query, key, value)
    out, sums = FLASH(query, key, value, 0.0, True)
    for grad in (torch.randn(1, length, 2, 8).transpose(1, 2), torch.randn(1, 2, length, 8)):
        args = (grad, query, key, value, out, sums, 0.0, True)
        assert within(FLASH_BACKWARD, *args) == ON_CPU[FLASH_BACKWARD](*args)


@pytest.mark.parametrize("count", [1, 16, 17, 256, 5000])
def test_sort(count) -> None:
    func = aten.sort.stable
    for x in (torch.arange(count, dtype=torch.int16) % 4, torch.randn(3, count)):
        assert within(partial(func, stable=True), x) == ON_CPU[func](x, stable=True)


@pytest.mark.parametrize("repeats", [(2,), (1, 3), (1, 1, 2, 1), (2, 1, 2, 1, 1)], ids=str)
def test_repeat(repeats) -> None:
    x = torch.randn(3, 1, 2, 4, 5)[(0,) * (5 - len(repeats))]
    assert within(aten.repeat.default, x, repeats) == ON_CPU[aten.repeat.default](x, repeats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ends", [(2, 2, 6), (2, 3, 5)], ids=str)
def test_rows_of_no_expert_become_zero(ends, dtype) -> None:
    args = (torch.randn(6, 8, dtype=dtype), torch.randn(3, 8, 4, dtype=dtype), torch.tensor(ends, dtype=torch.int32))
    func = torch.ops.overlap.grouped_mm
    assert within(func, *args, ends[-1] == 6) == ON_CPU[func.default](*args, ends[-1] == 6)


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
