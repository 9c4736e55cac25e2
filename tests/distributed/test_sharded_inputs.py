"""keep="sharded" on two ranks: each holds its part of every segment input, and no bit changes."""

from __future__ import annotations

from typing import Any

import torch

from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.lower import Issue
from overlap.memory import Bin, Usage, measure_step, predict
from overlap.model import Decoder, ModelConfig
from overlap.signature import comm_signature
from overlap.step import step_plans
from overlap.verify import verify
from recompute import Keep, RecomputeConfig
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
    return ModelChunk(Decoder(shape), recompute=config, shards=Sharded() if config is FAR else None)


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
        assert result["host_inputs"] == 0
        assert result["gathers"] == found[0]["gathers"]
        assert len(result["gathers"]) == 2 * LAYERS
