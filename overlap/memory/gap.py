"""Gap: which values each microbatch of a step keeps between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlap.chunk import ModelChunk
from overlap.keeping import LOADED, STORED
from overlap.lower import Issue, Key
from recompute.config import Keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What one microbatch keeps of its first pass for its backward, beside graphs (R2)."""

    segment_inputs: frozenset[Key]
    pinned: frozenset[Key]
    host: frozenset[Key]
    """Segment inputs that wait in host memory."""
    copied: frozenset[str]
    """Feeds among the segment inputs: the step copies them, so that a replay reads what the first pass read."""


def gaps_of(chunk: ModelChunk, num_microbatches: int) -> tuple[Gap, ...]:
    """The gap of each microbatch of a step, from its own recompute config.

    Raises:
        ConfigError: The chunk has a list of configs of another length.
    """
    trained = chunk.program.trained()
    producers = chunk.program.producers
    plain = {source.name for source in chunk.program.inputs if not source.needs_grad}
    gaps = []
    for config in chunk.configs(num_microbatches):
        keys = chunk.planner.survivors(config, trained)
        pinned = frozenset(key for key in keys if key[0] in producers and key[0] in producers[key[0]].pins)
        copied = frozenset(name for name, _ in keys) & plain
        host = frozenset(key for key in keys if key[1] == STORED and config.keep is Keep.HOST)
        # Before it leaves and when it is back a stored input is on the device.
        near = {(name, copy) for name, kept in keys if kept == STORED for copy in (0, LOADED)}
        gaps.append(Gap(segment_inputs=(keys - pinned - host) | near, pinned=pinned, host=host, copied=copied))
    return tuple(gaps)


def slot_text(issue: Issue, number: int) -> str:
    """The issue's slot with the microbatch's number within the step in place of the plan's side."""
    return str(replace(issue.slot, microbatch=number))
