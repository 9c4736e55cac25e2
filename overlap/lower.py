"""lower: a schedule becomes a Plan, in which each issue knows what it reads, writes, waits for and frees.

Everything that can be decided before the step is decided here, so that the engine's loop only looks things up:
generations of values (0: first pass, 1: replay), the fixed order of gradient sums (R3), waits between lanes with the
implied ones left out, cross-lane uses (R14), last uses (R2).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from overlap.clocks import NOTHING, Clocks, Past, View
from overlap.ir import WEIGHTS, Lane, Op, Program, Schedule, Slot, Stage, StageKey
from overlap.keeping import (
    LOADED,
    STORED,
    allocator,
    follows,
    generation,
    home,
    last_stage,
    lets_go,
    stored_writes,
    writer,
)
from overlap.pieces import Piece, passed_on, pieces_of
from overlap.side import Side, Sides, stages_of
from recompute.config import Keep
from recompute.modules import RecomputeModule

Key = tuple[str, int]
"""A value of a microbatch: (name, generation)."""
Event = tuple[Op, StageKey]
"""The end of one slot of a microbatch, as another lane waits for it."""

_FORWARDS = (Op.FORWARD, Op.NO_GRAD)
_RUNS_FORWARD = (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One slot, ready to run."""

    slot: Slot
    stage: Stage
    lane: Lane
    reads: tuple[Key, ...] = ()
    """F, N, R: one per read of the stage. B by adjoint: the pinned values among its reads, then its own pins."""
    tracked: tuple[bool, ...] = ()
    """F, R, B: which reads of the stage need a gradient."""
    differentiable: tuple[bool, ...] = ()
    """F, N, R: which writes may carry a gradient."""
    snapshots: bool = False
    """N: the stage's in-place state is copied for its replay."""
    records: bool = False
    """F, R: whether a graph is kept for this stage's backward."""
    graph_only: bool = False
    """R: nobody reads what it writes, and its stage can make the graph without that."""
    parts: frozenset[RecomputeModule] = frozenset()
    """F: parts of the stage that its backward rebuilds."""
    writes: tuple[Key | None, ...] = ()
    """One per write; None where a replay keeps the first pass's value (pinned)."""
    collects: tuple[tuple[int, str], ...] = ()
    """F, N: places among the writes that are losses or outputs, with their names."""
    pinned: tuple[Key, ...] = ()
    """R of a pinning stage: the values that it pinned."""
    keep: Keep = Keep.DEVICE
    """S, L: where what it moves waits."""
    lets_go: tuple[Key, ...] = ()
    """Values that have left the device when `follows` has ended, and are needed there no more."""
    follows: tuple[tuple[Event, Lane], ...] = ()
    """Slots that must end first beside those that wrote its reads, with their lanes."""
    seeds: tuple[float | None, ...] = ()
    """B: per write, the loss weight that starts its gradient."""
    pieces: tuple[tuple[Piece, ...], ...] = ()
    """B: per write, the pieces to add, in the one order (reverse program order)."""
    gives: tuple[Piece | None, ...] = ()
    """B: per read, the piece that its gradient becomes; None where no gradient is wanted. W: the same for shared
    parameters, the piece that it adds to."""
    delays: bool = False
    """B: the weight gradients wait for a W slot."""
    shared: tuple[bool, ...] = ()
    """B: which reads are shared parameters, whose delayed gradients go to the table."""
    waits: tuple[Event, ...] = ()
    """Slots of the same microbatch on other lanes that must end first."""
    signals: bool = False
    """Whether another lane waits for this one's end."""
    foreign: tuple[Key, ...] = ()
    """Reads whose storage another lane allocated: it must not be given out again before this use has ended."""
    foreign_owners: tuple[Lane, ...] = ()
    """The lane of each."""
    foreign_pieces: tuple[Piece, ...] = ()
    """The same for gradients."""
    piece_owners: tuple[Lane, ...] = ()
    """The lane of each."""
    foreign_leaves: tuple[tuple[int, Lane], ...] = ()
    """B: reads of the stage that its graph keeps and another lane allocated, by place: backward uses them again."""
    pending_owners: tuple[Lane, ...] = ()
    """W: other lanes that may have allocated what the pending weight gradients keep."""
    frees: tuple[Key, ...] = ()
    """Values that nobody reads after this issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the engine runs: the issues of one schedule."""

    issues: tuple[Issue, ...]
    imports: Mapping[int, frozenset[Key]]
    """Per microbatch, values that an earlier plan (or the feed) must have left."""
    exports: Mapping[int, frozenset[Key]]
    """Per microbatch, values that this plan leaves for a later one."""


def lower(schedule: Schedule, sides: Sides, survivors: Mapping[int, frozenset[Key]]) -> Plan:
    """Derive reads, writes, waits and frees.

    Args:
        schedule: A schedule that `validate` accepts.
        sides: Its sides.
        survivors: Per microbatch, the values that a later plan reads.

    Returns:
        The plan, in the schedule's order.
    """
    stages = stages_of(schedule, sides)
    issued = {(slot.microbatch, slot.op, slot.key) for slot in schedule}
    issues = [
        _issue(slot, stage, sides[slot.microbatch], (slot.microbatch, Op.WGRAD, slot.key) in issued)
        for slot, stage in zip(schedule, stages, strict=True)
    ]
    issues = _with_follows(issues, schedule, sides)
    waits, waited = _waits(issues, sides)
    frees = _frees(issues, survivors)
    handed = passed_on(schedule, sides)
    return Plan(
        issues=tuple(
            _finished(issue, sides, survivors, waited, handed, waits=before, frees=after)
            for issue, before, after in zip(issues, waits, frees, strict=True)
        ),
        imports=_imports(issues),
        exports={microbatch: keys for microbatch, keys in survivors.items() if keys},
    )


def backward_reads(schedule: Schedule, sides: Sides) -> Mapping[int, frozenset[Key]]:
    """What a backward schedule needs of the first pass, whatever order it is issued in: per microbatch, the keys.

    These are the live-ins of the replays and the pinned values of replays and adjoints.
    """
    stages = stages_of(schedule, sides)
    return _imports(
        [_issue(slot, stage, sides[slot.microbatch], False) for slot, stage in zip(schedule, stages, strict=True)]
    )


def _issue(slot: Slot, stage: Stage, side: Side, delays: bool) -> Issue:
    # Made at once and not by `replace`, which costs several times as much: large jobs lower thousands of plans.
    program = side.program
    if slot.op in (Op.STORE, Op.LOAD):
        source, target = (0, STORED) if slot.op is Op.STORE else (STORED, LOADED)
        values = stored_writes(stage, side)
        return Issue(
            slot=slot,
            stage=stage,
            lane=Lane.COPY,
            keep=side.keep,
            reads=tuple((value, source) for value in values),
            writes=tuple((value, target) for value in values),
        )
    if slot.op in _RUNS_FORWARD:
        replay = slot.op is Op.REPLAY
        records = slot.op is not Op.NO_GRAD and side.needs_activations(stage)
        return Issue(
            slot=slot,
            stage=stage,
            lane=stage.lane,
            reads=tuple((value, _generation(value, stage, side, replay)) for value in stage.reads),
            tracked=tuple(side.needs_grad(value) for value in stage.reads),
            writes=tuple(None if replay and value in stage.pins else (value, int(replay)) for value in stage.writes),
            differentiable=tuple(value not in stage.nondiff for value in stage.writes),
            snapshots=bool(stage.state)
            and slot.op is Op.NO_GRAD
            and side.keeps_graph
            and stage.key in side.replay_needed,
            records=records,
            parts=side.parts.get(stage.key, frozenset()) if records else frozenset(),
            collects=() if replay else _collects(stage, program),
            pinned=tuple((value, 0) for value in stage.pins) if replay else (),
        )
    place = program.position[stage.key]
    gives = tuple((value, place) if side.needs_grad(value) else None for value in stage.reads)
    shared = tuple(_is_shared_weight(value, program) for value in stage.reads)
    if slot.op is not Op.BACKWARD:
        # The shares of a shared parameter; a parameter of the stage's own goes to `.grad`.
        given = tuple(g if s else None for g, s in zip(gives, shared, strict=True))
        return Issue(slot=slot, stage=stage, lane=stage.lane, gives=given)
    weights = {loss.value: loss.weight for loss in program.losses}
    return Issue(
        slot=slot,
        stage=stage,
        lane=stage.lane,
        reads=_adjoint_reads(stage, program) if stage.adjoint is not None else (),
        seeds=tuple(weights.get(value) for value in stage.writes),
        pieces=tuple(pieces_of(value, side) for value in stage.writes),
        tracked=tuple(side.needs_grad(value) for value in stage.reads),
        gives=gives,
        delays=delays,
        shared=shared,
    )


def _is_shared_weight(value: str, program: Program) -> bool:
    producer = program.producers.get(value)
    return producer is not None and producer.key == (None, WEIGHTS)


def _collects(stage: Stage, program: Program) -> tuple[tuple[int, str], ...]:
    wanted = {*(loss.value for loss in program.losses), *program.outputs}
    return tuple((place, value) for place, value in enumerate(stage.writes) if value in wanted)


def _generation(value: str, stage: Stage, side: Side, replay: bool) -> int:
    """1 if the reader is replayed and reads what its own segment's replay wrote."""
    producer = side.program.producers.get(value)
    if not replay or producer is None or value in producer.pins:
        return 0
    return 1 if side.together(value, stage) else generation(value, stage, side)


def _adjoint_reads(stage: Stage, program: Program) -> tuple[Key, ...]:
    pinned = [v for v in stage.reads if v in program.producers and v in program.producers[v].pins]
    return tuple((value, 0) for value in (*pinned, *stage.pins))


def _keys(issue: Issue) -> tuple[Key, ...]:
    """Every value that an issue touches."""
    return (*issue.reads, *issue.pinned, *issue.lets_go, *(key for key in issue.writes if key is not None))


def _imports(issues: list[Issue]) -> dict[int, frozenset[Key]]:
    written: set[tuple[int, Key]] = set()
    missing: dict[int, set[Key]] = {}
    for issue in issues:
        microbatch = issue.slot.microbatch
        for key in (*issue.reads, *issue.pinned):
            if (microbatch, key) not in written:
                missing.setdefault(microbatch, set()).add(key)
        written.update((microbatch, key) for key in issue.writes if key is not None)
    return {microbatch: frozenset(keys) for microbatch, keys in missing.items()}


def _with_follows(issues: list[Issue], schedule: Schedule, sides: Sides) -> list[Issue]:
    """Tell issues what waits elsewhere by then, and returning values what to follow."""
    gone, before = lets_go(schedule, sides), follows(schedule, sides)
    result = []
    for place, issue in enumerate(issues):
        left = tuple((value, 0) for value in gone.get(place, ()))
        first = before.get(place, ())
        result.append(replace(issue, lets_go=left, follows=first) if left or first else issue)
    return result


def _frees(issues: list[Issue], survivors: Mapping[int, frozenset[Key]]) -> list[tuple[Key, ...]]:
    """Per issue, the values that no later plan reads and that it touches last."""
    seen: set[tuple[int, Key]] = set()
    result: list[tuple[Key, ...]] = []
    nothing: frozenset[Key] = frozenset()
    for issue in reversed(issues):
        microbatch = issue.slot.microbatch
        # Only a microbatch that runs forward here has a later plan: its backward's own reads end here.
        kept = survivors.get(microbatch, nothing)
        frees = [key for key in dict.fromkeys(_keys(issue)) if key not in kept and (microbatch, key) not in seen]
        seen.update((microbatch, key) for key in frees)
        result.append(tuple(frees))
    return result[::-1]


def _waits(issues: list[Issue], sides: Sides) -> tuple[list[tuple[Event, ...]], set[Past]]:
    """Per issue, the waits between lanes that no earlier wait implies; and all that is waited for."""
    at: dict[tuple[int, Event], int] = {}
    views: list[View] = []
    clocks = Clocks()
    waited: set[tuple[int, Event]] = set()
    result: list[tuple[Event, ...]] = []
    for index, issue in enumerate(issues):
        microbatch = issue.slot.microbatch
        side = sides[microbatch]
        # Latest first: waiting for it may imply the earlier ones. -1: ended in an earlier plan.
        needs = sorted(
            ((at.get((microbatch, event), -1), lane, event) for event, lane in _dependencies(issue, side, at)),
            key=lambda need: -need[0],
        )
        waits: list[Event] = []
        # A lane has its memory back from what it waits for itself (NOTE [ Memory that crosses lanes ] in streams).
        owed = {event for event, _ in issue.follows} if issue.slot.op is not Op.LOAD else set()
        for place, lane, event in needs:
            past = (microbatch, event)
            implied = not clocks.needs_wait(issue.lane, lane, place, past)
            if not implied or event in owed:
                if place >= 0:  # as it has from what that lane did before
                    owed -= {before for before, other in issue.follows if other is lane}
                waits.append(event)
                waited.add(past)
                clocks.wait(issue.lane, lane, place, past, views[place] if place >= 0 else NOTHING)
        at[microbatch, (issue.slot.op, issue.stage.key)] = index
        views.append(clocks.view(issue.lane))
        result.append(tuple(waits))
    return result, waited


def _dependencies(issue: Issue, side: Side, at: Container[Past]) -> list[tuple[Event, Lane]]:
    """Slots that an issue's data comes from, with their lanes; `at` tells which of this plan were issued before."""
    program, op = side.program, issue.slot.op
    found: dict[Event, Lane] = dict(issue.follows)
    for key in (*issue.reads, *issue.pinned):
        producer = program.producers.get(key[0])
        if producer is not None:
            found[writer(key, side), producer.key] = home(key, side)
    if op is Op.BACKWARD:
        for pieces in issue.pieces:
            for _, place in pieces:
                reader = program.stages[place]
                found[Op.BACKWARD, reader.key] = reader.lane
                delayed = (Op.WGRAD, reader.key)
                if issue.stage.key == (None, WEIGHTS) and (issue.slot.microbatch, delayed) in at:
                    found[delayed] = reader.lane
    return list(found.items())


def _finished(
    issue: Issue,
    sides: Sides,
    survivors: Mapping[int, frozenset[Key]],
    waited: Container[Past],
    handed: Container[tuple[int, Piece]],
    *,
    waits: tuple[Event, ...],
    frees: tuple[Key, ...],
) -> Issue:
    """Add what only the whole plan decides, and the reads and pieces whose storage another lane allocated."""
    side = sides[issue.slot.microbatch]
    program = side.program
    keys = [
        (key, allocator(key, side)) for key in (*issue.reads, *issue.pinned) if allocator(key, side) is not issue.lane
    ]
    number = issue.slot.microbatch
    pieces = [
        (piece, home)
        for group in issue.pieces
        for piece in group
        for home in (program.stages[piece[1]].allocates, *([Lane.P2P] if (number, piece) in handed else []))
        if home is not issue.lane
    ]
    homes = [allocator((value, generation(value, issue.stage, side)), side) for value in issue.stage.reads]
    leaves = [(place, lane) for place, lane in enumerate(homes) if lane is not issue.lane]
    given = [(value, reader) for value in issue.stage.writes for reader in program.readers[value]]
    readers = {reader.allocates for _, reader in given}
    if any((number, (value, program.position[reader.key])) in handed for value, reader in given):
        readers.add(Lane.P2P)
    givers = {lane for _, lane in leaves} | readers - {issue.lane}
    keeps_graph = issue.slot.op is Op.BACKWARD and issue.stage.adjoint is None
    return replace(
        issue,
        foreign_leaves=tuple(leaves) if keeps_graph else (),
        pending_owners=tuple(lane for lane in Lane if lane in givers) if issue.slot.op is Op.WGRAD else (),
        foreign=tuple(key for key, _ in keys),
        foreign_owners=tuple(lane for _, lane in keys),
        foreign_pieces=tuple(piece for piece, _ in pieces),
        piece_owners=tuple(lane for _, lane in pieces),
        waits=waits,
        signals=(issue.slot.microbatch, (issue.slot.op, issue.stage.key)) in waited
        or _read_later(issue, sides, survivors),
        frees=frees,
        graph_only=issue.slot.op is Op.REPLAY
        and issue.records
        and issue.stage.graph_only is not None
        and all(key is None or key in frees for key in issue.writes),
    )


def _read_later(issue: Issue, sides: Sides, survivors: Mapping[int, frozenset[Key]]) -> bool:
    """Whether a later plan may read what this issue writes on another lane, or let the first copy of it go."""
    side = sides[issue.slot.microbatch]
    if issue.slot.op is Op.STORE:
        return any(key is not None and last_stage(key[0], side).key not in side.passes for key in issue.writes)
    if issue.slot.op not in _FORWARDS:
        return False
    kept = survivors.get(issue.slot.microbatch, frozenset())
    readers = side.program.readers
    return any(
        key is not None and key in kept and any(reader.lane is not issue.lane for reader in readers[key[0]])
        for key in issue.writes
    )
