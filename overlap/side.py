"""One microbatch's part in a schedule: its program and what of it is recomputed.

A schedule of a layer pair has two sides, keyed by the microbatch number of their slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from overlap.ir import WEIGHTS, Op, Program, Schedule, Stage, StageKey
from recompute.config import Keep
from recompute.modules import RecomputeModule
from recompute.segments import RecomputeSegment


@dataclass(frozen=True, eq=False)
class Side:
    """A model chunk as one microbatch runs it."""

    program: Program
    segments: tuple[RecomputeSegment, ...]
    trained: frozenset[StageKey]
    """Program.trained() when the plan was made: stages, and shared parameters by their gradient_key."""
    keeps_graph: bool = True
    """False: forward only, nothing is kept for a backward (R17)."""
    hidden: bool = False
    """Whether replays are spread between the slots of the layers before (R10), not issued just in time."""
    alone: tuple[StageKey, ...] = ()
    """Stages outside `segments` that are recomputed each by itself, just in time, in program order."""
    parts: Mapping[StageKey, frozenset[RecomputeModule]] = field(default_factory=dict)
    """Per stage, what it rebuilds inside its own backward."""
    keep: Keep = Keep.DEVICE
    """Where the inputs of segments wait for their replay."""
    skips: int = 0
    """Leading layers whose first pass an earlier plan runs, with the chunk's stages before them."""
    stops: int | None = None
    """Layers after which the first pass stops, for a later plan to go on; None: it runs to the end."""

    @cached_property
    def passes(self) -> frozenset[StageKey]:
        """Stages whose first pass a plan runs in which this side runs forward."""
        program = self.program
        stages = [] if self.skips else [*program.prologue]
        stages += [s for layer in program.layers[self.skips : self.stops] for s in program.layer_stages[layer]]
        stages += program.epilogue if self.stops is None else ()
        return frozenset(stage.key for stage in stages)

    @cached_property
    def segment_of(self) -> dict[int, int]:
        """Index of the segment that each recomputed layer belongs to."""
        return {layer: index for index, segment in enumerate(self.segments) for layer in segment.layers}

    def segment(self, stage: Stage) -> int | None:
        """Index of the stage's segment, those of single stages behind the others; None: it runs eagerly."""
        if stage.layer is None:
            return None
        return self._alone.get(stage.key, self.segment_of.get(stage.layer))

    def stages(self, segment: int) -> list[Stage]:
        """The stages of a segment, in program order."""
        if segment >= len(self.segments):
            return [self.program.by_key[self.alone[segment - len(self.segments)]]]
        return [s for layer in self.segments[segment].layers for s in self.program.layer_stages[layer]]

    @cached_property
    def _alone(self) -> dict[StageKey, int]:
        return {key: len(self.segments) + place for place, key in enumerate(self.alone)}

    def together(self, value: str, reader: Stage) -> bool:
        """Whether a value is written in its reader's own segment."""
        producer = self.program.producers.get(value)
        return producer is not None and self.segment(producer) == self.segment(reader)

    @cached_property
    def stored(self) -> tuple[str, ...]:
        """Segment inputs that wait elsewhere than on the device; see overlap.keeping."""
        if self.keep is Keep.DEVICE:
            return ()
        program = self.program
        replays = [stage for stage in program.stages if stage.key in self.replay_needed]
        values = dict.fromkeys(v for stage in replays for v in stage.reads if not self.together(v, stage))
        return tuple(value for value in values if value in program.producers and not self._stays(value))

    def _stays(self, value: str) -> bool:
        """Whether a written value stays on the device anyway: a parameter, a pinned value, one that a graph keeps."""
        producer = self.program.producers[value]
        graphs = [reader for reader in self.program.readers[value] if self.first_pass(reader) is Op.FORWARD]
        kept = any(self.needs_activations(reader) for reader in graphs)
        return kept or producer.key == (None, WEIGHTS) or value in producer.pins

    def first_pass(self, stage: Stage) -> Op:
        """N inside a segment, F elsewhere; N everywhere when no backward follows."""
        return Op.FORWARD if self.keeps_graph and self.segment(stage) is None else Op.NO_GRAD

    def needs_grad(self, value: str) -> bool:
        """Whether backward brings this value a gradient."""
        if self.program.nondiff(value):
            return False
        return value not in self.program.producers or self.program.gradient_key(value) in self.trained

    def needs_activations(self, stage: Stage) -> bool:
        """Whether the stage's backward needs its graph: it trains and has no adjoint (R8)."""
        return stage.key in self.trained and stage.adjoint is None

    @cached_property
    def replay_needed(self) -> frozenset[StageKey]:
        """Stages of segments that backward needs replayed: those that need activations and those that feed them."""
        needed: set[StageKey] = set()
        for stage in reversed(self.program.stages):
            segment = self.segment(stage)
            if segment is None:
                continue
            feeds_replay = any(
                reader.key in needed and self.segment(reader) == segment
                for value in stage.writes
                if value not in stage.pins
                for reader in self.program.readers[value]
            )
            if self.needs_activations(stage) or feeds_replay:
                needed.add(stage.key)
        return frozenset(needed)


Sides = Mapping[int, Side]
"""The sides of a schedule, by microbatch number."""


def stages_of(schedule: Schedule, sides: Sides) -> list[Stage]:
    """The stage of each slot."""
    return [sides[slot.microbatch].program.by_key[slot.key] for slot in schedule]
