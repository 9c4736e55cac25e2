"""check_stages: does every stage do what it declares? Run once, before the first training step.

One forward of one microbatch, stage by stage, each with a graph that is dropped at once; parameters, buffers and
generators are afterwards as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlap.check_graph_only import check_graph_only
from overlap.check_state import ChangingState
from overlap.chunk import ModelChunk
from overlap.engine import Feeds
from overlap.errors import ProgramError
from overlap.ir import Lane, Program, Stage
from recompute.precision import Precision, capture_precision, no_autocast
from recompute.rng import default_generators, seeded, stage_seed
from recompute.state import as_of, take

Run = Callable[..., tuple[Any, ...]]
"""run(stage, leaves, pinned=None) calls the stage's forward with a graph."""


def check_stages(chunk: ModelChunk, feeds: Feeds) -> None:
    """Run each stage once and compare with its declaration.

    In the precision of a step, and like a step without the caller's cache of casted weights, which would serve the
    caller after an optimizer step. Stages get copies of what is fed.

    Raises:
        ProgramError: A stage reads a trainable parameter, changes a buffer or draws random numbers without declaring
            it, draws from a generator that no step seeds, changes what it reads, writes other values than it declares,
            has an adjoint of wrong length or shape, or a graph_only that leaves another graph; a loss is no scalar.
    """
    for stage in chunk.program.stages:
        if not all(torch.is_tensor(buffer) for buffer in stage.state):
            raise ProgramError(f"stage {stage.label}: state={stage.state!r} must be the tensors that it changes")
    device_type = chunk.device.type
    run = partial(_run, chunk, capture_precision(device_type))
    with no_autocast(device_type):
        _check_stages(chunk, feeds, run)


def _check_stages(chunk: ModelChunk, feeds: Feeds, run: Run) -> None:
    program = chunk.program
    moving = [buffer for item in program.step_states for buffer in item.buffers]
    last = {value: stages[-1].key for value, stages in program.readers.items() if stages}
    kept = {loss.value for loss in program.losses}
    values: dict[str, Any] = dict(feeds)
    buffers = dict(chunk.module.named_buffers())
    saved = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    changing = ChangingState(program, buffers)
    modules = [*chunk.module.named_modules()]
    generators = default_generators(chunk.device)
    states = [generator.get_state() for generator in generators]
    # Kernels of a device may add in another order each time.
    repeats = chunk.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    try:
        for stage in program.stages:
            inputs = [_copy(values[name]) if name in feeds else values[name] for name in stage.reads]
            versions = [_version(value) for value in inputs]
            before = {name: buffer._version for name, buffer in buffers.items()}
            with changing.seen_by(stage):
                outputs = run(stage, _new_leaves(stage, program, inputs))
            _check_reads(stage, inputs, versions, [values[name] for name in stage.reads])
            _check_draws(stage, generators, states)
            for name, buffer in buffers.items():
                changed = buffer._version != before[name] or not same_bits(buffer, saved[name])
                if changed and not any(buffer is declared for declared in (*stage.state, *moving)):
                    raise ProgramError(
                        f"stage {stage.label} changes buffer {name!r} in place: declare it in state=, or write the "
                        "change as a value with an effect (R5)"
                    )
                with torch.no_grad():
                    buffer.data.copy_(saved[name])
            _check_parameters(stage, outputs, chunk, modules)
            _check_storage(stage, program, inputs, outputs)
            changing.check_written(stage, outputs)
            values.update(zip(stage.writes, outputs, strict=True))
            _check_adjoint(stage, program, inputs, values, generators)
            values.update((n, v.detach()) for n, v in zip(stage.writes, outputs, strict=True) if not program.nondiff(n))
            del outputs
            check_graph_only(
                stage, partial(_new_leaves, stage, program, inputs), run,
                [values[name] for name in stage.writes], lambda output: [*_leaves(output)], same_bits,
            )  # fmt: skip
            if repeats and stage.draws_rng and stage.lane is Lane.COMPUTE:
                _check_again(stage, program, inputs, values, run, moving)
            _check_draws(stage, generators, states)
            del inputs
            # As in a step, a value dies with its last reader: the check must fit where the step fits.
            for value in (*stage.reads, *stage.writes):
                if last.get(value, stage.key) == stage.key and value not in kept:
                    values.pop(value, None)
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.data.copy_(saved[name])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    for loss in program.losses:
        if values[loss.value].dim() != 0:
            raise ProgramError(f"loss {loss.value!r} has shape {tuple(values[loss.value].shape)}: a loss is a scalar")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of shape, dtype and every bit: the sign of zero and NaN payloads count."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def _new_leaves(stage: Stage, program: Program, inputs: Sequence[Any]) -> list[Any]:
    return [
        v if program.nondiff(name) else v.detach().requires_grad_() for name, v in zip(stage.reads, inputs, strict=True)
    ]


def _run(
    chunk: ModelChunk,
    precision: Precision | None,
    stage: Stage,
    leaves: Sequence[Any],
    pinned: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    keywords = {"pinned": pinned} if stage.pins else {}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if precision is not None:
            stack.enter_context(precision())
        if stage.context is not None:
            stack.enter_context(stage.context())
        if stage.draws_rng:
            seed = stage_seed(chunk.seed, -1, chunk.first_draw(1), stage.layer, stage.name)
            stack.enter_context(seeded(seed, default_generators(chunk.device)))
        result = stage.forward(*leaves, **keywords)
    outputs = result if len(stage.writes) != 1 else (result,)
    # A tensor has a length too, and could be taken apart by mistake.
    if type(outputs) not in {tuple, list}:
        raise ProgramError(f"stage {stage.label} returns one {type(outputs).__name__}, but writes {len(stage.writes)}")
    if len(outputs) != len(stage.writes):
        raise ProgramError(f"stage {stage.label} returns {len(outputs)} values, but writes {len(stage.writes)}")
    for name, output in zip(stage.writes, outputs, strict=True):
        _check_kind(stage, name, output)
    return tuple(outputs)


def _check_kind(stage: Stage, name: str, output: Any) -> None:
    """A value with gradient is a tensor that can have one; a value without must not drag a graph along."""
    if name in stage.nondiff:
        if torch.is_tensor(output) and output.requires_grad:
            raise ProgramError(f"stage {stage.label} writes {name!r} as a value without gradient: detach it")
        return
    what = str(output.dtype) if torch.is_tensor(output) else type(output).__name__
    if not torch.is_tensor(output) or not (output.is_floating_point() or output.is_complex()):
        raise ProgramError(f"stage {stage.label} writes {name!r}, of type {what}, with a gradient: put it in nondiff=")


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) and value.layout is torch.strided else value


def _version(value: Any) -> int:
    return value._version if torch.is_tensor(value) and not value.is_inference() else 0


def _check_reads(stage: Stage, inputs: Sequence[Any], versions: Sequence[int], values: Sequence[Any]) -> None:
    """What a stage reads is as it was; of what is fed, which it got as a copy, every bit."""
    for name, given, version, value in zip(stage.reads, inputs, versions, values, strict=True):
        if _version(given) != version or (given is not value and not same_bits(given, value)):
            raise ProgramError(
                f"stage {stage.label} changes {name!r}, which it reads, in place: change a copy, since its other "
                "readers and a replay read it too (R5)"
            )


def _check_draws(stage: Stage, generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if not torch.equal(generator.get_state(), state):
            raise ProgramError(f"stage {stage.label} draws random numbers: declare draws_rng=True (R4)")


def _check_again(
    stage: Stage, program: Program, inputs: Sequence[Any], values: Mapping[str, Any], run: Run, moving: Sequence[Tensor]
) -> None:
    """A stage that draws gives the same bits when it runs again, as in a replay: its seed decides all that it draws."""
    buffers = [*stage.state, *moving]
    with as_of(buffers, take(buffers)):
        outputs = run(stage, _new_leaves(stage, program, inputs), tuple(values[name] for name in stage.pins))
    for name, output in zip(stage.writes, outputs, strict=True):
        if torch.is_tensor(output) and not same_bits(output, values[name]):
            raise ProgramError(
                f"stage {stage.label} gives another {name!r} when it runs again from the same seed: draw from torch's "
                "default generators only (R4)"
            )


def _check_storage(stage: Stage, program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """What a stage writes must be its lane's memory, not a view of what another lane allocated (R14)."""
    own = dict(zip(stage.writes, outputs, strict=True))
    if stage.aliases:
        _check_passed_on(stage, inputs, [own.pop(name) for name in stage.writes if name not in stage.nondiff], "writes")
    producers = program.producers
    foreign = {
        value.untyped_storage()._cdata: name
        for name, value in zip(stage.reads, inputs, strict=True)
        if torch.is_tensor(value) and name in producers and producers[name].owner(name) is not stage.lane
    }
    for name, value in own.items():
        if torch.is_tensor(value) and value.untyped_storage()._cdata in foreign:
            raise ProgramError(
                f"stage {stage.label} hands on the storage of {foreign[value.untyped_storage()._cdata]!r} as {name!r}, "
                "which another lane may own: return a copy (R14)"
            )


def _check_passed_on(stage: Stage, given: Sequence[Any], passed: Sequence[Tensor], how: str) -> None:
    known = {value.untyped_storage()._cdata for value in given if torch.is_tensor(value)}
    if any(value.untyped_storage()._cdata not in known for value in passed):
        raise ProgramError(f"stage {stage.label} declares that it passes on memory, but {how} new memory (R14)")


def _check_parameters(
    stage: Stage, outputs: Sequence[Any], chunk: ModelChunk, modules: Sequence[tuple[str, nn.Module]]
) -> None:
    # by name: while a sharded parameter is together, another object stands in its place
    declared = {chunk.parameter_names.get(id(parameter)) for parameter in stage.parameters}
    names = {
        id(parameter): f"{prefix}.{name}" if prefix else name
        for prefix, module in reversed(modules)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for output in outputs:
        if torch.is_tensor(output):
            for leaf in _leaves(output):
                if id(leaf) in names and names[id(leaf)] not in declared:
                    raise ProgramError(
                        f"stage {stage.label} reads parameter {names[id(leaf)]!r}: declare it in parameters= (R6), "
                        "or pass it as a value if several stages read it (R3)"
                    )


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Leaf tensors that a graph ends in."""
    seen: set[Any] = set()
    todo = [output.grad_fn]
    if output.grad_fn is None and output.requires_grad:
        yield output
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        todo += [following for following, _ in node.next_functions]


def _check_adjoint(
    stage: Stage,
    program: Program,
    inputs: Sequence[Any],
    values: dict[str, Any],
    generators: Sequence[torch.Generator],
) -> None:
    if stage.adjoint is None:
        return
    gradients = tuple(None if program.nondiff(name) else torch.zeros_like(values[name]) for name in stage.writes)
    pinned = tuple(
        v
        for name, v in zip(stage.reads, inputs, strict=True)
        if name in program.producers and name in program.producers[name].pins
    ) + tuple(values[name] for name in stage.pins)
    with torch.no_grad(), seeded(0, generators if stage.draws_rng else ()):
        results = stage.adjoint(gradients, pinned)
    if stage.aliases:
        _check_passed_on(stage, gradients, [g for g in results if g is not None], "gives gradients in")
    if len(results) != len(stage.reads):
        raise ProgramError(
            f"stage {stage.label}: its adjoint returns {len(results)} gradients for {len(stage.reads)} reads"
        )
    for name, value, gradient in zip(stage.reads, inputs, results, strict=True):
        if gradient is not None and gradient.shape != value.shape:
            raise ProgramError(
                f"stage {stage.label}: its adjoint gives {name!r} a gradient of shape {tuple(gradient.shape)}, "
                f"but the value has shape {tuple(value.shape)}"
            )
