"""Rewrites of a schedule: each takes the slots and the sides they belong to, and returns new slots.

`add_replay` makes recompute out of a plain schedule; `elide_replay` takes out what no backward needs (R8);
`delay_wgrad` keeps or merges the weight gradients (R13); `drop_untrained` takes out backward that reaches no
parameter (R6).
"""

from __future__ import annotations

from dataclasses import replace

from overlap.ir import Op, Schedule, Slot
from overlap.side import Side, Sides, stages_of


def drop_untrained(schedule: Schedule, sides: Sides) -> Schedule:
    """Take out B and W of stages that no gradient passes."""
    return tuple(
        slot
        for slot in schedule
        if slot.op not in (Op.BACKWARD, Op.WGRAD) or slot.key in sides[slot.microbatch].trained
    )


def delay_wgrad(schedule: Schedule, sides: Sides, *, delayed: bool) -> Schedule:
    """Keep the W slots where the order put them, or leave the weight gradients inside B."""
    del sides
    return schedule if delayed else tuple(slot for slot in schedule if slot.op is not Op.WGRAD)


def add_replay(schedule: Schedule, sides: Sides, *, first: bool = False) -> Schedule:
    """Turn F into N inside segments and put every segment's replay just before the first backward that needs it.

    A backward by adjoint needs nothing, so it is issued before the replay: its all-to-all overlaps with it. What the
    order already replays elsewhere (R10) stays there.

    Args:
        schedule: F, B, W and R slots.
        sides: Its sides.
        first: Put a replay before the segment's first backward even if that is by adjoint.
    """
    slots: list[Slot] = []
    placed = {(slot.microbatch, slot.key) for slot in schedule if slot.op is Op.REPLAY}
    replayed: set[tuple[int, int]] = set()
    for slot, stage in zip(schedule, stages_of(schedule, sides), strict=True):
        side = sides[slot.microbatch]
        segment = side.segment(stage)
        if slot.op is Op.FORWARD:
            slots.append(replace(slot, op=side.first_pass(stage)))
            continue
        if slot.op is Op.BACKWARD and segment is not None and (first or side.needs_activations(stage)):
            if (slot.microbatch, segment) not in replayed:
                whole = _whole_segment(slot.microbatch, side, segment)
                slots += [replay for replay in whole if (replay.microbatch, replay.key) not in placed]
            replayed.add((slot.microbatch, segment))
        slots.append(slot)
    return tuple(slots)


def _whole_segment(microbatch: int, side: Side, segment: int) -> list[Slot]:
    return [Slot(Op.REPLAY, microbatch, stage.layer, stage.name) for stage in side.stages(segment)]


def elide_replay(schedule: Schedule, sides: Sides) -> Schedule:
    """Take out the replay of stages whose backward needs no activation and whose outputs no replayed stage reads."""
    return tuple(
        slot for slot in schedule if slot.op is not Op.REPLAY or slot.key in sides[slot.microbatch].replay_needed
    )
