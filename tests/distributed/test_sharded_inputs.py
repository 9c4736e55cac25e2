"""keep="sharded" on two ranks: each holds its part of every segment input, and no bit changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Program
from overlap.lower import Issue
from overlap.memory import (
    Bin,
    Usage,
    fake_chunk,
    footprints_of,
    gaps_of,
    measure_peak,
    measure_step,
    predict,
    predict_peak,
)
from overlap.memory.predict import Walk
from overlap.model import Decoder, ModelConfig
from overlap.signature import comm_signature
from overlap.step import step_plans
from overlap.verify import verify
from recompute import Keep, RecomputeConfig, Replay
from recompute.keep import Sharded
from tests.distributed.ranks import RankPool
from tests.overlap.test_selective import feeds

LAYERS = 5
NEAR, FAR = (RecomputeConfig.uniform(1, keep=keep) for keep in (Keep.DEVICE, Keep.SHARDED))


class Swapped(Engine):
    """Control: one rank's parts are thrown away."""

    def _store(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._store(issue, owner)
        for key in issue.writes:
            if key is not None and torch.distributed.get_rank() == 1:
                owner.values[key].kept.zero_()


def build(config: RecomputeConfig) -> ModelChunk:
    # 7 tokens of width 15 make parts of unequal length.
    shape = ModelConfig(vocab=17, layers=LAYERS, hidden=15, kv_rank=8, dense_layers=LAYERS, dropout=0.1)
    return ModelChunk(Decoder(shape), recompute=config, shards=Sharded() if config.keep is Keep.SHARDED else None)


def inputs(usage: Usage) -> list[int]:
    return [border.bytes[Bin.SEGMENT_INPUTS] for border in usage.curve]


def on_rank() -> dict[str, Any]:
    data = feeds()
    near, far = (measure_step(build(config), data).usage for config in (NEAR, FAR))
    chunk = build(FAR)
    return {
        "equal": verify(chunk, [data]).equal,
        "control": verify(chunk, [data], engine_type=Swapped).gradients.different,
        # gloo's own thread lets go of what it gathered from a little later, so other kinds may hold one part more.
        "exact": inputs(predict(lambda: build(FAR), data).usage) == inputs(far),
        "segment_inputs": (near.peaks.bins[Bin.SEGMENT_INPUTS], far.peaks.bins[Bin.SEGMENT_INPUTS]),
        "live_segment": (near.peaks.bins[Bin.LIVE_SEGMENT], far.peaks.bins[Bin.LIVE_SEGMENT]),
        "host_inputs": far.peaks.bins[Bin.HOST_INPUTS],
        "gathers": [slot for slot in comm_signature(step_plans(chunk, 2)) if slot.startswith("L")],
    }


def test_parts_are_gathered_before_the_replay(ranks: RankPool) -> None:
    found = ranks(2, on_rank)
    for result in found:
        assert result["equal"]
        assert result["control"]
        assert result["exact"]
        near, far = result["segment_inputs"]
        assert far < near
        print("ZZZ", near, far, result["live_segment"])
        assert result["host_inputs"] == 0
        assert result["gathers"] == found[0]["gathers"]
        assert len(result["gathers"]) == 2 * LAYERS


WIDE = 40_001
"""Elements of a mask that a layer reads: odd, so that parts are padded."""


class Masked(nn.Module):
    """Layers whose inputs are mostly a mask: what a gather takes is then the highest point of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(3) for _ in range(3))

    def program(self) -> Program:
        b = ProgramBuilder()
        state = b.input("x")
        (mask,) = b.compute("embed", _mask, state, outputs=(), nondiff=("mask",))
        for layer, scale in enumerate(self.scales):
            with b.layer(layer):
                state, mask = b.compute(
                    "attn", partial(_apply, scale), state, mask, outputs=("y",), nondiff=("mask",), parameters=(scale,)
                )
        b.loss(state)
        return b.build()


def _apply(scale: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * scale).sum() * mask[:3].sum(), _mask(x)


def _mask(x: torch.Tensor) -> torch.Tensor:
    return x.detach().new_ones(WIDE)


def build_masked(config: RecomputeConfig) -> ModelChunk:
    return ModelChunk(Masked(), recompute=config, shards=Sharded() if config.keep is Keep.SHARDED else None)


def peaks_on_rank() -> list[tuple[str, int, int, int]]:
    """Per case the slot of the predicted peak, its bytes, the measured ones, and the peak without a gather's own."""
    found = []
    for model, config, data in CASES:
        make = partial(model, config)
        predicted, measured = predict_peak(make, data()), measure_peak(make(), data())
        with fake_chunk(make) as chunk:
            walk = Walk(footprints_of(chunk, data(), constants=True), gaps_of(chunk, len(data())), delayed=False,
                        ranks=2, host=False)  # fmt: skip
            walk.run(step_plans(chunk, len(data())))
        found.append((predicted.slot, predicted.bytes, measured, max(top.bytes for top in walk.tops)))
    return found


def masked_feeds() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(3)}] * 2


CASES = (
    (build, FAR, feeds),
    (build, RecomputeConfig.uniform(2, keep=Keep.SHARDED, replay=Replay.HIDDEN), feeds),
    (build_masked, FAR, masked_feeds),
)


def test_the_oracle_s_peak_is_the_allocator_s(ranks: RankPool) -> None:
    for found in ranks(2, peaks_on_rank):
        for slot, predicted, measured, _ in found:
            assert predicted == measured, slot
        # Control: the gather's own copy is part of it.
        slot, predicted, _, without = found[-1]
        assert slot.startswith("L")
        assert without < predicted
