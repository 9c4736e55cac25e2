"""Lead: the first layers of the second microbatch's forward, beside the last layers of the first one's.

A step begins with a forward that no backward runs beside: its transfers would have nothing to hide behind. The next
microbatch's forward is the only work there is; as much of it as the setting says is issued there, as late as possible,
since every layer of it keeps its input until its backward. The next plan runs the rest of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlap.ir import Lane, Program, Schedule, Slot
from overlap.lower import Key
from overlap.side import Side
from recompute.errors import ConfigError

IN_PIPELINE = "has no place in a pipeline, whose schedule says which forwards run before the first backward"
"""Why a pipeline refuses a lead."""


def check_lead(lead: int, layers: int) -> None:
    """Refuse a lead that the layers do not have.

    Args:
        lead: The setting.
        layers: Of the program, MTP depths among them.

    Raises:
        ConfigError: It is no integer from 0 to `layers`.
    """
    if isinstance(lead, bool) or not isinstance(lead, int) or not 0 <= lead <= layers:
        rule = f"must be an integer from 0 to the layers of the program ({layers})"
        raise ConfigError(field="lead", value=lead, rule=rule)


def check_second(lead: int, microbatches: int) -> None:
    """Refuse a lead where every step has one microbatch.

    Raises:
        ConfigError: No step has a second one.
    """
    if lead and microbatches == 1:
        raise ConfigError(field="lead", value=lead, rule="has no effect on a step of one microbatch: leave it out")


def leading(side: Side, lead: int) -> Side:
    """The side as it runs its first layers forward, ahead of the rest."""
    return replace(side, stops=lead)


def remaining(side: Side, lead: int) -> Side:
    """The side as it runs forward what its lead left."""
    return replace(side, skips=lead)


def handed_over(side: Side, survivors: frozenset[Key]) -> frozenset[Key]:
    """The values that a lead leaves: what the rest of its forward reads, and what survives the whole forward.

    Args:
        side: As it runs forward what the lead left.
        survivors: What the microbatch's backward reads of its first pass.
    """
    rest = [stage for stage in side.program.stages if stage.key in side.passes]
    read = {(value, 0) for stage in rest for value in stage.reads}
    later = {value for stage in rest for value in stage.writes}
    return frozenset(key for key in read | survivors if key[0] not in later)


def interleave(front: Schedule, lead: Schedule, program: Program) -> Schedule:
    """Issue a lead beside the end of a whole forward, in turns: each up to and with its next transfers.

    Both are cut into pieces, and the last of the one follows the last of the other, and so on to the lead's first:
    while the transfers of one piece run, the other forward's next piece computes. A layer without transfers is a piece
    too. The lead's pieces are the first ones of the other forward, so each stage of it follows the other's.

    Args:
        front: First passes of a microbatch, all of them.
        lead: First passes of the next one, the first of the same sequence.
        program: Of both.

    Returns:
        All slots of both, each in its own order.
    """
    ahead, behind = _pieces(front, program), _pieces(lead, program)
    alone = len(ahead) - len(behind)
    slots = [slot for piece in ahead[:alone] for slot in piece]
    for own, other in zip(ahead[alone:], behind, strict=True):
        slots += [*own, *other]
    return tuple(slots)


def _pieces(schedule: Schedule, program: Program) -> list[Sequence[Slot]]:
    """The slots up to and with each run of transfers or layer without any, and those after the last, if any."""
    transfers = [program.by_key[slot.key].lane is not Lane.COMPUTE for slot in schedule]
    busy = {slot.layer for slot, moves in zip(schedule, transfers, strict=True) if moves}
    pieces: list[Sequence[Slot]] = []
    begin = 0
    for end, slot in enumerate(schedule, 1):
        last = end == len(schedule)
        quiet = slot.layer is not None and slot.layer not in busy and (last or schedule[end].layer != slot.layer)
        if quiet or (transfers[end - 1] and (last or not transfers[end])):
            pieces.append(schedule[begin:end])
            begin = end
    return [*pieces, schedule[begin:]]
