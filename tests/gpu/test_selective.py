"""Selective recompute and segment inputs in host memory on real streams: the same bits, less memory, no race."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from overlap.ir import Lane
from overlap.model import ModelConfig
from overlap.step import train_step
from overlap.streams import StreamLanes
from overlap.verify import verify
from recompute import Keep, RecomputeConfig, RecomputeModule
from tests.gpu.test_verify import DEVICE, SHAPE, batches, make_chunk

pytestmark = pytest.mark.gpu

INNER = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
RULES = {
    **{module.value: RecomputeConfig.selective(module) for module in RecomputeModule},
    "stages": RecomputeConfig.selective("attn", "experts", "shared_experts"),
    "parts": RecomputeConfig.selective(*INNER, "shared_experts"),
    "block2-hidden": RecomputeConfig(
        granularity="selective", method="block", num_layers=2, modules=INNER, replay="hidden"
    ),
    "uniform1-host": RecomputeConfig.uniform(1, keep=Keep.HOST),
    "uniform2-hidden-host": RecomputeConfig.uniform(2, replay="hidden", keep=Keep.HOST),
    "stages-host": RecomputeConfig.selective("attn", "experts", keep=Keep.HOST),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_equal_to_the_reference(rule: str, delay: bool, dtype: str) -> None:
    config = ModelConfig(layers=4, dtype=dtype, dropout=0.1, mtp=1, **SHAPE)
    chunk = make_chunk(config, RULES[rule], "multi_queue", loopback=True, delay=delay)
    verdict = verify(chunk, batches(config))
    assert verdict.equal, verdict


@pytest.mark.parametrize("rule", ["core_attn", "parts"])
def test_attention_dropout_is_drawn_again(rule: str) -> None:
    config = ModelConfig(layers=3, dtype="bfloat16", attention_dropout=0.2, **SHAPE)
    chunk = make_chunk(config, RULES[rule], "multi_queue", loopback=False, delay=False)
    assert verify(chunk, batches(config)).equal


class LateCopy(StreamLanes):
    """Puts a long sleep on the copy stream before each of its issues."""

    cycles = 2_000_000

    def begin(self, issue: Any, owner: Any) -> None:
        super().begin(issue, owner)
        if issue.lane is Lane.COPY:
            torch.cuda._sleep(self.cycles)


class LateCompute(StreamLanes):
    """The same on the compute stream: copies run far ahead."""

    def begin(self, issue: Any, owner: Any) -> None:
        super().begin(issue, owner)
        if issue.lane is Lane.COMPUTE:
            torch.cuda._sleep(500_000)


class Deaf(LateCopy):
    """Control: replays do not wait for what returns; it is later than any host is between two slots."""

    cycles = 30_000_000

    def begin(self, issue: Any, owner: Any) -> None:
        heard = tuple(event for event in issue.waits if event[0].value != "L")
        super().begin(dataclasses.replace(issue, waits=heard), owner)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("rule", ["uniform1-host", "uniform2-hidden-host", "stages-host"])
@pytest.mark.parametrize("lanes", [LateCopy, LateCompute])
def test_a_late_lane_changes_nothing(lanes: type[StreamLanes], rule: str, delay: bool) -> None:
    """Poisoned allocator: memory given out before a copy has read or written it would show."""
    config = ModelConfig(layers=4, dtype="bfloat16", **SHAPE)
    chunk = make_chunk(config, RULES[rule], "multi_queue", loopback=True, delay=delay)
    chunk.lanes = lanes(DEVICE)
    assert verify(chunk, batches(config)).equal


def test_control_without_waits_differs() -> None:
    config = ModelConfig(layers=4, dtype="bfloat16", **SHAPE)
    chunk = make_chunk(config, RULES["uniform1-host"], "multi_queue", loopback=True, delay=False)
    chunk.lanes = Deaf(DEVICE)
    assert not verify(chunk, batches(config)).equal


def peak(rule: RecomputeConfig, layers: int) -> int:
    """Bytes of one step above what is there before it, the second time round."""
    shape = {**SHAPE, "experts": 2, "expert_width": 16, "shared_width": 16}
    config = ModelConfig(layers=layers, dtype="bfloat16", **shape)
    chunk = make_chunk(config, rule, "multi_queue", loopback=False, delay=False)
    data = batches(config, steps=1)[0]
    train_step(chunk, data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_step(chunk, data)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_host_inputs_leave_the_device() -> None:
    """A layer more costs its input (128 tokens of width 128, bfloat16) on the device, or nearly nothing there."""
    size = 2 * 64 * 128 * 2
    near = peak(RecomputeConfig.uniform(1), 24) - peak(RecomputeConfig.uniform(1), 8)
    far = peak(RULES["uniform1-host"], 24) - peak(RULES["uniform1-host"], 8)
    assert near - far >= 12 * size
