"""SegmentCounter: how many recomputed segments have a graph at the same time."""

from __future__ import annotations

from overlap.chunk import ModelChunk
from overlap.engine import MicrobatchState
from overlap.ir import Op
from overlap.lower import Issue
from overlap.plan import segments_of
from recompute.config import RecomputeConfig


class SegmentCounter:
    """Observer of a step; `peak` is the most segments that had a replayed graph at once."""

    def __init__(self, chunk: ModelChunk) -> None:
        self.peak = 0
        self._live: dict[tuple[int, int], set[tuple[int | None, str]]] = {}
        configs = [chunk.recompute] if isinstance(chunk.recompute, RecomputeConfig) else chunk.recompute
        self._segment_of = [
            {layer: index for index, segment in enumerate(segments_of(chunk.program, config)) for layer in segment.layers}
            for config in configs
        ]

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Nothing changes before an issue runs."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Count the graphs that a replay made and a backward used up."""
        layer = issue.stage.layer
        if layer is None or issue.slot.op not in (Op.REPLAY, Op.BACKWARD):
            return
        segment = self._segment_of[owner.number % len(self._segment_of)].get(layer)
        if segment is None:
            return
        graphs = self._live.setdefault((owner.number, segment), set())
        if issue.slot.op is Op.REPLAY and issue.records:
            graphs.add(issue.stage.key)
        elif issue.slot.op is Op.BACKWARD:
            graphs.discard(issue.stage.key)
        if not graphs:
            del self._live[owner.number, segment]
        self.peak = max(self.peak, len(self._live))
