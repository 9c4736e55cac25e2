"""train_step: one training step without pipelining, microbatch i+1's forward interleaved with i's backward.

Owns issue order across microbatches, the loss scale, effects and clean failure. It never zeroes gradients, clips,
steps the optimizer or updates the expert bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from overlap.accumulation import begin_call, end_call, next_call
from overlap.check import check_stages
from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Engine, Feeds, MicrobatchState, Observer
from overlap.ir import Program
from overlap.lanes import Lanes
from overlap.lower import Plan
from overlap.parallel.agree import agree, compare_collectives, compare_failed
from overlap.plan import FORWARD_SIDE, StepPlan
from overlap.signature import comm_signature
from overlap.step_feeds import check_feeds, replayed_feeds, snapshot_feeds
from recompute import state
from recompute.checks import check_kind
from recompute.config import check_bool, check_count
from recompute.errors import ConfigError
from recompute.precision import capture_precision, no_autocast
from recompute.rng import default_generators
from recompute.wgrad import adding_in_place

Losses = dict[str, Tensor]
"""A microbatch's losses and outputs, by value name, detached."""


def train_step(
    chunk: ModelChunk,
    microbatches: Sequence[Feeds],
    accumulate: int = 1,
    *,
    last: bool = True,
    total_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    engine_type: Callable[..., Engine] = Engine,
) -> list[Losses]:
    """Forward and backward of all microbatches; gradients add to `.grad`.

    If a stage raises, the exception passes through with a note naming the slot; nothing stays behind except that the
    `.grad` of the step is undefined: zero it, and a retry is the step that never failed.

    Args:
        chunk: The model and its settings.
        microbatches: At least one; each feeds every input of the program.
        accumulate: Calls per optimizer step, of as many microbatches each; losses are scaled by one over all of them.
        last: Whether this is the last of these calls: gradients are then reduced over the ranks.
        total_tokens: Tokens of all these calls, for a per-token loss scale.
        observers: Watch the step.
        engine_type: What runs the plans; a test may break one thing in a subclass.

    Returns:
        Each microbatch's losses, in order.

    Raises:
        ConfigError: Bad feeds, `accumulate`, `last`, autocast; another scale than in calls before; ranks that differ.
        ScheduleError: The order does not fit the program.
        ProgramError: A stage does not do what it declares (checked at the first call).
        RanksDisagree: Ranks stopped at different places of a step that failed.
    """
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches, trains=torch.is_grad_enabled())
    check_accumulate(accumulate, last)
    if not torch.is_grad_enabled():
        return forward_only(chunk, microbatches, observers=observers, engine_type=engine_type)
    check_precision(chunk.device)
    _agree_once(chunk, len(microbatches))
    call = next_call(chunk, (chunk,), microbatches, accumulate, total_tokens)
    plans = step_plans(chunk, len(microbatches))
    _check_once(chunk, microbatches[0])
    kept = replayed_feeds(chunk, len(microbatches))
    first, scale = chunk.first_draw(len(microbatches)), call.scale
    states = [MicrobatchState(n, snapshot_feeds(feeds, kept[n]), scale, first) for n, feeds in enumerate(microbatches)]
    begin_call(chunk, (chunk,))
    with rollback(chunk.program) as before:
        with engine_for(chunk, [plan for plan, _ in plans], observers, engine_type, reduce=last) as engine:
            for plan, numbers in plans:
                engine.run(plan, {side: states[number] for side, number in numbers.items()})
        for owner, feeds in zip(states, microbatches, strict=True):
            _return_gradients(chunk.program, owner, feeds)
    apply_or_undo([(chunk, states)], before)
    end_call(chunk, call, last=last)
    chunk.steps_done += 1
    compare_collectives(chunk.world)
    return [owner.outputs for owner in states]


def _agree_once(chunk: ModelChunk, num_microbatches: int) -> None:
    """Before the first step, and the first after a change or a failure. Loss scales may communicate: before them."""
    if not (chunk.checked and chunk.agreed):
        agree_on_step(chunk, num_microbatches)
        chunk.agreed = True


def _check_once(chunk: ModelChunk, feeds: Feeds) -> None:
    """The same for what stages declare."""
    if not chunk.checked:
        with chunk.parallel.whole():
            check_stages(chunk, feeds)
        chunk.checked = True


def agree_on_step(chunk: ModelChunk, num_microbatches: int) -> None:
    """Check that all ranks are about to do the same step; nothing to do in one process.

    Raises:
        ConfigError: On every rank; names the setting that differs and each rank's value.
        RanksDisagree: They stopped at different places of a step that failed.
    """
    if chunk.world.groups is not None:
        compare_failed(chunk.world, chunk.cut_short)
        chunk.cut_short = 0
        communication = comm_signature(step_plans(chunk, num_microbatches))
        agree(chunk.world, {**chunk.settings(num_microbatches), "communication": communication})


def forward_only(
    chunk: ModelChunk,
    microbatches: Sequence[Feeds],
    *,
    observers: Sequence[Observer] = (),
    engine_type: Callable[..., Engine] = Engine,
) -> list[Losses]:
    """Losses and outputs without backward: nothing is retained, replayed or counted (R17).

    Args:
        chunk: The model; its train or eval mode is respected.
        microbatches: As in train_step.
        observers: Watch the run.
        engine_type: What runs the plan.

    Returns:
        Each microbatch's losses and outputs.
    """
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches, trains=False)
    if chunk.cut_short:
        compare_failed(chunk.world, chunk.cut_short)
        chunk.cut_short = 0
    plan = chunk.planner.forward_plan()
    first = chunk.first_draw(len(microbatches))
    states = [MicrobatchState(number, feeds, 1.0, first) for number, feeds in enumerate(microbatches)]
    running = [plan] * len(microbatches)
    with (
        rollback(chunk.program, always=True),
        engine_for(chunk, running, observers, engine_type, reduce=False) as engine,
    ):
        for owner in states:
            engine.run(plan, {FORWARD_SIDE: owner})
    return [owner.outputs for owner in states]


Taken = tuple[Sequence[Tensor], state.Snapshot]
"""Buffers, and what they held."""


def step_plans(chunk: ModelChunk, num_microbatches: int) -> list[StepPlan]:
    """The plans of a step of the chunk."""
    return chunk.planner.step(chunk.configs(num_microbatches), chunk.program.trained())


def check_accumulate(accumulate: int, last: bool) -> None:
    """Refuse a count of calls that is none, and a single call that is not the last.

    Raises:
        ConfigError: Names the argument.
    """
    check_count("accumulate", accumulate, at_least=1)
    check_bool("last", last)
    if accumulate == 1 and not last:
        raise ConfigError(field="last", value=last, rule="a single call is the last: give accumulate= too")


def check_precision(device: torch.device) -> None:
    """Refuse to train under float16 autocast (float16 parameters are refused by ModelChunk).

    Raises:
        ConfigError: Names the dtype.
    """
    dtype = torch.get_autocast_dtype(device.type)
    if torch.is_autocast_enabled(device.type) and dtype is torch.float16:
        rule = "float16 needs a loss scaler, which train_step does not drive; use bfloat16"
        raise ConfigError(field="autocast dtype", value=dtype, rule=rule)


def _return_gradients(program: Program, owner: MicrobatchState, feeds: Feeds) -> None:
    """Hand the gradients of fed values to whoever made them, readers summed in reverse program order (R3).

    Raises:
        RuntimeError: Something else is left; our own mistake.
    """
    for source in program.inputs:
        total = None
        for reader in reversed(program.readers[source.name]):
            gradient = owner.grads.pop((source.name, program.position[reader.key]), None)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        if total is not None and feeds[source.name].requires_grad:
            torch.autograd.backward((feeds[source.name],), (total,))
    if leftovers := owner.leftovers():
        raise RuntimeError(f"the plans of this step do not consume what they make: {leftovers}")


def apply_effects(program: Program, states: Sequence[MicrobatchState]) -> None:
    """Apply the step's effects once, in microbatch order, then program order (R5); then step states move on."""
    position, producers = program.position, program.producers
    with torch.no_grad():
        for owner in states:
            for effect, value in sorted(owner.effects, key=lambda item: position[producers[item[0].value].key]):
                effect.apply(value)
        for moving in program.step_states:
            moving.advance()


def apply_or_undo(parts: Sequence[tuple[ModelChunk, Sequence[MicrobatchState]]], before: Sequence[Taken]) -> None:
    """Apply the step's effects; if one raises, buffers and in-place state are as before the step (R16).

    Args:
        parts: The chunks that took part, each with its microbatches.
        before: In-place state as it was before the step.
    """
    buffers: list[Tensor] = []
    for chunk, states in parts:
        if any(owner.effects for owner in states) or chunk.program.step_states:
            buffers += chunk.module.buffers()
    taken = (buffers, state.take(buffers))
    try:
        for chunk, states in parts:
            apply_effects(chunk.program, states)
    except BaseException:
        for live, snapshot in (taken, *before):
            state.put(live, snapshot)
        raise


@contextmanager
def engine_for(
    chunk: ModelChunk,
    plans: Sequence[Plan],
    observers: Sequence[Observer],
    engine_type: Callable[..., Engine],
    *,
    reduce: bool,
) -> Iterator[Engine]:
    """An engine for one step of a chunk and its replicas."""
    lanes = chunk.parallel.begin(chunk.program, plans, chunk.lanes, reduce=reduce)
    with engine_on(lanes, (chunk,), observers, engine_type) as engine:
        yield engine


@contextmanager
def engine_on(
    lanes: Lanes, chunks: Sequence[ModelChunk], observers: Sequence[Observer], engine_type: Callable[..., Engine]
) -> Iterator[Engine]:
    """An engine for one step, with autograd on the calling thread and autocast only inside stages.

    Args:
        lanes: Where its issues run.
        chunks: What it runs, with the same settings and lanes; their replicas end the step too.
        observers: Watch the step.
        engine_type: What runs the plans.
    """
    check_kind("observers", observers, Sequence, "a list of observers")
    for observer in observers:
        check_kind("observers", observer, Observer, "observers: each has before() and after()")
    first = chunks[0]
    device, launched = first.device, first.world.collectives.launched
    engine = engine_type(
        lanes,
        run_seed=first.seed,
        step=first.steps_done,
        generators=default_generators(device),
        precision=capture_precision(device.type),
        delay_wgrad=first.delay_wgrad,
        observers=(*observers, *first.world.observers),
        stores=first.stores,
    )
    with torch.autograd.set_multithreading_enabled(False), no_autocast(device.type), adding_in_place():
        try:
            yield engine
            first.lanes.finish()
            for chunk in chunks:
                chunk.parallel.end()
        except BaseException:
            for chunk in chunks:
                chunk.fail(first.world.collectives.launched - launched)
            _abandon(chunks)
            raise


def _abandon(chunks: Sequence[ModelChunk]) -> None:
    """Leave nothing of a failed step behind."""
    first = chunks[0]
    if first.world.debug is not None:
        first.world.debug.clear()
    try:
        first.lanes.finish()
    finally:
        for chunk in chunks:
            chunk.parallel.abandon()


@contextmanager
def rollback(program: Program, *, always: bool = False) -> Iterator[Sequence[Taken]]:
    """Put in-place state back if the step fails (always: also if it does not); gives what it was.

    Around the engine: state is put back when its lanes are joined, not while their kernels still write to it.
    """
    changed = [*(stage.state for stage in program.stages), *(moving.buffers for moving in program.step_states)]
    buffers = [(live, state.take(live)) for live in changed if live]
    done = False
    try:
        yield buffers
        done = True
    finally:
        if always or not done:
            for live, snapshot in buffers:
                state.put(live, snapshot)
