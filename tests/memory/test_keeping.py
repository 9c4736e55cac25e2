"""Bytes of segment inputs that wait in host memory: on the device there is only what is on its way."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.memory import Bin, Usage, measure_step
from recompute import Keep, RecomputeConfig
from tests.memory.compare import assert_exact, decoder, tokens

HIDDEN_BYTES = 2 * 6 * 16 * 4
"""Of one segment input: 2 sequences of 6 positions, width 16, float32."""


def measured(keep: Keep, layers: int, **settings: Any) -> Usage:
    shape = {"layers": layers, "dense_layers": layers}
    return measure_step(decoder(RecomputeConfig.uniform(1, keep=keep, **settings), **shape), tokens(2)).usage


@pytest.mark.parametrize("replay", ["just_in_time", "hidden"])
def test_device_bytes_do_not_grow_with_layers(replay: str) -> None:
    """All inputs of two microbatches against what is on its way; what is elsewhere grows instead."""
    near = {layers: measured(Keep.DEVICE, layers, replay=replay).peaks.bins for layers in (4, 6)}
    far = {layers: measured(Keep.HOST, layers, replay=replay).peaks.bins for layers in (4, 6)}
    # Of the microbatch behind all inputs but one are still there when the one ahead has made its first.
    assert [near[n][Bin.SEGMENT_INPUTS] for n in near] == [5 * HIDDEN_BYTES, 7 * HIDDEN_BYTES]
    assert [far[n][Bin.SEGMENT_INPUTS] for n in far] == [2 * HIDDEN_BYTES] * 2
    assert [far[n][Bin.HOST_INPUTS] for n in far] == [5 * HIDDEN_BYTES, 7 * HIDDEN_BYTES]
    assert all(near[n][Bin.HOST_INPUTS] == 0 for n in near)
    # What is back belongs to the segments that are live or next.
    back = {"just_in_time": 2, "hidden": 3}[replay] * HIDDEN_BYTES
    assert [far[n][Bin.LIVE_SEGMENT] - near[n][Bin.LIVE_SEGMENT] for n in far] == [back] * 2


def test_totals_are_the_device_s() -> None:
    usage = measured(Keep.HOST, 5)
    assert usage.total < measured(Keep.DEVICE, 5).total
    for border in usage.curve:
        assert border.total == sum(border.bytes[kind] for kind in Bin if kind is not Bin.HOST_INPUTS)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (RecomputeConfig.uniform(1, keep=Keep.HOST), {"delay_wgrad": True, "mtp": 1, "layers": 1}),
        (RecomputeConfig.selective("attn", "experts", keep=Keep.HOST), {"dtype": "bfloat16"}),
    ],
)
def test_predicted_is_measured(config: RecomputeConfig, shape: dict) -> None:
    assert_exact(lambda: decoder(config, **{"layers": 2, **shape}), tokens(2))
