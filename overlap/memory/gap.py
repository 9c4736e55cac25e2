"""Gap: which values each microbatch of a step keeps between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlap.chunk import ModelChunk, check_chunk
from overlap.ir import StageKey
from overlap.keeping import STORED
from overlap.lower import Issue, Key
from overlap.plan import Planner
from recompute.config import Keep, RecomputeConfig, check_count


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
        ConfigError: The chunk has a list of configs of another length, or there is no microbatch.
    """
    check_step(chunk, num_microbatches)
    trained = chunk.program.trained()
    return tuple(gap_of(chunk.planner, config, trained) for config in chunk.configs(num_microbatches))


def check_step(chunk: ModelChunk, num_microbatches: int) -> None:
    """Refuse what is no step of a chunk.

    Raises:
        ConfigError: There is no chunk, or no microbatch.
    """
    check_chunk(chunk)
    check_count("num_microbatches", num_microbatches, at_least=1)


def gap_of(planner: Planner, config: RecomputeConfig, trained: frozenset[StageKey]) -> Gap:
    """The gap of a microbatch that runs under `config`."""
    producers = planner.program.producers
    plain = {source.name for source in planner.program.inputs if not source.needs_grad}
    keys = planner.survivors(config, trained)
    pinned = frozenset(key for key in keys if key[0] in producers and key[0] in producers[key[0]].pins)
    copied = frozenset(name for name, _ in keys) & plain
    host = frozenset(key for key in keys if key[1] == STORED and config.keep is Keep.HOST)
    # Until it has left a stored input is on the device.
    near = {(name, 0) for name, kept in keys if kept == STORED}
    return Gap(segment_inputs=(keys - pinned - host) | near, pinned=pinned, host=host, copied=copied)


def slot_text(issue: Issue, number: int) -> str:
    """The issue's slot with the microbatch's number within the step in place of the plan's side."""
    return str(replace(issue.slot, microbatch=number))
