"""DrySlots: run single slots through the engine and read off what they allocate, alias and hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlap.engine import Engine, MicrobatchState
from overlap.errors import ProgramError
from overlap.ir import Stage, StageKey
from overlap.lower import Issue
from overlap.memory.constants import constants_of
from overlap.memory.facts import Facts, Kind, backward_kind, forward_kind
from overlap.memory.layout import Layout, fresh
from overlap.memory.refs import OUTSIDE_REF, Ref, Refs, Source
from overlap.memory.slot_log import SlotLog
from overlap.memory.tracker import OUTSIDE, StorageTracker, pending_tensors
from overlap.pieces import Piece
from recompute.tape import Tape


class _Names:
    """Names of storages as one slot sees them.

    Args:
        tracker: Follows all storages; what it knows now and `known` does not name is outside the slot.
        source: Of storages that are seen for the first time: they were born in the slot.
        known: Names given before, by storage id.
    """

    def __init__(self, tracker: StorageTracker, source: Source, known: Mapping[int, Ref]) -> None:
        self.known = dict(known)
        self._tracker = tracker
        self._source = source
        self._outside = {OUTSIDE, *tracker.live} - self.known.keys()
        self._born: list[int] = []

    @property
    def born(self) -> tuple[int, ...]:
        """Bytes of the storages named as born here, in the order of their names."""
        return tuple(self._born)

    def give(self, value: Any, source: Source, place: int) -> None:
        """Name the tensors of a value that goes into the slot."""
        for part, key in enumerate(self._tracker.ids_of(value)):
            self.known[key] = Ref(source, place, part)

    def of(self, value: Any) -> Refs:
        """Names of a value's tensors."""
        return tuple(self._name(key) for key in self._tracker.ids_of(value))

    def survivors(self) -> frozenset[Ref]:
        """Names of all that went in or was born, and is alive now."""
        return frozenset(self._name(key) for key in sorted(self._tracker.live.keys() - self._outside))

    def _name(self, key: int) -> Ref:
        if key in self._outside:
            return OUTSIDE_REF
        if key not in self.known:
            self.known[key] = Ref(self._source, len(self._born))
            self._born.append(self._tracker.live[key].nbytes)
        return self.known[key]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded forward that waits for its backward."""

    kind: Kind
    tape: Tape
    names: Mapping[int, Ref]


class DrySlots:
    """Runs slots of one program, each alone; must be used with its tracker active.

    Args:
        engine: Runs the slots.
        tracker: Follows all storages.
        values: Layouts of the feeds, by value name; those of written values are added.
        facts: Where the results go.
        log: What the tracker tells.
        constants: Whether constants in graphs count.
    """

    def __init__(
        self,
        engine: Engine,
        tracker: StorageTracker,
        values: dict[str, Any],
        facts: dict[Kind, Facts],
        *,
        log: SlotLog,
        constants: bool,
    ) -> None:
        self._engine = engine
        self._tracker = tracker
        self._log = log
        self._constants = constants
        self._values = values
        self._facts = facts
        self._pieces: dict[Piece, Layout] = {}
        self._graphs: dict[StageKey, list[_Graph]] = {}

    def forward_without_graph(self, issue: Issue) -> None:
        """Run the slot as a first pass that keeps no graph."""
        bare = replace(issue, records=False)
        try:
            self.forward(bare)
        except ProgramError:
            # A table that the first call made for good is there at the second.
            self.forward(bare)

    def forward(self, issue: Issue) -> None:
        """Run an F, N or R slot; a graph stays for `backward`."""
        stage = issue.stage
        names = _Names(self._tracker, Source.FORWARD, {})
        owner = MicrobatchState(0, {}, 1.0)
        for source, keys in ((Source.READ, issue.reads), (Source.PINNED, issue.pinned)):
            for place, key in enumerate(keys):
                owner.values[key] = fresh(self._values[key[0]])
                names.give(owner.values[key], source, place)
        # What a replay restores.
        owner.snapshots[stage.key] = tuple(buffer.detach().clone() for buffer in stage.state)
        self._run(issue, owner)
        if self._constants:
            for tape in owner.tapes.values():
                for node, constant in constants_of(tape):
                    self._tracker.note(constant)
                    self._log.made_by(node)
        trace, work = self._log.trace(names.known), self._log.work()
        writes = tuple(() if key is None else names.of(owner.values[key]) for key in issue.writes)
        if not issue.graph_only:
            self._values.update((key[0], Layout.of(owner.values[key])) for key in issue.writes if key is not None)
        tapes = list(owner.tapes.values())
        del owner
        held = names.survivors()
        kind = forward_kind(issue)
        self._facts[kind] = Facts(born=names.born, writes=writes, tape=held, trace=trace, work=work)
        if tapes:
            self._graphs.setdefault(stage.key, []).append(_Graph(kind, tapes[0], names.known))
        elif held:
            raise _kept(stage)

    def backward(self, issue: Issue, wgrads: Sequence[Issue]) -> None:
        """Run a B slot, and its W slot if it delays, for each graph that the stage's forwards left."""
        graphs = self._graphs.pop(issue.stage.key, [])
        given: dict[Piece, Layout] = {}
        if issue.stage.adjoint is not None:
            given = self._backward(issue, [], wgrads)
        while graphs:
            given = self._backward(issue, [graphs.pop()], wgrads)
        self._pieces.update(given)

    def _backward(self, issue: Issue, graph: list[_Graph], wgrads: Sequence[Issue]) -> dict[Piece, Layout]:
        key = issue.stage.key
        made = graph[0].kind if graph else Kind(key, Source.FORWARD, False, False)
        names = _Names(self._tracker, Source.BACKWARD, graph[0].names if graph else {})
        owner = MicrobatchState(0, {}, 1.0)
        for place, read in enumerate(issue.reads):
            owner.values[read] = fresh(self._values[read[0]])
            names.give(owner.values[read], Source.READ, place)
        for place, piece in enumerate(piece for group in issue.pieces for piece in group):
            if piece in self._pieces:
                owner.grads[piece] = fresh(self._pieces[piece])
                names.give(owner.grads[piece], Source.PIECE, place)
        owner.outputs = {value: fresh(self._values[value]) for value in issue.stage.writes}
        if graph:
            # The only reference to the tape goes into the slot, as in a step.
            owner.tapes[key] = graph.pop().tape
        self._run(issue, owner)
        trace, work = self._log.trace(names.known), self._log.work()
        gives = _gives(issue, owner, names)
        given: dict[Piece, Layout] = Layout.of(owner.grads)
        waiting = MicrobatchState(0, {}, 1.0)
        waiting.pending.update(owner.pending)
        del owner
        pending = frozenset(names.of(pending_tensors(waiting.pending.values())))
        held = names.survivors()
        self._facts[backward_kind(issue, made)] = Facts(
            born=names.born, gives=gives, pending=pending, hidden=held - pending, trace=trace, work=work
        )
        if held and not waiting.pending:
            raise _kept(issue.stage)
        for wgrad in wgrads:
            given |= self._wgrad(wgrad, waiting, made, _Names(self._tracker, Source.WGRAD, names.known), given)
        return given

    def _wgrad(
        self, issue: Issue, owner: MicrobatchState, made: Kind, names: _Names, given: Mapping[Piece, Layout]
    ) -> dict[Piece, Layout]:
        for place, piece in enumerate(issue.gives):
            if piece is not None and piece in given:
                owner.grads[piece] = fresh(given[piece])
                names.give(owner.grads[piece], Source.GIVEN, place)
        self._run(issue, owner)
        trace, work = self._log.trace(names.known), self._log.work()
        gives = _gives(issue, owner, names)
        layouts: dict[Piece, Layout] = Layout.of(owner.grads)
        self._facts[backward_kind(issue, made)] = Facts(born=names.born, gives=gives, trace=trace, work=work)
        owner.grads.clear()
        if names.survivors():
            raise _kept(issue.stage)
        return layouts

    def _run(self, issue: Issue, owner: MicrobatchState) -> None:
        self._log.start()
        self._engine.issue(replace(issue, frees=()), owner)


def _gives(issue: Issue, owner: MicrobatchState, names: _Names) -> tuple[Refs | None, ...]:
    return tuple(
        names.of(owner.grads[piece]) if piece is not None and piece in owner.grads else None for piece in issue.gives
    )


def _kept(stage: Stage) -> ProgramError:
    return ProgramError(
        f"stage {stage.label} keeps a tensor beyond its slot that is in none of its values: write it as a tensor, or "
        "in tuples, lists or dicts; memory that a module, another object or a reference cycle holds is not predicted"
    )
