"""verify: compare the overlapped step with the reference step, bit for bit.

Runs both on copies of one model and compares, after every step and before the optimizer, what a training run can
see: losses, every gradient, every buffer, the state of the random generators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from overlap.check import same_bits
from overlap.chunk import ModelChunk
from overlap.cuda_graph import check_recordable, graphed
from overlap.engine import Engine, Feeds
from overlap.ir import Lane, Op
from overlap.lower import Issue
from overlap.memory.segments import SegmentCounter
from overlap.model.router import update_expert_bias
from overlap.plan import segments_of
from overlap.reference import reference_step
from overlap.step import Losses, agree_on_step, step_plans, train_step

Step = Callable[[ModelChunk, Sequence[Feeds]], list[Losses]]
"""step(chunk, microbatches) adds gradients and returns the losses."""
Prepare = Callable[[ModelChunk], ModelChunk]
"""Applied to a copy before it trains, as what makes it parallel, which cannot be copied."""


def as_is(chunk: ModelChunk) -> ModelChunk:
    """Nothing to prepare."""
    return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsCompared:
    """Two sets of named tensors beside each other."""

    compared: int
    """Names in either set."""
    different: tuple[str, ...]
    """Names that are missing on one side, differ in any bit, or are not finite; sorted."""

    def merged(self, other: TensorsCompared) -> TensorsCompared:
        """Both comparisons of the same names."""
        return TensorsCompared(
            compared=max(self.compared, other.compared),
            different=tuple(sorted({*self.different, *other.different})),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verify found."""

    loss_equal: bool
    gradients: TensorsCompared
    buffers: TensorsCompared
    rng_equal: bool
    max_live_segments: int
    """Most segments that had a graph at the same time."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        same = not self.gradients.different and not self.buffers.different
        return self.loss_equal and self.rng_equal and same


def merged(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over several ranks: equal if every rank's is."""
    return Verdict(
        loss_equal=all(verdict.loss_equal for verdict in verdicts),
        gradients=reduce(TensorsCompared.merged, (verdict.gradients for verdict in verdicts)),
        buffers=reduce(TensorsCompared.merged, (verdict.buffers for verdict in verdicts)),
        rng_equal=all(verdict.rng_equal for verdict in verdicts),
        max_live_segments=max(verdict.max_live_segments for verdict in verdicts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step's plans contain."""

    segments: tuple[tuple[int, ...], ...]
    slots: Mapping[str, int]
    """Slots of a step per op; S and L only where segment inputs wait elsewhere."""
    replayed_a2a: int
    """R slots on the communication lane."""
    replayed_a2a_per_layer: float
    """The same per microbatch and recomputed layer that communicates; 0 if there is none."""


def step_facts(chunk: ModelChunk, num_microbatches: int) -> StepFacts:
    """Count what a step of `num_microbatches` issues."""
    issues = [issue for plan, _ in step_plans(chunk, num_microbatches) for issue in plan.issues]
    replayed = [issue for issue in issues if issue.slot.op is Op.REPLAY and issue.lane is Lane.COMM]
    program = chunk.program
    configs = chunk.configs(num_microbatches)
    communicating = sum(
        any(stage.lane is Lane.COMM for stage in program.layer_stages[layer])
        for config in configs
        for segment in segments_of(program, config)
        for layer in segment.layers
    )
    return StepFacts(
        segments=tuple(segment.layers for segment in segments_of(program, configs[0])),
        slots={op.value: count for op, count in _counted(issues) if count or op not in (Op.STORE, Op.LOAD)},
        replayed_a2a=len(replayed),
        replayed_a2a_per_layer=len(replayed) / communicating if communicating else 0.0,
    )


def _counted(issues: Sequence[Issue]) -> list[tuple[Op, int]]:
    return [(op, sum(issue.slot.op is op for issue in issues)) for op in Op if op is not Op.CALL]


def verify(
    chunk: ModelChunk,
    batches: Sequence[Sequence[Feeds]],
    *,
    engine_type: Callable[..., Engine] = Engine,
    reference: Step = reference_step,
    prepare: Prepare = as_is,
    graph: bool = False,
) -> Verdict:
    """Train a copy of `chunk` both ways and compare.

    Args:
        chunk: The model and its settings; left as it is.
        batches: The microbatches of each step.
        engine_type: What runs the plans of the overlapped side; a control breaks one thing in it.
        reference: The other side's step.
        prepare: Applied to both copies, as what makes them parallel, which cannot be copied.
        graph: Whether the overlapped side's steps are launched as a CUDA graph, from the third on.

    Returns:
        The verdict over all steps.

    Raises:
        ConfigError: Ranks have different settings; with `graph`, a setting that needs the host in every step.
        ProgramError: A stage does not do what it declares, as changing a buffer behind the program's back.
    """
    if graph:
        check_recordable(chunk)
    for microbatches in batches[:1]:
        agree_on_step(chunk, len(microbatches))
    peak = 0

    def overlapped(side: ModelChunk, microbatches: Sequence[Feeds]) -> list[Losses]:
        nonlocal peak
        counter = SegmentCounter(side, len(microbatches))
        losses = train_step(side, microbatches, observers=(counter,), engine_type=engine_type)
        peak = max(peak, counter.peak)
        return losses

    found = graphed(overlapped) if graph else overlapped
    verdict = compare_steps(chunk, batches, reference, found, prepare=prepare)
    return replace(verdict, max_live_segments=peak)


def compare_steps(
    chunk: ModelChunk,
    batches: Sequence[Sequence[Feeds]],
    expected: Step,
    found: Step,
    *,
    prepare: Prepare = as_is,
) -> Verdict:
    """Train a copy of `chunk` by each of two steps and compare what is there before each optimizer step.

    Args:
        chunk: The model and its settings; left as it is.
        batches: The microbatches of each step.
        expected: One step.
        found: The other; it may be the same.
        prepare: Applied to both copies.

    Returns:
        The verdict over all steps; it counts no segments.
    """
    sides = (prepare(copy.deepcopy(chunk)), prepare(copy.deepcopy(chunk)))
    optimizers = [torch.optim.AdamW(side.parallel.parameter_groups(side), lr=1e-3) for side in sides]
    loss_equal = rng_equal = True
    nothing = TensorsCompared(compared=0, different=())
    gradients, buffers = nothing, nothing
    for microbatches in batches:
        before = torch.get_rng_state()
        wanted = expected(sides[0], microbatches)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        got = found(sides[1], microbatches)
        rng_equal &= torch.equal(torch.get_rng_state(), after)
        loss_equal &= all(not compare(a, b).different for a, b in zip(wanted, got, strict=True))
        gradients = gradients.merged(compare(_gradients(sides[0]), _gradients(sides[1])))
        buffers = buffers.merged(compare(_buffers(sides[0]), _buffers(sides[1])))
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update_expert_bias(side, side.world)
    return Verdict(
        loss_equal=loss_equal, gradients=gradients, buffers=buffers, rng_equal=rng_equal, max_live_segments=0
    )


def compare(expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> TensorsCompared:
    """Compare two sets of named tensors bit by bit; None (no gradient) is not a zero."""
    names = sorted({*expected, *found})
    different = [
        name for name in names if name not in expected or name not in found or not _same(expected[name], found[name])
    ]
    return TensorsCompared(compared=len(names), different=tuple(different))


def _same(expected: Tensor | None, found: Tensor | None) -> bool:
    if expected is None or found is None:
        return expected is found
    return same_bits(expected, found) and (not found.is_floating_point() or bool(torch.isfinite(found).all()))


def _gradients(chunk: ModelChunk) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else chunk.parallel.local(parameter.grad)
        for name, parameter in chunk.module.named_parameters()
    }


def _buffers(chunk: ModelChunk) -> dict[str, Tensor | None]:
    return dict(chunk.module.named_buffers())
