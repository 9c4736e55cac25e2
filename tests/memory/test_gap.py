"""What waits between forward and backward: the arguments of who asks."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.memory import MemoryRecorder, SegmentCounter, StorageTracker, footprints_of, gaps_of
from recompute import ConfigError
from tests.overlap.programs import tiny_chunk


@pytest.mark.parametrize("number", [None, 0, 2.0, "2", True])
def test_a_step_has_a_number_of_microbatches(number: Any) -> None:
    ask: Any
    for ask in (gaps_of, SegmentCounter):
        with pytest.raises(ConfigError, match=r"num_microbatches=.*: must be an integer of at least 1"):
            ask(tiny_chunk("M"), number)


def test_a_gap_is_of_a_chunk() -> None:
    module: Any = tiny_chunk("M").module
    ask: Any
    for ask in (gaps_of, SegmentCounter, footprints_of):
        with pytest.raises(ConfigError, match="must be a ModelChunk"):
            ask(module, 2)


def test_a_recorder_needs_a_tracker() -> None:
    tracker: Any = StorageTracker
    with pytest.raises(ConfigError, match=r"tracker=.*: must be a StorageTracker\(\)"):
        MemoryRecorder(tracker, ())
