"""profile_step: one training step's memory three ways (measured, predicted, formula), and the engine's host cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from overlap.check import check_stages
from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds
from overlap.memory.bins import Peaks, Usage
from overlap.memory.fake import fake_chunk, zero_gradients
from overlap.memory.formula import formula
from overlap.memory.gap import gaps_of
from overlap.memory.host_cost import HostCost, measure_host_cost
from overlap.memory.predict import footprints_of, predict_step
from overlap.memory.recorder import MemoryRecorder
from overlap.memory.tracker import StorageTracker
from overlap.step import train_step
from overlap.step_feeds import check_feeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real step held."""

    usage: Usage
    in_slot_peak: int
    """Bytes; see Profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step will hold, from a dry run without data."""

    usage: Usage
    formula: Peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Memory of one training step, in bytes, and host time.

    Counted at slot borders. Feeds, parameters, their `.grad`, buffers and what kernels allocate within themselves are
    left out.
    """

    measured: Usage
    """A real step."""
    predicted: Usage
    """The lowered plans, walked with the facts of a dry run on fake tensors; equal to `measured`."""
    formula: Peaks
    """For orientation."""
    in_slot_peak: int
    """Highest live bytes inside any slot, the stage's own temporaries included; measured only."""
    host: HostCost
    """The engine's own time, on trivial stages."""

    @property
    def curve(self) -> list[tuple[str, dict[str, int]]]:
        """Measured bytes by kind at the end of every slot, in issue order."""
        return [(b.slot, {kind.value: nbytes for kind, nbytes in b.bytes.items()}) for b in self.measured.curve]

    def as_json(self) -> dict[str, Any]:
        """Peaks by column and kind (`total` among them), `in_slot_peak` and `host`; the curve is left out."""
        return {
            "measured": self.measured.as_json(),
            "predicted": self.predicted.as_json(),
            "formula": self.formula.as_json(),
            "in_slot_peak": self.in_slot_peak,
            "host": self.host.as_json(),
        }


def profile_step(build: Callable[[], ModelChunk], microbatches: Sequence[Feeds]) -> Profile:
    """Measure and predict one training step.

    Args:
        build: Makes the chunk. Called twice, the second time under FakeTensorMode: it must not look at tensor data.
        microbatches: The step's feeds.

    Raises:
        ConfigError: The microbatches do not feed the program.
        ProgramError: A stage does not do what it declares, or keeps memory that no table of the engine holds.
    """
    measured = measure_step(build(), microbatches)
    forecast = predict(build, microbatches)
    return Profile(
        measured=measured.usage,
        predicted=forecast.usage,
        formula=forecast.formula,
        in_slot_peak=measured.in_slot_peak,
        host=_host_cost(),
    )


def measure_step(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> Measured:
    """Run one training step and count; the chunk's gradients are set to zero first and then hold the step's."""
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches)
    zero_gradients(chunk)
    # Here, so that tables which a stage makes at its first call do not count as the step's.
    check_stages(chunk, microbatches[0])
    chunk.checked = True
    with StorageTracker() as tracker:
        recorder = MemoryRecorder(tracker, gaps_of(chunk, len(microbatches)))
        train_step(chunk, microbatches, observers=(recorder,))
    return Measured(usage=recorder.usage, in_slot_peak=tracker.slot_peak)


def predict(build: Callable[[], ModelChunk], microbatches: Sequence[Feeds]) -> Forecast:
    """Predict one training step; nothing is computed, so any size will do."""
    with fake_chunk(build) as chunk:
        check_feeds(chunk.program, microbatches)
        footprints = footprints_of(chunk, microbatches)
        return Forecast(usage=predict_step(chunk, footprints), formula=formula(chunk, footprints[0], len(microbatches)))


@cache
def _host_cost() -> HostCost:
    """Once per process: it says something about the machine, not about the step."""
    return measure_host_cost()
