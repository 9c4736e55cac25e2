"""Pieces: the gradients that the readers of a value give, and whose memory they are."""

from __future__ import annotations

from overlap.ir import Lane, Op, Schedule
from overlap.side import Side, Sides, stages_of

Piece = tuple[str, int]
"""One reader's share of a value's gradient: (value name, place of the reader in its program)."""


def pieces_of(value: str, side: Side) -> tuple[Piece, ...]:
    """The pieces of a value, in the order in which they are added up (R3)."""
    if not side.needs_grad(value):
        return ()
    readers = [reader for reader in side.program.readers[value] if reader.key in side.trained]
    return tuple((value, side.program.position[reader.key]) for reader in reversed(readers))


def passed_on(schedule: Schedule, sides: Sides) -> set[tuple[int, Piece]]:
    """Per microbatch, the pieces that may be what a pipeline part received, handed on by compute.

    Autograd hands the gradient of a sum on as it is. Several pieces are added up in new memory: only one alone can be.
    """
    found: set[tuple[int, Piece]] = set()
    if not any(stage.lane is Lane.P2P for side in sides.values() for stage in side.program.stages):
        return found
    for slot, stage in zip(schedule, stages_of(schedule, sides), strict=True):
        if slot.op is not Op.BACKWARD or stage.allocates is not Lane.COMPUTE:
            continue
        side = sides[slot.microbatch]
        stages = side.program.stages
        received = (pieces_of(value, side) for value in stage.writes)
        alone = [pieces[0] for pieces in received if len(pieces) == 1]
        if any(stages[piece[1]].allocates is Lane.P2P or (slot.microbatch, piece) in found for piece in alone):
            place = side.program.position[stage.key]
            found.update((slot.microbatch, (value, place)) for value in stage.reads if side.needs_grad(value))
    return found
