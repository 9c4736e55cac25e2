"""place_transfers: where the sends and receives of pipeline parts stand in a schedule.

A part hands over as soon as it can and waits as late as it can. Where forward and backward run side by side, the end
of the last forward layer is moved ahead of the last attention backward, so that this hides the forward send, and the
backward send is hidden by that attention's weight gradient. An order that runs that backward before the forward
layer's transfers keeps it there.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap.ir import Lane, Op, Schedule, Slot, StageKey
from overlap.side import Sides

RECEIVE = "recv"
"""The stage of a pipeline part that takes the residual state from the part before; its adjoint returns the gradient."""
SEND = "send"
"""The stage that hands it to the part after; its adjoint takes the gradient."""
_RECEIVE: StageKey = (None, RECEIVE)
_SEND: StageKey = (None, SEND)
_FORWARDS = (Op.FORWARD, Op.NO_GRAD)


def place_transfers(schedule: Schedule, sides: Sides) -> Schedule:
    """Move the slots of the stages `recv` and `send`; a schedule without them stays as it is.

    Where both directions send, the forward one comes first: ranks must agree on the order of their messages.

    Args:
        schedule: Without S and L, which follow where these go.
        sides: Its sides; at most one runs forward and one backward.
    """
    slots = [slot for slot in schedule if slot.key not in (_RECEIVE, _SEND)]
    moved = {(slot.op in _FORWARDS, slot.key): slot for slot in schedule if slot.key in (_RECEIVE, _SEND)}
    if not moved:
        return schedule
    if (receive := moved.get((True, _RECEIVE))) is not None:
        slots.insert(_first(slots, receive, _readers(receive, sides), default=0), receive)
    if (send := moved.get((True, _SEND))) is not None:
        slots = _before_attention(slots, sides)
        slots.insert(_last(slots, send, _producer(send, sides)) + 1, send)
    if (send := moved.get((False, _SEND))) is not None:
        slots.insert(_first(slots, send, _producer(send, sides), default=len(slots)), send)
    if (receive := moved.get((False, _RECEIVE))) is not None:
        after = [_last(slots, receive, _readers(receive, sides))]
        after += [place for place, slot in enumerate(slots) if slot.op in _FORWARDS and slot.key == _SEND]
        slots.insert(max(after) + 1, receive)
    return tuple(slots)


def _readers(slot: Slot, sides: Sides) -> frozenset[StageKey]:
    """The stages that read what `recv` writes."""
    program = sides[slot.microbatch].program
    return frozenset(reader.key for value in program.by_key[slot.key].writes for reader in program.readers[value])


def _producer(slot: Slot, sides: Sides) -> frozenset[StageKey]:
    """The stage whose state `send` reads."""
    program = sides[slot.microbatch].program
    return frozenset(program.producers[value].key for value in program.by_key[slot.key].reads)


def _places(slots: Sequence[Slot], like: Slot, keys: frozenset[StageKey]) -> list[int]:
    """Where the same microbatch's slots of the same direction stand for these stages."""
    forward = like.op in _FORWARDS
    return [
        place
        for place, slot in enumerate(slots)
        if slot.microbatch == like.microbatch
        and slot.key in keys
        and (slot.op in _FORWARDS if forward else slot.op is Op.BACKWARD)
    ]


def _first(slots: Sequence[Slot], like: Slot, keys: frozenset[StageKey], default: int) -> int:
    return min(_places(slots, like, keys), default=default)


def _last(slots: Sequence[Slot], like: Slot, keys: frozenset[StageKey]) -> int:
    return max(_places(slots, like, keys), default=-1)


def _before_attention(slots: list[Slot], sides: Sides) -> list[Slot]:
    """Move what follows the last forward layer's transfers ahead of the last attention backward."""
    attention = max((place for place, s in enumerate(slots) if s.op is Op.BACKWARD and s.layer is not None), default=-1)
    tail = [slot for slot in slots[attention + 1 :] if slot.op in _FORWARDS]
    stages = [sides[slot.microbatch].program.by_key[slot.key] for slot in tail]
    short = len({stage.layer for stage in stages}) == 1 and all(stage.lane is Lane.COMPUTE for stage in stages)
    if attention < 0 or not short:
        return slots
    rest = [slot for slot in slots[attention:] if slot not in tail]
    return [*slots[:attention], *tail, *rest]
