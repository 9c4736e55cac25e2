"""validate: refuse a schedule that breaks a rule, before anything runs, showing the faulty slot."""

from __future__ import annotations

from overlap.errors import ScheduleError
from overlap.ir import WEIGHTS, Op, Schedule, Slot, Stage, StageKey
from overlap.keeping import stored_writes
from overlap.side import Side, Sides, stages_of

_FORWARDS = (Op.FORWARD, Op.NO_GRAD)
_Place = tuple[int, StageKey]
_Issued = dict[Op, dict[_Place, int]]


def validate(schedule: Schedule, sides: Sides) -> None:
    """Check that every slot finds what it needs.

    A value may come from an earlier schedule of the same microbatch (its forward ran before) only if this schedule
    does not run that microbatch's forward itself.

    Raises:
        ScheduleError: A stage is unknown or issued twice; a slot reads a value not written yet; a backward comes
            before its graph exists or before the backward (or weight gradient) of a reader; a weight gradient comes
            before its backward or is none; a microbatch's forward or backward is not complete.
    """
    for index, slot in enumerate(schedule):
        if slot.microbatch not in sides or slot.key not in sides[slot.microbatch].program.by_key:
            raise ScheduleError(f"{slot} issues a stage that its program does not have", schedule, index)
    issued: _Issued = {op: {} for op in Op}
    runs_forward = {slot.microbatch for slot in schedule if slot.op in _FORWARDS}
    for index, (slot, stage) in enumerate(zip(schedule, stages_of(schedule, sides), strict=True)):
        place = (slot.microbatch, slot.key)
        side = sides[slot.microbatch]
        fault = ""
        if place in issued[slot.op]:
            fault = f"was already issued at position {issued[slot.op][place]}"
        elif slot.op in _FORWARDS:
            fault = _forward_fault(slot, stage, side, issued) or _state_fault(slot, stage, sides, issued)
        elif slot.op is Op.REPLAY:
            fault = _replay_fault(slot, stage, side, issued, slot.microbatch in runs_forward)
        elif slot.op is Op.BACKWARD:
            fault = _backward_fault(slot, stage, side, issued, slot.microbatch in runs_forward)
        elif slot.op in (Op.STORE, Op.LOAD):
            fault = _transfer_fault(slot, stage, side, issued, slot.microbatch in runs_forward)
        elif slot.op is Op.WGRAD:
            fault = "" if place in issued[Op.BACKWARD] else "precedes its backward"
            fault = fault if stage.wgrad else "delays weight gradients of a stage that has none to delay"
        else:
            fault = "calls a hook, but names a stage"
        if fault:
            raise ScheduleError(f"{slot} {fault}", schedule, index)
        issued[slot.op][place] = index
    _check_complete(schedule, sides, issued)


def _forward_fault(slot: Slot, stage: Stage, side: Side, issued: _Issued) -> str:
    if slot.key not in side.passes:
        return "belongs to the part of its forward that another plan runs"
    if slot.op is not side.first_pass(stage):
        return f"should be {side.first_pass(stage).value}: a first pass keeps its graph outside segments only"
    for value in stage.reads:
        producer = side.program.producers.get(value)
        if producer is None or (slot.microbatch, producer.key) in issued[side.first_pass(producer)]:
            continue
        if not side.skips or producer.key in side.passes:
            return f"reads {value!r}, which no earlier slot writes"
    return ""


def _state_fault(slot: Slot, stage: Stage, sides: Sides, issued: _Issued) -> str:
    """State that changes in place must see the microbatches in their order, also where two run forward.

    Whoever else declares it must be done with it too: a buffer of several layers sees one microbatch after another.
    """
    side = sides[slot.microbatch]
    if not stage.state or side.stops is None:
        return ""
    done = {key for op in _FORWARDS for mb, key in issued[op] if mb != slot.microbatch}
    own = {id(buffer) for buffer in stage.state}
    late = [s for s in side.program.stages if s.key not in done and any(id(buffer) in own for buffer in s.state)]
    return f"changes state in place before {late[0].label} of the microbatch ahead did" if late else ""


def _replay_fault(slot: Slot, stage: Stage, side: Side, issued: _Issued, runs_forward: bool) -> str:
    segment = side.segment(stage)
    if segment is None:
        return "replays a stage that belongs to no segment"
    if runs_forward and (slot.microbatch, slot.key) not in issued[Op.NO_GRAD]:
        return "replays a stage before its first pass"
    for value in stage.reads:
        producer = side.program.producers.get(value)
        if producer is None or value in producer.pins:
            continue
        if not side.together(value, stage):
            if value in side.stored and (slot.microbatch, producer.key) not in issued[Op.LOAD]:
                return f"reads {value!r}, which waits elsewhere and was not brought back"
            continue
        if (slot.microbatch, producer.key) not in issued[Op.REPLAY]:
            return f"reads {value!r} of its own segment, whose producer {producer.label} is not replayed before it"
    return ""


def _transfer_fault(slot: Slot, stage: Stage, side: Side, issued: _Issued, runs_forward: bool) -> str:
    if not stored_writes(stage, side):
        return "moves nothing: the stage writes no segment input that is kept elsewhere"
    place = (slot.microbatch, slot.key)
    if slot.op is Op.STORE:
        return "" if place in issued[side.first_pass(stage)] else "moves what no earlier slot writes"
    return "brings back what never left" if runs_forward and place not in issued[Op.STORE] else ""


def _backward_fault(slot: Slot, stage: Stage, side: Side, issued: _Issued, runs_forward: bool) -> str:
    mb = slot.microbatch
    if slot.key not in side.trained:
        return "runs backward of a stage that no gradient passes"
    if side.needs_activations(stage) and side.segment(stage) is not None and (mb, slot.key) not in issued[Op.REPLAY]:
        return "has no graph: replay the stage before it"
    if runs_forward and (mb, slot.key) not in issued[side.first_pass(stage)]:
        return "precedes its forward"
    for value in stage.writes:
        for reader in side.program.readers[value]:
            if reader.key in side.trained and side.needs_grad(value) and (mb, reader.key) not in issued[Op.BACKWARD]:
                return f"precedes the backward of {reader.label}, which reads its {value!r}"
    return ""


def _check_complete(schedule: Schedule, sides: Sides, issued: _Issued) -> None:
    for microbatch, side in sides.items():
        forwards = {key for op in _FORWARDS for mb, key in issued[op] if mb == microbatch}
        backwards = {key for mb, key in issued[Op.BACKWARD] if mb == microbatch}
        for name, found, wanted in (
            ("forward", forwards, side.passes),
            ("backward", backwards, side.trained),
        ):
            unfound = wanted - found
            missing = [stage.label for stage in side.program.stages if stage.key in unfound]
            if found and missing:
                raise ScheduleError(
                    f"microbatch {microbatch}: {name} of {missing[0]} is missing", schedule, len(schedule) - 1
                )
        moved = {key for mb, key in issued[Op.STORE] if mb == microbatch}
        unmoved = [s for s in side.program.stages if s.key in forwards - moved and stored_writes(s, side)]
        if unmoved:
            reason = f"microbatch {microbatch}: S of {unmoved[0].label} is missing"
            raise ScheduleError(reason, schedule, len(schedule) - 1)
        replays = [index for (mb, _), index in issued[Op.REPLAY].items() if mb == microbatch]
        if replays and not backwards:
            raise ScheduleError(f"{schedule[replays[0]]} replays, but no backward follows", schedule, replays[0])
        delayed = {key for mb, key in issued[Op.WGRAD] if mb == microbatch}
        owed = {s.key for s in side.program.stages if s.wgrad} & backwards
        if delayed and owed - delayed:
            label = next(s.label for s in side.program.stages if s.key in owed - delayed)
            raise ScheduleError(f"microbatch {microbatch}: W of {label} is missing", schedule, len(schedule) - 1)
    _check_weights_last(schedule, sides, issued)


def _check_weights_last(schedule: Schedule, sides: Sides, issued: _Issued) -> None:
    """The sum of a shared parameter's uses needs the delayed gradients of all its readers."""
    for (microbatch, key), index in issued[Op.BACKWARD].items():
        if key != (None, WEIGHTS):
            continue
        program = sides[microbatch].program
        for reader in {r.key: r for value in program.by_key[key].writes for r in program.readers[value]}.values():
            if issued[Op.WGRAD].get((microbatch, reader.key), -1) > index:
                reason = f"{schedule[index]} precedes the weight gradient of its reader {reader.label}"
                raise ScheduleError(reason, schedule, index)
