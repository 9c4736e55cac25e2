"""What a Program's stages may declare: every value one writer, written before it is read, layers in order.

Checked when the Program is made; what its stages really do is check's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from overlap.errors import ProgramError

if TYPE_CHECKING:
    from overlap.ir import Program, Stage, StageKey

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""A stage name."""


def check_program(program: Program) -> None:
    """Check that every value has one writer and is written before it is read, and that layers stand in order.

    Raises:
        ProgramError: Names the stage, the value and the rule.
    """
    known: set[str] = set()
    for source in program.inputs:
        if source.name in known:
            raise ProgramError(f"input {source.name!r} is declared twice")
        known.add(source.name)
    keys: set[StageKey] = set()
    owners: dict[int, Stage] = {}
    for stage in program.stages:
        if NAME.fullmatch(stage.name) is None:
            raise ProgramError(f"stage {stage.label}: a stage name is a word, so that slots print and parse")
        if stage.key in keys:
            raise ProgramError(f"stage {stage.label} stands twice: a layer's stage names must differ")
        keys.add(stage.key)
        for value in stage.reads:
            if value not in known:
                raise ProgramError(f"stage {stage.label} reads {value!r}, which no earlier stage writes")
        if len(set(stage.reads)) != len(stage.reads):
            raise ProgramError(f"stage {stage.label} reads a value twice: {stage.reads}; pass it once")
        for value in stage.writes:
            if value in known:
                raise ProgramError(f"stage {stage.label} writes {value!r} a second time: values are single-assignment")
            known.add(value)
        _check_declarations(stage)
        for parameter in stage.parameters:
            other = owners.setdefault(id(parameter), stage)
            if other is not stage:
                raise ProgramError(
                    f"stages {other.label} and {stage.label} read the same parameter: "
                    "make it a value with ProgramBuilder.parameter(), so that its uses are summed in one order (R3)"
                )
    _check_aliases(program)
    _check_layers_contiguous(program.stages)
    _check_layer_numbers(program)
    _check_ends(program)


def _check_ends(program: Program) -> None:
    """Check inputs, losses and outputs against the stages that read and write them."""
    for source in program.inputs:
        if not program.readers[source.name]:
            raise ProgramError(f"input {source.name!r} is read by no stage")
    for name in [loss.value for loss in program.losses] + list(program.outputs):
        if name not in program.producers:
            raise ProgramError(f"output {name!r} is written by no stage")
    losses: set[str] = set()
    for loss in program.losses:
        if program.nondiff(loss.value):
            raise ProgramError(f"loss {loss.value!r} is declared without gradient, so it starts no backward")
        if loss.value in losses:
            raise ProgramError(f"loss {loss.value!r} is declared twice: add the weights up")
        losses.add(loss.value)


def _check_layer_numbers(program: Program) -> None:
    """Segments are formed by number (R1), so numbers are places: decoder layers from the first up, then MTP depths."""
    layers, first = program.layers, program.first_layer
    if layers != tuple(range(first, first + len(layers))):
        raise ProgramError(f"layers are numbered {layers}: number them from {first} up, in execution order")
    mtp = layers[len(layers) - len(program.mtp_layers) :]
    if program.mtp_layers != frozenset(mtp):
        raise ProgramError(f"MTP depths are layers {sorted(program.mtp_layers)}: they come after the decoder layers")


def _check_declarations(stage: Stage) -> None:
    declared: Sequence[tuple[str, Iterable[str]]] = (
        ("pins", stage.pins),
        ("nondiff", stage.nondiff),
        ("effects", (effect.value for effect in stage.effects)),
    )
    for what, values in declared:
        for value in values:
            if value not in stage.writes:
                raise ProgramError(f"stage {stage.label}: {what} names {value!r}, which it does not write")
    if not set(stage.sheds) <= set(range(len(stage.reads))):
        raise ProgramError(
            f"stage {stage.label}: sheds={stage.sheds} must be places among its {len(stage.reads)} reads"
        )
    for value in stage.pins:
        if value not in stage.nondiff:
            raise ProgramError(f"stage {stage.label} pins {value!r}: only a value without gradient can be pinned (R7)")
    if stage.adjoint is not None and stage.graph_only is not None:
        raise ProgramError(f"stage {stage.label} has an adjoint and graph_only: with an adjoint it needs no graph (R8)")
    if stage.adjoint is not None and (stage.parameters or stage.wgrad):
        raise ProgramError(f"stage {stage.label} has an adjoint and parameters: an adjoint gives input gradients only")


def _check_aliases(program: Program) -> None:
    """What passes on memory must be given the compute lane's (R14), in backward too: a sum of two would be new."""
    losses = {loss.value for loss in program.losses}
    for stage in (stage for stage in program.stages if stage.aliases):
        for value in (value for value in stage.writes if not program.nondiff(value)):
            sources = [reader.allocates for reader in program.readers[value]]
            if value in losses or sources not in ([], [stage.allocates]):
                raise ProgramError(
                    f"stage {stage.label} passes on memory: {value!r} needs a single reader, on the compute lane (R14)"
                )
        for value in stage.reads:
            writer = program.producers.get(value)
            if writer is not None and not program.nondiff(value) and writer.allocates is not stage.allocates:
                raise ProgramError(f"stage {stage.label} passes on memory: {value!r} is not the compute lane's (R14)")


def _check_layers_contiguous(stages: Sequence[Stage]) -> None:
    closed: set[int] = set()
    current: int | None = None
    between: Stage | None = None
    for stage in stages:
        if stage.layer != current:
            if current is not None:
                closed.add(current)
            current = stage.layer
        if stage.layer is None:
            between = stage if closed else None
        elif stage.layer in closed:
            raise ProgramError(f"stage {stage.label} comes after another layer began: a layer's stages are contiguous")
        elif between is not None:
            # It would be issued with the epilogue, after its readers.
            raise ProgramError(f"stage {between.label} stands between two layers: make it a stage of one of them")
