"""train_pipeline: one training step of a pipeline, and evaluation through the same schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from overlap.accumulation import begin_call, end_call, next_call
from overlap.engine import Engine, Feeds, MicrobatchState, Observer
from overlap.errors import PipelineTorn
from overlap.parallel.actions import ActingLanes, Actions
from overlap.parallel.agree import agree, compare_collectives, gather
from overlap.pipelining.compat import forget_receives
from overlap.pipelining.executor import RunningStep
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.schedules import OrderedSchedule
from overlap.step import Losses, Taken, apply_or_undo, check_accumulate, check_precision, engine_on, rollback
from overlap.step_feeds import check_names, replayed_feeds
from recompute.checks import check_kind
from recompute.errors import ConfigError


def train_pipeline(
    pipeline: Pipeline,
    microbatches: Sequence[Feeds],
    accumulate: int = 1,
    *,
    last: bool = True,
    total_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    engine_type: Callable[..., Engine] = Engine,
) -> list[Losses]:
    """Forward and backward of all microbatches through this rank's stages; gradients add to `.grad`.

    Collective over the pipeline's group. If a stage raises, the exception passes through and this rank holds nothing
    of the step; the others find out when their receives time out. If messages were under way, no further step runs.

    Args:
        pipeline: This rank's share.
        microbatches: Feeds of the whole model, the same on all ranks of the pipeline.
        accumulate: Calls per optimizer step, of as many microbatches each; losses are scaled by one over all of them.
        last: Whether this is the last of these calls: gradients are then reduced, those of a shared embedding added.
        total_tokens: Tokens of all these calls, for a per-token loss scale.
        observers: Watch the step.
        engine_type: What runs the plans; a test may break one thing in a subclass.

    Returns:
        Per microbatch, the losses and outputs of this rank's stages, by value name.

    Raises:
        ConfigError: Bad arguments, also for the schedule; another scale than in calls before; ranks that differ.
        ProgramError: A stage does not do what it declares (checked at the first call).
        PipelineTorn: See check_whole().
    """
    _bind(pipeline)
    check_pipeline_feeds(pipeline, microbatches)
    check_accumulate(accumulate, last)
    if not torch.is_grad_enabled():
        return evaluate_pipeline(pipeline, microbatches, observers=observers, engine_type=engine_type)
    check_precision(pipeline.first.device)
    agree_on_pipeline(pipeline, len(microbatches))
    for stage in pipeline.stages:
        stage.check(microbatches[0], pipeline.dtype)
    call = next_call(pipeline, pipeline.chunks, microbatches, accumulate, total_tokens)
    schedule = pipeline.schedule(len(microbatches))
    for stage in pipeline.stages:
        stage.open_step(microbatches, call.scale, replayed_feeds(stage.chunk, len(microbatches)))
    begin_call(pipeline, pipeline.chunks)
    ends = (pipeline.layout.rank_of(0), pipeline.layout.rank_of(pipeline.layout.num_stages - 1))
    joined = pipeline.shared.apart(*ends, pipeline.group, after_others=pipeline.accumulating) if last else nullcontext()
    running = _running(pipeline, schedule, observers, engine_type, keep=True, reduce=last)
    with _rollback(pipeline, always=False) as before, joined, running:
        schedule.step(return_outputs=False)
    pipeline.accumulating = not last
    states = [stage.close_step() for stage in pipeline.stages]
    apply_or_undo(list(zip(pipeline.chunks, states, strict=True)), before)
    end_call(pipeline, call, last=last)
    for chunk in pipeline.chunks:
        chunk.steps_done += 1
    compare_collectives(pipeline.first.world)
    return _merged(states)


def evaluate_pipeline(
    pipeline: Pipeline,
    microbatches: Sequence[Feeds],
    *,
    observers: Sequence[Observer] = (),
    engine_type: Callable[..., Engine] = Engine,
) -> list[Losses]:
    """Losses and outputs without backward, through the same schedule: nothing is retained or counted (R17).

    Args:
        pipeline: This rank's share; its modules' train or eval mode is respected.
        microbatches: As in train_pipeline.
        observers: Watch the run.
        engine_type: What runs the plans.

    Raises:
        PipelineTorn: A step before failed while messages were under way.
    """
    _bind(pipeline)
    check_pipeline_feeds(pipeline, microbatches)
    schedule = pipeline.schedule(len(microbatches))
    for stage in pipeline.stages:
        stage.open_step(microbatches, 1.0, [frozenset()] * len(microbatches))
    with (
        _rollback(pipeline, always=True),
        _running(pipeline, schedule, observers, engine_type, keep=False, reduce=False),
        torch.no_grad(),
    ):
        schedule.eval(return_outputs=False)
    return _merged([stage.close_step() for stage in pipeline.stages])


def _bind(pipeline: Pipeline) -> None:
    """Follow what was replaced in its chunks, if it is a pipeline that can go on."""
    check_kind("pipeline", pipeline, Pipeline, "a Pipeline")
    check_whole(pipeline)
    pipeline.bind_replaced()


@contextmanager
def _rollback(pipeline: Pipeline, *, always: bool) -> Iterator[Sequence[Taken]]:
    """Put in-place state of all stages back if the step fails (always: also if it does not); gives what it was."""
    with ExitStack() as stack:
        yield [
            taken for chunk in pipeline.chunks for taken in stack.enter_context(rollback(chunk.program, always=always))
        ]


@contextmanager
def _running(
    pipeline: Pipeline,
    schedule: OrderedSchedule,
    observers: Sequence[Observer],
    engine_type: Callable[..., Engine],
    *,
    keep: bool,
    reduce: bool,
) -> Iterator[None]:
    """An engine for the step, and nothing left of it if it fails.

    Args:
        pipeline: This rank's share.
        schedule: What drives it.
        observers: Watch the step.
        engine_type: What runs the plans.
        keep: Whether it trains.
        reduce: Whether gradients are reduced over the replicas.
    """
    done = False
    lanes = ActingLanes(pipeline.first.lanes, Actions())
    with engine_on(lanes, pipeline.chunks, observers, engine_type) as engine:
        try:
            planned = pipeline.planner.step(schedule.own_actions, training=keep, reduce=reduce)
            pipeline.executor.open_step(RunningStep(engine=engine, lanes=lanes, planned=planned))
            yield
            for channel in pipeline.channels:
                channel.finish()
            done = True
        finally:
            pipeline.executor.close_step()
            if not done:
                forget_receives(schedule)
                pipeline.torn |= any([channel.clear() for channel in pipeline.channels])
                for stage in pipeline.stages:
                    stage.clear()


def _merged(states: Sequence[Sequence[MicrobatchState]]) -> list[Losses]:
    """What the stages computed, microbatch by microbatch."""
    return [
        {name: value for owner in owners for name, value in owner.outputs.items()}
        for owners in zip(*states, strict=True)
    ]


def agree_on_pipeline(pipeline: Pipeline, num_microbatches: int) -> None:
    """Check, once, that all ranks are about to do the same: pipelines of the same shape, stages of the same settings.

    Raises:
        ConfigError: On every rank; names the setting that differs and each rank's value.
    """
    world = pipeline.first.world
    if world.groups is None or pipeline.agreed:
        return
    first = pipeline.first
    shape = {
        "pp_layout": pipeline.layout.layers,
        "pp": pipeline.layout.pp,
        **first.model_settings,
        "schedule": str(pipeline.kind),
        "microbatches": num_microbatches,
        "seed": first.seed,
        "steps_done": first.steps_done,
        "loss_scale": repr(first.loss_scale),
        "delay_wgrad": first.delay_wgrad,
    }
    everyone = gather(world, shape)
    for field in shape:
        values = {rank: theirs[field] for rank, theirs in enumerate(everyone)}
        if any(value != shape[field] for value in values.values()):
            raise ConfigError(field=field, value=values, rule="must be the same on all ranks")
    agree(world, {
        f"{field} of stage {stage.stage_index}": value
        for stage in pipeline.stages
        for field, value in stage.chunk.settings(num_microbatches).items()
    })  # fmt: skip
    pipeline.agreed = True


def check_whole(pipeline: Pipeline) -> None:
    """Refuse a step whose ranks would take messages of a failed one for its own.

    Raises:
        PipelineTorn: A step before failed while messages were under way.
    """
    if pipeline.torn:
        raise PipelineTorn


def check_pipeline_feeds(pipeline: Pipeline, microbatches: Sequence[Feeds]) -> None:
    """Refuse microbatches that do not feed the whole model.

    Raises:
        ConfigError: Names the microbatch and the feed.
    """
    check_names(microbatches, set(pipeline.stages[0].part.feed_names))
    for feeds in microbatches:
        for check in pipeline.first.program.feed_checks:
            check(feeds)
