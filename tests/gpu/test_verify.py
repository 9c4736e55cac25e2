"""The overlapped step on real streams equals plain autograd bit for bit; each arm reproduces itself first."""

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, get_order, reference_step, train_step
from overlap.check import same_bits
from overlap.controls import CONTROLS, make_control
from overlap.dispatch import LocalTransport
from overlap.dispatch.host_loopback import HostLoopback
from overlap.model import Decoder, ModelConfig
from overlap.streams import StreamLanes
from overlap.verify import verify
from recompute import RecomputeConfig, Replay

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPE: dict[str, Any] = {
    "hidden": 128, "heads": 4, "kv_rank": 32, "nope_dim": 32, "rope_dim": 16, "value_dim": 32, "ffn_width": 256,
    "experts": 8, "topk": 2, "expert_width": 96, "shared_width": 96, "max_seq": 256,
}  # fmt: skip
RULES = {
    "none": RecomputeConfig.none(),
    "uniform1": RecomputeConfig.uniform(1),
    "uniform2": RecomputeConfig.uniform(2),
    "block2": RecomputeConfig.block(2),
    "uniform1-hidden": RecomputeConfig.uniform(1, replay=Replay.HIDDEN),
    "uniform2-hidden": RecomputeConfig.uniform(2, replay=Replay.HIDDEN),
    "block3-hidden": RecomputeConfig.block(3, replay=Replay.HIDDEN),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.0, "jitter": 0.05},
    "dense": {"dense_layers": 2},
    "tied": {"tied": True},
    "one-expert": {"experts": 1, "topk": 1},
    "idle-experts": {"experts": 64, "topk": 1},
    "mtp1": {"mtp": 1},
    "mtp2-mhc4": {"mtp": 2, "mhc": 4},
}


def make_chunk(
    config: ModelConfig, rule: RecomputeConfig, order: str, *, loopback: bool, delay: bool, lead: int = 0
) -> ModelChunk:
    transport = HostLoopback() if loopback else LocalTransport()
    return ModelChunk(
        Decoder(config, transport=transport, seed=0).to(DEVICE),
        recompute=rule,
        order=get_order(order, rule.replay),
        delay_wgrad=delay,
        lead=lead,
        lanes=StreamLanes(DEVICE),
    )


def batches(config: ModelConfig, steps: int = 2, microbatches: int = 4) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab, (2, 65), generator=generator).to(DEVICE)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [[draw() for _ in range(microbatches)] for _ in range(steps)]


def gradients(step: Any, chunk: ModelChunk, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    chunk = copy.deepcopy(chunk)
    step(chunk, data)
    return {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("step", [reference_step, train_step])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_arm_reproduces_itself(step, dtype):
    config = ModelConfig(layers=4, dtype=dtype, dropout=0.1, **SHAPE)
    chunk = make_chunk(config, RULES["uniform1"], "multi_queue", loopback=True, delay=False)
    data = batches(config)[0]
    first, second = (gradients(step, chunk, data) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(same_bits(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("order", ["multi_queue", "single_queue"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_to_the_reference(variant, rule, order, dtype):
    config = ModelConfig(layers=5, dtype=dtype, **{**SHAPE, **VARIANTS[variant]})
    delay = rule != "none" and order == "single_queue"
    chunk = make_chunk(config, RULES[rule], order, loopback=True, delay=delay)
    verdict = verify(chunk, batches(config))
    assert verdict.equal, verdict
    assert verdict.max_live_segments <= (2 if "hidden" in rule else 1)


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_differ(name):
    settings = {"mtp": 1, "mhc": 2} if name in {"drop_bridge", "skip_snapshot"} else {}
    config = ModelConfig(layers=5, dtype="bfloat16", dropout=0.1, **{**SHAPE, **settings})
    chunk = make_chunk(config, RULES["uniform2"], "multi_queue", loopback=True, delay=False)
    control = make_control(name, chunk, 4)
    assert not verify(chunk, batches(config), engine_type=control.engine_type).equal


class LateComm(StreamLanes):
    """Puts a long sleep on the communication stream before each of its issues."""

    def begin(self, issue, owner):
        super().begin(issue, owner)
        if issue.lane.value == "comm":
            torch.cuda._sleep(2_000_000)


class LateCompute(StreamLanes):
    """Puts a long sleep on the compute stream before each of its issues: communication runs far ahead."""

    def begin(self, issue, owner):
        super().begin(issue, owner)
        if issue.lane.value == "compute":
            torch.cuda._sleep(500_000)


@pytest.mark.parametrize(
    ("lanes", "rule", "delay", "more"),
    [
        *itertools.product([LateComm, LateCompute], ["none", "uniform1", "uniform2-hidden"], [False, True], [{}]),
        (LateCompute, "uniform2-hidden", True, {"mtp": 1, "mhc": 4}),
    ],
)
def test_a_late_lane_changes_nothing(lanes, rule, delay, more):
    """Poisoned allocator (unwritten memory is NaN) and one stream that lags: a race would show (B19, B22)."""
    config = ModelConfig(layers=4, dtype="bfloat16", **SHAPE, **more)
    chunk = make_chunk(config, RULES[rule], "multi_queue", loopback=True, delay=delay)
    chunk.lanes = lanes(DEVICE)
    assert verify(chunk, batches(config)).equal


@pytest.mark.parametrize("lead", [1, 3, 5])
@pytest.mark.parametrize("rule", ["none", "uniform1", "uniform2-hidden"])
@pytest.mark.parametrize("lanes", [StreamLanes, LateComm, LateCompute])
def test_a_lead_changes_nothing(lanes, rule, lead):
    config = ModelConfig(layers=4, dtype="bfloat16", mtp=1, dropout=0.1, **SHAPE)
    chunk = make_chunk(config, RULES[rule], "single_queue", loopback=True, delay=True, lead=lead)
    chunk.lanes = lanes(DEVICE)
    assert verify(chunk, batches(config)).equal


class CarelessLanes(LateCompute):
    """Control: holds nothing that crosses lanes."""

    def _hold(self, home, user, value):
        return


def test_control_without_holding_differs():
    config = ModelConfig(layers=4, dtype="bfloat16", **SHAPE)
    chunk = make_chunk(config, RULES["none"], "multi_queue", loopback=True, delay=False)
    chunk.lanes = CarelessLanes(DEVICE)
    assert not verify(chunk, batches(config)).equal


class DeafLanes(LateComm):
    """Control: never waits."""

    def begin(self, issue, owner):
        super().begin(dataclasses.replace(issue, waits=()), owner)


def test_control_without_waits_differs():
    config = ModelConfig(layers=4, dtype="bfloat16", **SHAPE)
    chunk = make_chunk(config, RULES["uniform1"], "multi_queue", loopback=True, delay=False)
    chunk.lanes = DeafLanes(DEVICE)
    assert not verify(chunk, batches(config)).equal
