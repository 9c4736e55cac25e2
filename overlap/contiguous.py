"""The contiguous step: layers run whole, one after another, and recompute.checkpoint_layers() replays the segments.

Plain checkpointing under the same settings, for comparison: no overlap, the same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds, MicrobatchState
from overlap.errors import ProgramError
from overlap.ir import Effect, Program, Stage
from overlap.parallel.agree import compare_collectives
from overlap.reference import border, detached, forward_stage, start_backward
from overlap.scale import check_scale
from overlap.step import Losses, apply_effects, check_accumulate, rollback
from overlap.step_feeds import check_feeds
from recompute.checkpoint import LayerResult, check_contiguous, checkpoint_layers
from recompute.config import RecomputeConfig, Replay
from recompute.precision import Precision, capture_precision, no_autocast


def contiguous_step(
    chunk: ModelChunk, microbatches: Sequence[Feeds], accumulate: int = 1, *, total_tokens: int | None = None
) -> list[Losses]:
    """Forward and backward of all microbatches; arguments and results as train_step's.

    Raises:
        ConfigError: A config names modules, or keeps segment inputs elsewhere; a loss scale that is not for the model's
            losses.
        ProgramError: A layer reads more than its input, or the stages after the layers do.
    """
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches)
    check_accumulate(accumulate, True)
    for config in chunk.configs(len(microbatches)):
        check_contiguous(config)
    check_scale(chunk.module, chunk.loss_scale)
    scale = chunk.loss_scale.factor(microbatches, accumulate, total_tokens)
    precision = capture_precision(chunk.device.type)
    first = chunk.first_draw(len(microbatches))
    states = [MicrobatchState(number, feeds, scale, first) for number, feeds in enumerate(microbatches)]
    with rollback(chunk.program), no_autocast(chunk.device.type):
        for owner, config in zip(states, chunk.configs(len(states)), strict=True):
            _microbatch(chunk, owner, config, precision)
    apply_effects(chunk.program, states)
    chunk.steps_done += 1
    compare_collectives(chunk.world)
    return [owner.outputs for owner in states]


def _microbatch(
    chunk: ModelChunk, owner: MicrobatchState, config: RecomputeConfig, precision: Precision | None
) -> None:
    program = chunk.program
    values: dict[str, Any] = {name: value for (name, _), value in owner.values.items()}
    run = partial(_run_stage, chunk, owner, precision)
    for stage in program.prologue:
        run(stage, values, None)
        owner.effects += _effects(stage, values)
    # A copy: what the layers give goes to `values`, and a graph that holds its own results is never freed.
    outside = dict(values)
    layers = [_ProgramLayer(program, index, outside, run, owner) for index in program.layers]
    if layers:
        hidden, losses = checkpoint_layers(
            # There is nothing to hide a replay behind, so that setting does not count here.
            layers,
            values[layers[0].source],
            replace(config, replay=Replay.JUST_IN_TIME),
            num_mtp_layers=len(program.mtp_layers),
        )
        values[layers[-1].target] = hidden
        values.update(zip((name for layer in layers for name in layer.losses), losses, strict=True))
    for stage in program.epilogue:
        run(stage, values, None)
        owner.effects += _effects(stage, values)
    start_backward(program, owner, values)


def _run_stage(
    chunk: ModelChunk,
    owner: MicrobatchState,
    precision: Precision | None,
    stage: Stage,
    values: dict[str, Any],
    pinned: tuple[Any, ...] | None,
) -> None:
    """Run one stage on aliases of its reads and add what it writes to `values`."""
    program = chunk.program
    inputs = [v if program.nondiff(n) else border(v) for n, v in ((name, values[name]) for name in stage.reads)]
    result = forward_stage(chunk, stage, owner.draws_as, inputs, precision, pinned)
    values.update(zip(stage.writes, result, strict=True))


class _ProgramLayer:
    """A layer of a program as checkpoint_layers() takes it; its stages seed their own draws."""

    draws_rng = False

    def __init__(
        self, program: Program, index: int, feeds: Mapping[str, Any], run: Callable[..., None], owner: MicrobatchState
    ) -> None:
        self._stages = program.layer_stages[index]
        self._feeds = feeds
        self._run = run
        self._owner = owner
        written = {value for stage in self._stages for value in stage.writes}
        wanted = [loss.value for loss in program.losses]
        self.losses = tuple(value for value in wanted if value in written)
        sources = [value for value in program.live_ins((index,)) if not program.nondiff(value)]
        outside = [
            value
            for value in written - set(self.losses)
            if any(reader.layer != index for reader in program.readers[value])
        ]
        if len(sources) != 1 or len(outside) != 1:
            raise ProgramError(
                f"layer {index} reads {sources} and hands on {outside}: the contiguous path takes one each"
            )
        (self.source,), (self.target,) = sources, outside
        self.state: Sequence[Tensor] = tuple(buffer for stage in self._stages for buffer in stage.state)

    def parameters(self) -> Sequence[nn.Parameter]:
        """Of all its stages."""
        return tuple(p for stage in self._stages for p in stage.parameters)  # type: ignore[misc]

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        """Run the stages in order."""
        values = {**self._feeds, self.source: hidden}
        for stage in self._stages:
            self._run(stage, values, None if pinned is None else tuple(pinned[name] for name in stage.pins))
        effects = [item for stage in self._stages for item in _effects(stage, values)]
        return LayerResult(
            hidden=values[self.target],
            losses=tuple(values[name] for name in self.losses),
            pinned={name: values[name] for stage in self._stages for name in stage.pins},
            effects=partial(_note, self._owner, effects),
        )


def _effects(stage: Stage, values: Mapping[str, Any]) -> list[tuple[Effect, Any]]:
    return [(effect, detached(values[effect.value])) for effect in stage.effects]


def _note(owner: MicrobatchState, effects: list[tuple[Effect, Any]]) -> None:
    owner.effects += effects
