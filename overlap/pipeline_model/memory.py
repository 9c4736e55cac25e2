"""memory: what each rank holds at most, following its steps in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.pipeline_model.actions import BACKWARDS, Action, PipelineSchedule, Step, Work
from overlap.pipeline_model.layout import ChunkHolds, Held

_NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that a rank holds; each number is a peak of its own."""

    inflight: int
    """(Virtual stage, microbatch) pairs between forward and the end of backward."""
    segment_inputs: int
    layer_activations: int
    bytes: int
    """Of both together, by what one of each takes."""


def peaks(
    schedule: PipelineSchedule, holds: Sequence[ChunkHolds], *, input_bytes: int = 0, activation_bytes: int = 0
) -> tuple[Peak, ...]:
    """The peak of each rank.

    Args:
        schedule: What runs.
        holds: Of each virtual stage.
        input_bytes: Bytes of a segment's input.
        activation_bytes: Bytes of what one layer's backward needs.
    """
    walks = [_Walk(holds, input_bytes, activation_bytes) for _ in schedule.ranks]
    for walk, steps in zip(walks, schedule.ranks, strict=True):
        for step in steps:
            walk.step(step)
    return tuple(walk.peak() for walk in walks)


class _Walk:
    """One rank's steps."""

    def __init__(self, holds: Sequence[ChunkHolds], input_bytes: int, activation_bytes: int) -> None:
        self._holds = holds
        self._input_bytes, self._activation_bytes = input_bytes, activation_bytes
        self._held = _NOTHING
        self._inflight = 0
        self._most = (0, 0, 0, 0)

    def step(self, step: Step) -> None:
        """Hold what the step's actions make at once, then let go what they used up."""
        for action in step:
            if action.work is Work.FORWARD:
                self._inflight += 1
                self._held += self._holds[action.stage].gap
        replayed = [self._holds[action.stage].replayed for action in step if action.work in BACKWARDS]
        self._note(sum(replayed, self._held))
        for action in step:
            self._end(action)
        self._note(self._held)

    def _end(self, action: Action) -> None:
        holds = self._holds[action.stage]
        if action.work is Work.INPUT:
            self._held += holds.pending + -holds.gap
        elif action.work in (Work.BACKWARD, Work.WGRAD):
            self._inflight -= 1
            self._held += -(holds.gap if action.work is Work.BACKWARD else holds.pending)

    def _note(self, held: Held) -> None:
        size = held.segment_inputs * self._input_bytes + held.layer_activations * self._activation_bytes
        now = (self._inflight, held.segment_inputs, held.layer_activations, size)
        self._most = tuple(map(max, self._most, now))  # type: ignore[assignment]

    def peak(self) -> Peak:
        """The most so far."""
        inflight, inputs, activations, size = self._most
        return Peak(inflight=inflight, segment_inputs=inputs, layer_activations=activations, bytes=size)
