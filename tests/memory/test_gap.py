"""What waits between forward and backward: the arguments of who asks."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.memory import gaps_of
from recompute import ConfigError
from tests.overlap.programs import tiny_chunk


@pytest.mark.parametrize("number", [None, 0, 2.0, "2", True])
def test_a_step_has_a_number_of_microbatches(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_microbatches=.*: must be an integer of at least 1"):
        gaps_of(tiny_chunk("M"), number)


def test_a_gap_is_of_a_chunk() -> None:
    module: Any = tiny_chunk("M").module
    with pytest.raises(ConfigError, match="must be a ModelChunk"):
        gaps_of(module, 2)
