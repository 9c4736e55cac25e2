"""SegmentCounter: how many recomputed segments have a graph at the same time."""

from __future__ import annotations

from overlap.chunk import ModelChunk
from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.memory.gap import check_step


class SegmentCounter:
    """Observer of one step.

    Args:
        chunk: Its configs say which layer of which microbatch is in which segment.
        num_microbatches: Of the step.

    Raises:
        ConfigError: There is no chunk, or no microbatch.

    Attributes:
        peak: Most segments whose graphs were alive at once, over all microbatches; 0 if nothing is recomputed.
    """

    def __init__(self, chunk: ModelChunk, num_microbatches: int) -> None:
        check_step(chunk, num_microbatches)
        trained = chunk.program.trained()
        configs = chunk.configs(num_microbatches)
        self._segment_of = [chunk.planner.side(config, trained).segment_of for config in configs]
        self._live: dict[int, int] = {}
        self.peak = 0

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing to see before a slot."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Count the segments of this microbatch's graphs; those of the others did not change."""
        segment_of = self._segment_of[owner.number]
        self._live[owner.number] = len(
            {segment_of[layer] for layer, _ in owner.tapes if layer is not None and layer in segment_of}
        )
        self.peak = max(self.peak, sum(self._live.values()))
