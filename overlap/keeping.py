"""Segment inputs that wait elsewhere (keep="host" or "sharded"): where they leave the device, and where they return.

Rewrites the schedule: S right after the slot that wrote an input, L one segment before its replay; and says what
lowering must add for them: when the first copy is let go, and what a return waits for.

NOTE [ How an input leaves and returns ]
1. Generations of its value: 0 as the first pass wrote it, 2 elsewhere (STORED), 3 returned (LOADED).
2. S reads 0 and writes 2 on the copy lane, while the first pass goes on. When the layer that reads the input is done,
   a slot of the writer's lane waits for S, and 0 is let go there: so only what is on its way is on the device. A lane
   without such a slot (a pipeline part that receives and does not send) has the memory back with the next backward.
3. L stands before the first replay of the segment whose backward comes before; the first of all stands at the start
   of backward. It waits for the compute slot issued before it: else the copies would all come back at once.
4. A value that a graph keeps anyway, a fed value, a pinned one and a shared parameter stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from overlap.ir import Lane, Op, Schedule, Slot, Stage, StageKey
from overlap.side import Side, Sides, stages_of

STORED, LOADED = 2, 3
_FORWARDS = (Op.FORWARD, Op.NO_GRAD)

Follows = tuple[tuple[Op, StageKey], Lane]
"""The end of a slot that another one waits for beside what it reads, and that slot's lane."""


def add_transfers(schedule: Schedule, sides: Sides) -> Schedule:
    """Put the S and L slots of every side that keeps its segment inputs elsewhere."""
    loads = _loads(schedule, sides)
    slots: list[Slot] = []
    for index, (slot, stage) in enumerate(zip(schedule, stages_of(schedule, sides), strict=True)):
        slots += loads.get(index, ())
        slots.append(slot)
        if slot.op in _FORWARDS and stored_writes(stage, sides[slot.microbatch]):
            slots.append(Slot(Op.STORE, slot.microbatch, slot.layer, slot.stage))
    return tuple(slots)


def stored_writes(stage: Stage, side: Side) -> tuple[str, ...]:
    """What a stage writes that waits elsewhere."""
    return tuple(value for value in stage.writes if value in side.stored)


def generation(value: str, stage: Stage, side: Side) -> int:
    """Which copy of a value the replay of `stage` reads, if the value's writer is not replayed with it."""
    return LOADED if value in side.stored and not side.together(value, stage) else 0


def home(key: tuple[str, int], side: Side) -> Lane:
    """The lane that allocates a copy of a written value."""
    value, copy = key
    return side.program.producers[value].lane if copy < STORED else Lane.COPY


def allocator(key: tuple[str, int], side: Side) -> Lane:
    """The lane whose memory a copy of a value is: not its writer's, if that passes on what it was given.

    A fed value is the compute lane's: a step copies there what replays read, and nobody else holds the copy.
    """
    if key[1] >= STORED:
        return home(key, side)
    producer = side.program.producers.get(key[0])
    return Lane.COMPUTE if producer is None else producer.owner(key[0])


def writer(key: tuple[str, int], side: Side) -> Op:
    """The operation of the slot that writes a copy of a value."""
    value, copy = key
    return (side.first_pass(side.program.producers[value]), Op.REPLAY, Op.STORE, Op.LOAD)[copy]


def lets_go(schedule: Schedule, sides: Sides) -> Mapping[int, tuple[str, ...]]:
    """Per slot of a first pass, by place, the stored values whose first copy is let go there."""
    last: dict[tuple[int, StageKey], list[str]] = {}
    for microbatch, side in sides.items():
        for value in side.stored:
            last.setdefault((microbatch, last_stage(value, side).key), []).append(value)
    firsts = {place: (slot.microbatch, slot.key) for place, slot in enumerate(schedule) if slot.op in _FORWARDS}
    return {place: tuple(last[first]) for place, first in firsts.items() if first in last}


def follows(schedule: Schedule, sides: Sides) -> Mapping[int, tuple[Follows, ...]]:
    """Per slot, by place, what it waits for beside what it reads.

    A slot that lets values go waits for their S if its lane is the writer's: another lane would get nothing back.
    """
    found: dict[int, tuple[Follows, ...]] = {}
    for place, follow in {**_paces(schedule, sides), **_returned(schedule, sides)}.items():
        found[place] = (follow,)
    for place, values in lets_go(schedule, sides).items():
        program = sides[schedule[place].microbatch].program
        writers = [program.producers[value] for value in values]
        lane = program.by_key[schedule[place].key].lane
        found[place] = tuple(((Op.STORE, stage.key), Lane.COPY) for stage in writers if stage.lane is lane)
    return found


def _loads(schedule: Schedule, sides: Sides) -> dict[int, list[Slot]]:
    """The L slots, by the place in the schedule that they go before."""
    starts: dict[int, dict[int, int]] = {}
    """Per microbatch, the place of the first replay of each segment, in issue order."""
    backward: dict[int, int] = {}
    for place, (slot, stage) in enumerate(zip(schedule, stages_of(schedule, sides), strict=True)):
        if slot.op in (Op.REPLAY, Op.BACKWARD):
            backward.setdefault(slot.microbatch, place)
        segment = sides[slot.microbatch].segment(stage)
        if slot.op is Op.REPLAY and segment is not None:
            starts.setdefault(slot.microbatch, {}).setdefault(segment, place)
    found: dict[int, list[Slot]] = {}
    for microbatch, firsts in starts.items():
        side = sides[microbatch]
        before = dict(zip(firsts, [backward[microbatch], *firsts.values()], strict=False))
        for stage in side.program.stages:
            readers = [
                side.segment(reader) for value in stored_writes(stage, side) for reader in _replayed(value, side)
            ]
            places = [before[segment] for segment in readers if segment is not None]
            if places:
                found.setdefault(min(places), []).append(Slot(Op.LOAD, microbatch, stage.layer, stage.name))
    return found


def _replayed(value: str, side: Side) -> list[Stage]:
    """The replayed stages that read a stored value from outside their segment."""
    readers = side.program.readers[value]
    return [stage for stage in readers if stage.key in side.replay_needed and not side.together(value, stage)]


def last_stage(value: str, side: Side) -> Stage:
    """The stage whose first pass lets a stored value go: of the writer's lane, in the layer that reads it last.

    What a pipeline part receives goes with its `send`, if both are of that lane.
    """
    program = side.program
    reader = program.readers[value][-1]
    lane = program.producers[value].lane
    after = [stage for stage in program.stages[program.position[reader.key] :] if stage.lane is lane]
    inside = [stage for stage in after if stage.layer == reader.layer]
    return (*inside[-1:], *after[:1], reader)[0]


def _paces(schedule: Schedule, sides: Sides) -> Mapping[int, Follows]:
    """Per L slot, by place, the compute slot of its microbatch that was issued last."""
    last: dict[int, Follows] = {}
    found: dict[int, Follows] = {}
    for place, (slot, stage) in enumerate(zip(schedule, stages_of(schedule, sides), strict=True)):
        if slot.op is Op.LOAD and slot.microbatch in last:
            found[place] = last[slot.microbatch]
        elif slot.op not in (Op.LOAD, Op.STORE) and stage.lane is Lane.COMPUTE:
            last[slot.microbatch] = ((slot.op, slot.key), Lane.COMPUTE)
    return found


def _returned(schedule: Schedule, sides: Sides) -> Mapping[int, Follows]:
    """Per B slot, by place, the L of what its stage wrote, if none of that lane's first passes could wait for the S.

    So its lane has the memory back that copies used until then: the copy lane is in order.
    """
    loaded = {(slot.microbatch, slot.key) for slot in schedule if slot.op is Op.LOAD}
    found: dict[int, Follows] = {}
    for place, (slot, stage) in enumerate(zip(schedule, stages_of(schedule, sides), strict=True)):
        if slot.op is Op.BACKWARD and (slot.microbatch, slot.key) in loaded:
            side = sides[slot.microbatch]
            if any(last_stage(value, side).lane is not stage.lane for value in stored_writes(stage, side)):
                found[place] = ((Op.LOAD, slot.key), Lane.COPY)
    return found
