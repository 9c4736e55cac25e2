"""predict: walk the lowered plans of a step with storage facts, holding storages exactly as the engine holds tensors.

Nothing runs: a table maps what the engine would have there to storage ids, and what no table holds is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds
from overlap.ir import Op
from overlap.lower import Issue
from overlap.memory.bins import Border, Highest, Storage, Usage
from overlap.memory.crossing import Crossing, CrossLanes, OneLane
from overlap.memory.facts import NO_WORK, Facts, Footprint, Kind, Spans, backward_kind, forward_kind
from overlap.memory.footprint import take_footprint
from overlap.memory.gap import Gap, gaps_of, slot_text
from overlap.memory.held import Held
from overlap.memory.layout import Layout
from overlap.memory.ledger import Ids, Ledger
from overlap.memory.refs import OUTSIDE_REF, Ref, Source
from overlap.memory.trace import NOTHING, highest, make_trace
from overlap.memory.tracker import OUTSIDE
from overlap.plan import StepPlan
from overlap.step import step_plans
from overlap.step_feeds import check_names
from recompute.config import Keep
from recompute.keep import shard_length

_FORWARDS = (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)


@dataclass(frozen=True, slots=True)
class WalkedSlot:
    """A slot that was just walked."""

    facts: Facts
    env: Mapping[Ref, int]
    copied: int
    """Bytes of the snapshots taken before it."""


class Walk:
    """A step, issue by issue.

    Args:
        footprints: Of each microbatch; the same object where the shapes are the same.
        gaps: Of each microbatch, as `gaps_of` gives them.
        delayed: The chunk's `delay_wgrad`.
        ranks: Over which sharded segment inputs are cut.
        host: Whether host memory counts in `tops`: in a step on the CPU it is the same memory.
        streams: Whether lanes are streams, which hold each other's memory (StreamLanes).
    """

    def __init__(
        self,
        footprints: Sequence[Footprint],
        gaps: Sequence[Gap],
        *,
        delayed: bool,
        ranks: int = 1,
        host: bool = True,
        streams: bool = False,
    ) -> None:
        self._ranks = ranks
        self._host = host
        self._footprints = footprints
        self._facts = [footprint.facts[delayed] for footprint in footprints]
        self._lanes: Crossing = CrossLanes() if streams else OneLane()
        self._ids = count()
        self._ledger = Ledger()
        self._held = [Held(self._ledger, gap, self._feeds(of, gap)) for of, gap in zip(footprints, gaps, strict=True)]
        # The step's own copies of in-place state, for the case that it fails; the same for all microbatches.
        step = self._new((size for sizes in footprints[0].snapshots.values() for size in sizes), Op.CALL, "")
        self._ledger.hold((key, None) for key in step)
        self._curve: list[Border] = []
        self._tops: list[Highest] = []

    @property
    def tops(self) -> tuple[Highest, ...]:
        """The highest point inside every slot walked so far."""
        return tuple(self._tops)

    @property
    def live(self) -> int:
        """Bytes that are held between slots."""
        self._forget()
        return self._ledger.total

    def run(self, plans: Sequence[StepPlan]) -> Usage:
        """Walk the plans of a step, as `step_plans` gives them."""
        for plan, numbers in plans:
            for issue in plan.issues:
                self._issue(issue, numbers[issue.slot.microbatch])
            self._lanes.settle()
        return Usage(curve=tuple(self._curve))

    def finish(self) -> None:
        """The step's slots are done: lanes hold nothing more."""
        self._lanes.finish()

    def _issue(self, issue: Issue, number: int) -> None:
        held = self._held[number]
        held.begin()
        self._lanes.begin(issue, number, held)
        start = self.live
        if issue.slot.op in _FORWARDS:
            slot = self._forward(issue, number)
        elif issue.slot.op in (Op.STORE, Op.LOAD):
            slot = self._move(issue, number)
        elif issue.slot.op is Op.BACKWARD:
            slot = self._backward(issue, number)
        else:
            slot = self._wgrad(issue, number)
        self._lanes.end(issue, number)
        self._end(slot_text(issue, number), slot, start)
        for key in issue.frees:
            del held.values[key]

    def _forward(self, issue: Issue, number: int) -> WalkedSlot:
        held = self._held[number]
        stage, kind = issue.stage, forward_kind(issue)
        facts = self._facts[number][kind]
        copied = 0
        if issue.snapshots:
            sizes = self._footprints[number].snapshots[stage.key]
            held.snapshots[stage.key] = self._new(sizes, issue.slot.op, stage.name)
            copied = sum(sizes)
        elif issue.slot.op is Op.REPLAY and stage.state:
            del held.snapshots[stage.key]
        env = {
            **_named(Source.READ, (held.values[key] for key in issue.reads)),
            **_named(Source.PINNED, (held.values[key] for key in issue.pinned)),
            **self._born(Source.FORWARD, facts, issue),
        }
        if issue.records:
            held.graphs[stage.key] = (kind, {ref: env[ref] for ref in facts.tape})
        written = [_ids(refs, env) for refs in facts.writes]
        held.values.update((key, ids) for key, ids in zip(issue.writes, written, strict=True) if key is not None)
        if issue.slot.op is not Op.REPLAY:
            for place in (
                *(place for place, _ in issue.collects),
                *(stage.writes.index(e.value) for e in stage.effects),
            ):
                held.keep(written[place])
        return WalkedSlot(facts, env, copied)

    def _backward(self, issue: Issue, number: int) -> WalkedSlot:
        held, key = self._held[number], issue.stage.key
        kind, env = _by_adjoint(issue)
        if issue.stage.adjoint is None:
            kind, env = held.graphs.pop(key)
        facts = self._facts[number][backward_kind(issue, kind)]
        pieces = [held.grads.pop(piece, ()) for group in issue.pieces for piece in group]
        env = {
            **env,
            **_named(Source.READ, (held.values[read] for read in issue.reads)),
            **_named(Source.PIECE, pieces),
            **self._born(Source.BACKWARD, facts, issue),
        }
        _give(issue, facts, env, held)
        if issue.delays:
            waiting = {ref: env[ref] for ref in facts.pending | facts.hidden if ref != OUTSIDE_REF}
            held.pending[key] = (kind, waiting, _ids(facts.pending, env))
        return WalkedSlot(facts, env, 0)

    def _move(self, issue: Issue, number: int) -> WalkedSlot:
        """A copy elsewhere, or one that is back."""
        held = self._held[number]
        footprint = self._footprints[number]
        leaves = issue.slot.op is Op.STORE and issue.keep is Keep.HOST and not self._host
        born: list[int] = []
        spans = dict(zip(issue.stage.writes, footprint.spans[issue.stage.key], strict=True))
        for key in issue.writes:
            if key is not None:
                sizes = [_rounded(nbytes, footprint.granule) for nbytes in _moved(spans[key[0]], issue, self._ranks)]
                held.values[key] = self._new(sizes, issue.slot.op, issue.stage.name, counts=not leaves)
                born += sizes
        trace = NOTHING if leaves else make_trace((size, None) for size in born)
        work = replace(NO_WORK, traffic=float(sum(born)))
        return WalkedSlot(Facts(born=tuple(born), trace=trace, work=work), {}, 0)

    def _wgrad(self, issue: Issue, number: int) -> WalkedSlot:
        held = self._held[number]
        kind, waiting, _ = held.pending.pop(issue.stage.key)
        facts = self._facts[number][backward_kind(issue, kind)]
        given = [held.grads.get(piece, ()) if piece is not None else () for piece in issue.gives]
        env = {**waiting, **_named(Source.GIVEN, given), **self._born(Source.WGRAD, facts, issue)}
        _give(issue, facts, env, held)
        return WalkedSlot(facts, env, 0)

    def _born(self, source: Source, facts: Facts, issue: Issue) -> dict[Ref, int]:
        born = self._new(facts.born, issue.slot.op, issue.stage.name)
        return {Ref(source, place): key for place, key in enumerate(born)}

    def _feeds(self, footprint: Footprint, gap: Gap) -> dict[str, Ids]:
        """The caller's own tensors are not counted, the step's copies are."""
        return {
            name: self._new(sizes, Op.CALL, "") if name in gap.copied else (OUTSIDE,) * len(sizes)
            for name, sizes in footprint.feeds.items()
        }

    def _new(self, sizes: Iterable[int], born: Op, stage: str, *, counts: bool = True) -> Ids:
        storages = {next(self._ids): Storage(size, born, stage) for size in sizes}
        for key, storage in storages.items():
            self._ledger.add(key, storage, counts=counts)
        return tuple(storages)

    def _forget(self) -> Mapping[int, Storage]:
        """Drop what no table and no lane holds; returns it."""
        return self._ledger.forget(frozenset().union(*self._lanes.ids()))

    def _end(self, name: str, slot: WalkedSlot, start: int) -> None:
        """Note the border and the slot's highest point, and forget what no table holds."""
        gone = self._forget()
        frees = {refs[-1]: gone[key].nbytes for key, refs in _deaths(slot).items() if key in gone}
        self._note(name, slot, highest(slot.facts.trace, start + slot.copied, frees))

    def _note(self, name: str, slot: WalkedSlot, top: int) -> None:
        """Keep what is wanted of a slot: here its border and its highest point, in bytes."""
        del slot
        self._tops.append(Highest(slot=name, bytes=top))
        self._curve.append(Border(slot=name, bytes=self._ledger.bins()))


def predict_step(chunk: ModelChunk, footprints: Sequence[Footprint], *, streams: bool = False) -> Usage:
    """Live bytes at every slot border of a training step.

    Args:
        chunk: Gives plans and configs; a fake chunk serves.
        footprints: Of each microbatch of the step, in order; taken with the chunk's setting of `delay_wgrad`.
        streams: As for Walk.
    """
    gaps = gaps_of(chunk, len(footprints))
    ranks = 1 if chunk.shards is None else chunk.shards.ranks
    walk = Walk(footprints, gaps, delayed=chunk.delay_wgrad, ranks=ranks, streams=streams)
    return walk.run(step_plans(chunk, len(footprints)))


def footprints_of(chunk: ModelChunk, microbatches: Sequence[Feeds], *, constants: bool = False) -> list[Footprint]:
    """The footprint of each microbatch; one dry run per different shape.

    Args:
        chunk: From `fake_chunk`, inside its context.
        microbatches: Only shapes and types are used.
        constants: Whether constants in graphs count.

    Raises:
        ConfigError: There is no chunk, or the microbatches do not feed it.
    """
    check_chunk(chunk)
    check_names(microbatches, {source.name for source in chunk.program.inputs})
    layouts = [Layout.of(dict(feeds)) for feeds in microbatches]
    found: list[Footprint] = []
    for number, feeds in enumerate(microbatches):
        first = layouts.index(layouts[number])
        if first < number:
            found.append(found[first])
        else:
            found.append(take_footprint(chunk, feeds, (chunk.delay_wgrad,), constants=constants))
    return found


def _deaths(slot: WalkedSlot) -> dict[int, list[Ref]]:
    """Per storage, the names under which it dies in the slot, in order: with the last it is gone."""
    found: dict[int, list[Ref]] = {}
    for window in slot.facts.trace:
        if window.dies is not None:
            found.setdefault(slot.env[window.dies], []).append(window.dies)
    return found


def _rounded(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule


def _moved(spans: Spans, issue: Issue, ranks: int) -> list[int]:
    """Bytes of what an S or L slot allocates, a tensor each."""
    if issue.keep is Keep.SHARDED:
        parts = 1 if issue.slot.op is Op.STORE else ranks
        return [shard_length(length, ranks) * parts * size for length, size in spans]
    return [length * size for length, size in spans]


def _by_adjoint(issue: Issue) -> tuple[Kind, Mapping[Ref, int]]:
    return Kind(issue.stage.key, Source.FORWARD, False, False), {}


def _named(source: Source, values: Iterable[Ids]) -> dict[Ref, int]:
    return {Ref(source, place, part): key for place, ids in enumerate(values) for part, key in enumerate(ids)}


def _ids(refs: Iterable[Ref], env: Mapping[Ref, int]) -> Ids:
    return tuple(OUTSIDE if ref == OUTSIDE_REF else env[ref] for ref in refs)


def _give(issue: Issue, facts: Facts, env: Mapping[Ref, int], held: Held) -> None:
    for piece, refs in zip(issue.gives, facts.gives, strict=True):
        if piece is not None and refs is not None:
            held.grads[piece] = _ids(refs, env)
