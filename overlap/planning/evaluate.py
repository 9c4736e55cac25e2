"""Evaluate: peak of every rank and time of a step, for one choice of recompute.

Microbatches share no storage, so a rank's memory is what its weights take, what each waiting microbatch keeps, and what
the plan that runs now holds: each distinct plan is walked once, the pipeline's actions say how many wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from overlap.memory.device_model import DeviceModel
from overlap.pipeline_model.actions import PipelineSchedule, Step
from overlap.pipeline_model.run import StepTime, run_pipeline
from overlap.planning.actions import Move, moves_of, pipeline_of
from overlap.planning.bins import Bytes, RankBin, add, scaled, total
from overlap.planning.chunks import ChunkShape, chunk_shapes, stages_of_rank
from overlap.planning.job import Job
from overlap.planning.pieces import Form, Piece, Pieces
from overlap.planning.survey import Survey
from overlap.selective import modules_of
from recompute.config import Keep, RecomputeConfig
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule
from recompute.planner import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """Where a pipeline rank's memory is highest."""

    rank: int
    bins: Bytes
    waiting: int
    """Microbatches of its chunks that wait for their backward then, those that run left out."""

    @property
    def total(self) -> int:
        """Bytes."""
        return total(self.bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a choice needs."""

    ranks: Sequence[RankPeak]
    milliseconds: float
    """Of a step, without the optimizer."""

    @property
    def fullest(self) -> RankPeak:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all choices share."""

    job: Job
    survey: Survey
    device: DeviceModel
    order: str
    """Name of a built-in order, or a file."""

    @cached_property
    def shapes(self) -> tuple[ChunkShape, ...]:
        """The pipeline's chunks."""
        return chunk_shapes(self.job)

    @cached_property
    def modules(self) -> frozenset[RecomputeModule]:
        """The modules that at least one chunk has."""
        return frozenset(module for chunk in self.survey.values() for module in modules_of(chunk.program))

    @property
    def keeps(self) -> tuple[Keep, ...]:
        """Where segment inputs may wait."""
        return (Keep.DEVICE, Keep.HOST, *([Keep.SHARDED] if self.job.shards > 1 else []))

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """What every rank runs."""
        return pipeline_of(self.job)

    @cached_property
    def moves(self) -> tuple[tuple[Move, ...], ...]:
        """Of every rank, which chunks run in each step."""
        return tuple(moves_of(steps) for steps in self.schedule.ranks)

    @cached_property
    def pieces(self) -> Pieces:
        """What single plans take; choices share them."""
        return Pieces(self.job, self.survey, self.device, self.order)


class Evaluation:
    """One choice under a setting.

    Raises:
        ConfigError: Segment inputs are sharded over one rank, or no chunk has a module.
        ScheduleError: The order does not fit.
    """

    def __init__(self, setting: Setting, choice: Choice) -> None:
        if choice.recompute.keep is Keep.SHARDED and setting.job.shards == 1:
            rule = "needs shards above 1: ranks that hold the same segment inputs"
            raise ConfigError(field="keep", value=Keep.SHARDED.value, rule=rule)
        _check_modules(setting, choice.recompute)
        self._setting = setting
        by_shape = {shape: setting.pieces.form(shape, choice) for shape in setting.survey}
        self.forms: tuple[Form, ...] = tuple(by_shape[shape] for shape in setting.shapes)
        """Of every chunk; choices with the same forms have the same outcome."""

    def outcome(self) -> Outcome:
        """Every rank's peak, and the step's time."""
        setting = self._setting
        hop = setting.device.transfer_milliseconds(setting.job.sent)
        run = run_pipeline(setting.schedule, self, hop)
        return Outcome(ranks=[self.rank(number) for number in range(setting.job.pp)], milliseconds=run.milliseconds)

    def of(self, step: Step) -> StepTime:
        """The time of a step of the pipeline."""
        return self._piece(moves_of((step,))[0]).time

    def rank(self, number: int) -> RankPeak:
        """One rank's peak."""
        setting = self._setting
        waiting: dict[int, int] = dict.fromkeys(stages_of_rank(setting.job, number), 0)
        done = dict(waiting)
        held = 0
        best: tuple[int, Move, dict[int, int], dict[int, int]] = (-1, (None, None), waiting, done)
        for move in setting.moves[number]:
            forward, backward = move
            if backward is not None:
                waiting[backward] -= 1
                held -= self._waiting[backward]
            height = held + self._piece(move).height
            if height > best[0]:
                best = (height, move, dict(waiting), dict(done))
            if forward is not None:
                waiting[forward] += 1
                held += self._waiting[forward]
            if backward is not None:
                done[backward] += 1
                held += self._done[backward]
        _, move, waiting, done = best
        chunks = [setting.pieces.chunk(form) for form in self.forms]
        bins = add(
            *(setting.survey[setting.shapes[stage]].fixed for stage in waiting),
            {RankBin.WORKSPACE: setting.device.workspace},
            self._piece(move).bytes,
            *(scaled(chunks[stage].waiting, count) for stage, count in waiting.items()),
            *(scaled(chunks[stage].done, count) for stage, count in done.items()),
        )
        return RankPeak(rank=number, bins=bins, waiting=sum(waiting.values()))

    @cached_property
    def _waiting(self) -> Mapping[int, int]:
        pieces = self._setting.pieces
        return {stage: total(pieces.chunk(form).waiting) for stage, form in enumerate(self.forms)}

    @cached_property
    def _done(self) -> Mapping[int, int]:
        pieces = self._setting.pieces
        return {stage: total(pieces.chunk(form).done) for stage, form in enumerate(self.forms)}

    @cached_property
    def _known(self) -> dict[Move, Piece]:
        return {}

    def _piece(self, move: Move) -> Piece:
        if move not in self._known:
            self._known[move] = self._find(*move)
        return self._known[move]

    def _find(self, forward: int | None, backward: int | None) -> Piece:
        pieces = self._setting.pieces
        if forward is None or backward is None:
            stage = backward if forward is None else forward
            assert stage is not None, "a step without work"
            alone = pieces.chunk(self.forms[stage])
            return alone.backward if forward is None else alone.forward
        return pieces.pair(self.forms[forward], self.forms[backward])


def _check_modules(setting: Setting, config: RecomputeConfig) -> None:
    for module in config.modules:
        if module not in setting.modules:
            have = ", ".join(sorted(setting.modules)) or "none"
            raise ConfigError(field="modules", value=module.value, rule=f"no chunk has such a module; they have {have}")
