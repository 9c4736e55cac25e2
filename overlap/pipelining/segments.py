"""LiveSegments: how many recomputed segments of a rank have a graph at the same time."""

from __future__ import annotations

from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.pipelining.pipeline import Pipeline
from overlap.plan import segments_of


class LiveSegments:
    """Observer of a pipeline's steps.

    Args:
        pipeline: This rank's share. Layers are told apart by their number, so stages need no telling apart.

    Attributes:
        peak: Most segments whose graphs were alive at once, over all microbatches and stages.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._segment_of = {
            layer: segment.first
            for chunk in pipeline.chunks
            for segment in segments_of(chunk.program, chunk.configs(1)[0])
            for layer in segment.layers
        }
        self._live: dict[int, int] = {}
        self.peak = 0

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing to see before a slot."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Count the segments of this microbatch's graphs in this stage; the others did not change."""
        self._live[id(owner)] = len({self._segment_of[layer] for layer, _ in owner.tapes if layer in self._segment_of})
        self.peak = max(self.peak, sum(self._live.values()))
