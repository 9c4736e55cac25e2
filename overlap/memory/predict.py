"""predict: walk the lowered plans of a step with storage facts, holding storages exactly as the engine holds tensors.

Nothing runs: a table maps what the engine would have there to storage ids, and what no table holds is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from overlap.chunk import ModelChunk
from overlap.engine import Feeds
from overlap.ir import Op
from overlap.lower import Issue
from overlap.memory.bins import Border, Storage, Usage, sum_bins
from overlap.memory.facts import OUTSIDE_REF, Facts, Footprint, Kind, Ref, Source, backward_kind, forward_kind
from overlap.memory.footprint import take_footprint
from overlap.memory.gap import Gap, gaps_of, slot_text
from overlap.memory.held import Held, Ids
from overlap.memory.layout import Layout
from overlap.memory.tracker import OUTSIDE
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.step import StepPlan, step_plans
from recompute.config import Keep
from recompute.keep import shard_length

_FORWARDS = (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)


class Walk:
    """A step, issue by issue.

    Args:
        footprints: Of each microbatch; the same object where the shapes are the same.
        gaps: Of each microbatch, as `gaps_of` gives them.
        delayed: The chunk's `delay_wgrad`.
        ranks: Over which sharded segment inputs are cut.
    """

    def __init__(self, footprints: Sequence[Footprint], gaps: Sequence[Gap], *, delayed: bool, ranks: int = 1) -> None:
        self._ranks = ranks
        self._footprints = footprints
        self._gaps = gaps
        self._facts = [footprint.facts[delayed] for footprint in footprints]
        self._ids = count()
        self._storages: dict[int, Storage] = {}
        self._held = [Held(self._feeds(*pair)) for pair in zip(footprints, gaps, strict=True)]
        # The step's own copies of in-place state, for the case that it fails; the same for all microbatches.
        self._step = self._new((size for sizes in footprints[0].snapshots.values() for size in sizes), Op.CALL)
        self._curve: list[Border] = []

    def run(self, plans: Sequence[StepPlan]) -> Usage:
        """Walk the plans of a step, as `step_plans` gives them."""
        for plan, forward, backward in plans:
            numbers = {FORWARD_SIDE: forward, BACKWARD_SIDE: backward}
            for issue in plan.issues:
                number = numbers[issue.slot.microbatch]
                if number is not None:
                    self._issue(issue, number)
        return Usage(curve=tuple(self._curve))

    def _issue(self, issue: Issue, number: int) -> None:
        held = self._held[number]
        held.begun = True
        if issue.slot.op in _FORWARDS:
            self._forward(issue, number)
        elif issue.slot.op in (Op.STORE, Op.LOAD):
            self._move(issue, number)
        elif issue.slot.op is Op.BACKWARD:
            self._backward(issue, number)
        else:
            self._wgrad(issue, number)
        self._end(slot_text(issue, number))
        for key in issue.frees:
            del held.values[key]

    def _forward(self, issue: Issue, number: int) -> None:
        held = self._held[number]
        stage, kind = issue.stage, forward_kind(issue)
        facts = self._facts[number][kind]
        if issue.snapshots:
            held.snapshots[stage.key] = self._new(self._footprints[number].snapshots[stage.key], issue.slot.op)
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
            held.outputs += [written[place] for place, _ in issue.collects]
            held.outputs += [written[stage.writes.index(effect.value)] for effect in stage.effects]

    def _backward(self, issue: Issue, number: int) -> None:
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

    def _move(self, issue: Issue, number: int) -> None:
        """A copy elsewhere, or one that is back."""
        for key in issue.writes:
            if key is not None:
                sizes = _moved(self._footprints[number].spans[key[0]], issue, self._ranks)
                self._held[number].values[key] = self._new(sizes, issue.slot.op)

    def _wgrad(self, issue: Issue, number: int) -> None:
        held = self._held[number]
        kind, waiting, _ = held.pending.pop(issue.stage.key)
        facts = self._facts[number][backward_kind(issue, kind)]
        given = [held.grads.get(piece, ()) if piece is not None else () for piece in issue.gives]
        env = {**waiting, **_named(Source.GIVEN, given), **self._born(Source.WGRAD, facts, issue)}
        _give(issue, facts, env, held)

    def _born(self, source: Source, facts: Facts, issue: Issue) -> dict[Ref, int]:
        return {Ref(source, place): key for place, key in enumerate(self._new(facts.born, issue.slot.op))}

    def _feeds(self, footprint: Footprint, gap: Gap) -> dict[str, Ids]:
        """The caller's own tensors are not counted, the step's copies are."""
        return {
            name: self._new(sizes, Op.CALL) if name in gap.copied else (OUTSIDE,) * len(sizes)
            for name, sizes in footprint.feeds.items()
        }

    def _new(self, sizes: Iterable[int], born: Op) -> Ids:
        storages = {next(self._ids): Storage(size, born) for size in sizes}
        self._storages |= storages
        return tuple(storages)

    def _end(self, slot: str) -> None:
        """Note the border, and forget what no table holds."""
        alive = set(self._step).union(*(ids for held in self._held for ids in held.ids()))
        self._storages = {key: storage for key, storage in self._storages.items() if key in alive}
        claims = [held.claims(gap) for held, gap in zip(self._held, self._gaps, strict=True) if held.begun]
        self._curve.append(Border(slot=slot, bytes=sum_bins(self._storages, claims)))


def predict_step(chunk: ModelChunk, footprints: Sequence[Footprint]) -> Usage:
    """Live bytes at every slot border of a training step.

    Args:
        chunk: Gives plans and configs; a fake chunk serves.
        footprints: Of each microbatch of the step, in order; taken with the chunk's setting of `delay_wgrad`.
    """
    gaps = gaps_of(chunk, len(footprints))
    ranks = 1 if chunk.shards is None else chunk.shards.ranks
    return Walk(footprints, gaps, delayed=chunk.delay_wgrad, ranks=ranks).run(step_plans(chunk, len(footprints)))


def footprints_of(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> list[Footprint]:
    """The footprint of each microbatch; one dry run per different shape.

    Args:
        chunk: From `fake_chunk`, inside its context.
        microbatches: Only shapes and types are used.
    """
    layouts = [Layout.of(dict(feeds)) for feeds in microbatches]
    found: list[Footprint] = []
    for number, feeds in enumerate(microbatches):
        first = layouts.index(layouts[number])
        found.append(found[first] if first < number else take_footprint(chunk, feeds, (chunk.delay_wgrad,)))
    return found


def _moved(spans: Iterable[tuple[int, int]], issue: Issue, ranks: int) -> list[int]:
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
