"""keep="sharded" on two ranks: each holds its part of every segment input, and no bit changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
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
)
from overlap.memory.oracle import highest_of
from overlap.memory.predict import Walk
from overlap.model import Decoder, ModelConfig
from overlap.pipelining import ScheduleKind, train_pipeline
from overlap.pipelining.verify import merge_embedding
from overlap.reference import reference_step
from overlap.signature import comm_signature
from overlap.step import step_plans
from overlap.verify import verify
from recompute import Keep, RecomputeConfig, Replay
from recompute.keep import Sharded
from tests.distributed.ranks import RankPool
from tests.overlap.test_selective import feeds
from tests.pipelining.models import batch, different, make_pipeline, make_reference, small

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
        # The inputs of two segments are back at most, whole again: 210 elements each in the sum of 3 * 5.
        kept, back = result["live_segment"]
        assert back - kept == 2 * 720
        assert result["host_inputs"] == 0
        assert result["gathers"] == found[0]["gathers"]
        assert len(result["gathers"]) == 2 * LAYERS


RULES = (FAR, RecomputeConfig.uniform(2, keep=Keep.SHARDED, replay=Replay.HIDDEN))


def peaks_on_rank() -> list[tuple[int, int, int]]:
    """Per rule the predicted peak, the measured one, and what is predicted if nothing were cut."""
    data = feeds()
    found = []
    for rule in RULES:
        make = partial(build, rule)
        with fake_chunk(make) as chunk:
            footprints = footprints_of(chunk, data, constants=True)
            predicted = highest_of(chunk, footprints)
            uncut = Walk(footprints, gaps_of(chunk, len(data)), delayed=False, ranks=1)
            uncut.run(step_plans(chunk, len(data)))
        found.append((predicted.bytes, measure_peak(make(), data), max(top.bytes for top in uncut.tops)))
    return found


def test_the_oracle_s_peak_is_the_allocator_s(ranks: RankPool) -> None:
    for found in ranks(2, peaks_on_rank):
        for predicted, measured, uncut in found:
            assert predicted == measured < uncut


def pipeline_on_rank(kind: ScheduleKind) -> tuple[list[str], list[str]]:
    """Two pipeline ranks times two that hold the same; what differs from autograd, also under the control."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([first, first + 2]) for first in (0, 1)]
    same = [dist.new_group([first, first + 1]) for first in (0, 2)]
    config = small(layers=4, mtp=1)
    reference = make_reference(kind, config, NEAR, stages=4)
    data = batch(config, 4)
    expected = reference_step(reference, data)
    merge_embedding(reference)
    pipeline = make_pipeline(kind, config, FAR, group=pipelines[rank % 2], shards=Sharded(same[rank // 2]))
    equal = different(pipeline, reference, train_pipeline(pipeline, data), expected)
    for chunk in pipeline.chunks:
        chunk.zero_grad()
    return equal, different(pipeline, reference, train_pipeline(pipeline, data, engine_type=Swapped), expected)


def test_a_pipeline_of_ranks_that_hold_the_same_inputs(ranks: RankPool) -> None:
    for equal, control in ranks(4, pipeline_on_rank, ScheduleKind.ZBV):
        assert equal == []
        assert control
