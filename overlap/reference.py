"""The reference step: the same stages in one autograd graph over the whole model, microbatch after microbatch.

What the overlapped step must equal bit for bit. It shares the stages, the seeds and the loss scale with it, and
nothing of the schedule: no replay, no gradient table, no pinned routing, autograd adds all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap.accumulation import begin_call, end_call, next_call
from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds, MicrobatchState
from overlap.ir import Program, Stage
from overlap.parallel.agree import compare_collectives
from overlap.step import Losses, apply_effects, check_accumulate, rollback
from overlap.step_feeds import check_feeds
from recompute.precision import Precision, capture_precision, no_autocast
from recompute.rng import default_generators, seeded, stage_seed
from recompute.wgrad import adding_in_place


def reference_step(
    chunk: ModelChunk,
    microbatches: Sequence[Feeds],
    accumulate: int = 1,
    *,
    last: bool = True,
    total_tokens: int | None = None,
) -> list[Losses]:
    """Forward and backward of all microbatches through plain autograd; arguments and results as train_step's."""
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches)
    check_accumulate(accumulate, last)
    call = next_call(chunk, (chunk,), microbatches, accumulate, total_tokens)
    precision = capture_precision(chunk.device.type)
    states = []
    begin_call(chunk, (chunk,))
    with rollback(chunk.program), no_autocast(chunk.device.type), chunk.parallel.whole():
        for number, feeds in enumerate(microbatches):
            owner = MicrobatchState(number, feeds, call.scale, chunk.first_draw(len(microbatches)))
            _microbatch(chunk, owner, precision)
            states.append(owner)
            chunk.parallel.after_microbatch(chunk.program, last=last and number == len(microbatches) - 1)
    apply_effects(chunk.program, states)
    end_call(chunk, call, last=last)
    chunk.steps_done += 1
    compare_collectives(chunk.world)
    return [owner.outputs for owner in states]


def _microbatch(chunk: ModelChunk, owner: MicrobatchState, precision: Precision | None) -> None:
    program = chunk.program
    values: dict[str, Any] = {name: value for (name, _), value in owner.values.items()}
    for stage in program.stages:
        # Each stage reads aliases, so that its own uses of a value are summed before other stages' (R3).
        inputs = [v if program.nondiff(name) else border(v) for name, v in ((n, values[n]) for n in stage.reads)]
        result = forward_stage(chunk, stage, owner.draws_as, inputs, precision, None)
        values.update(zip(stage.writes, result, strict=True))
        owner.effects += [(effect, detached(values[effect.value])) for effect in stage.effects]
    start_backward(program, owner, values)


class _Border(torch.autograd.Function):
    """An alias of a value, as a stage reads it.

    Its backward hands on a contiguous gradient, as the gradient table does: a matrix product may round differently
    for another stride.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """The same storage."""
        # A reader that gives no gradient gives none, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        """The same gradient, contiguous."""
        (gradient,) = gradients
        return None if gradient is None else gradient.contiguous()


def border(value: Tensor) -> Tensor:
    """The alias of `value` that one stage reads: its uses there are summed before they join other stages' (R3)."""
    alias: Tensor = _Border.apply(value)  # type: ignore[no-untyped-call]  # torch's
    return alias


def start_backward(program: Program, owner: MicrobatchState, values: Mapping[str, Any]) -> None:
    """Collect a microbatch's losses and outputs, and run autograd from the losses."""
    losses = [values[loss.value] for loss in program.losses]
    seeds = [
        torch.full_like(value, loss.weight * owner.scale) for value, loss in zip(losses, program.losses, strict=True)
    ]
    reached = [(value, seed) for value, seed in zip(losses, seeds, strict=True) if value.requires_grad]
    with adding_in_place():
        torch.autograd.backward([value for value, _ in reached], [seed for _, seed in reached])
    owner.outputs = {name: detached(values[name]) for name in (*(x.value for x in program.losses), *program.outputs)}


def forward_stage(
    chunk: ModelChunk,
    stage: Stage,
    microbatch: int,
    inputs: Sequence[Any],
    precision: Precision | None,
    pinned: tuple[Any, ...] | None,
) -> tuple[Any, ...]:
    """Run one stage's forward in its contexts, drawing from its own seed; returns one value per write."""
    with ExitStack() as stack:
        if precision is not None:
            stack.enter_context(precision())
        if stage.context is not None:
            stack.enter_context(stage.context())
        if stage.draws_rng:
            seed_at = partial(_seed_at, chunk.seed, microbatch, stage)
            stack.enter_context(seeded(seed_at(chunk.steps_done), default_generators(chunk.device), seed_at))
        result = stage.forward(*inputs, **({"pinned": pinned} if stage.pins else {}))
    return _apart(result) if len(stage.writes) != 1 else (result,)


def _apart(results: Sequence[Any]) -> tuple[Any, ...]:
    """Values of one stage, no two the same tensor: the uses of each are summed before they join the other's (R3).

    Made last first, so that backward adds them in the order in which they are written.
    """
    found = list(results)
    for place in reversed(range(len(found))):
        value = found[place]
        again = any(value is earlier for earlier in found[:place])
        if again and torch.is_tensor(value) and value.requires_grad:
            found[place] = border(value)
    return tuple(found)


def _seed_at(run_seed: int, microbatch: int, stage: Stage, step: int) -> int:
    return stage_seed(run_seed, step, microbatch, stage.layer, stage.name)


def detached(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return value.detach() if torch.is_tensor(value) else value
