"""Graphs of one segment at a time."""

from __future__ import annotations

import pytest

from overlap.memory import SegmentCounter
from overlap.step import train_step
from recompute.config import Replay
from tests.memory.compare import block, none, uniform
from tests.overlap.programs import tiny_chunk, tiny_feeds


@pytest.mark.parametrize("order", ["plain", "multi_queue"])
@pytest.mark.parametrize("recompute", [uniform(1), uniform(2), uniform(8), block(2)], ids=str)
@pytest.mark.parametrize("delay_wgrad", [False, True])
def test_one_segment_is_live_just_in_time(recompute, order, delay_wgrad) -> None:
    chunk = tiny_chunk("DMMM", recompute=recompute, order=order, delay_wgrad=delay_wgrad)
    counter = SegmentCounter(chunk, 3)
    train_step(chunk, tiny_feeds(3), observers=(counter,))
    assert counter.peak == 1


def test_two_segments_are_live_if_replays_are_hidden() -> None:
    chunk = tiny_chunk("DMMM", recompute=uniform(1, replay=Replay.HIDDEN))
    counter = SegmentCounter(chunk, 3)
    train_step(chunk, tiny_feeds(3), observers=(counter,))
    assert counter.peak == 2


def test_without_recompute_there_is_none() -> None:
    chunk = tiny_chunk("MM", recompute=[none, uniform(1)])
    counter = SegmentCounter(chunk, 2)
    train_step(chunk, tiny_feeds(2), observers=(counter,))
    assert counter.peak == 1, "the second microbatch recomputes"
    chunk = tiny_chunk("MM")
    counter = SegmentCounter(chunk, 2)
    train_step(chunk, tiny_feeds(2), observers=(counter,))
    assert counter.peak == 0
