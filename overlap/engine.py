"""Engine: the one interpreter. Runs a plan issue by issue and owns everything that is alive in between.

Per microbatch it keeps values, gradient pieces, tapes, pending weight gradients and effects. All decisions are in
the plan; the loop looks things up and calls torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from overlap.ir import Effect, Op, Stage, StageKey
from overlap.lanes import Lanes
from overlap.lower import Event, Issue, Key, Plan
from overlap.pieces import Piece
from recompute import rng, state
from recompute.errors import RecomputeError
from recompute.inner import rebuilding
from recompute.keep import HOST_ONLY, Store, Stores, fetch, park
from recompute.precision import Precision
from recompute.tape import Tape
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out

Feeds = Mapping[str, Any]
"""One microbatch as the caller gives it: a value per Program input."""


@runtime_checkable
class Observer(Protocol):
    """Watches a step; sees each issue before its values are freed."""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Called before the issue runs."""

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """Called when it has run; what it frees is still there."""


class MicrobatchState:
    """What is alive of one microbatch."""

    __slots__ = (
        "draws_as", "effects", "events", "grads", "number", "outputs", "pending", "scale", "snapshots", "tapes",
        "values",
    )  # fmt: skip

    def __init__(self, number: int, feeds: Feeds, scale: float, first: int = 0) -> None:
        self.number = number
        """Its number within the step on this rank; the order of effects follows it."""
        self.draws_as = first + number
        """Its number among those of all data ranks, where this rank's begin at `first`; seeds follow it (R4)."""
        self.scale = scale
        """What the gradient of every loss is multiplied with."""
        self.values: dict[Key, Any] = {(name, 0): value for name, value in feeds.items()}
        self.grads: dict[Piece, Tensor] = {}
        self.tapes: dict[StageKey, Tape] = {}
        self.pending: dict[StageKey, tuple[WeightGradients, list[tuple[Tensor, Piece]]]] = {}
        self.snapshots: dict[StageKey, state.Snapshot] = {}
        self.events: dict[Event, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.effects: list[tuple[Effect, Any]] = []

    def leftovers(self) -> list[str]:
        """Names of tables that should be empty when the microbatch is done, and are not."""
        tables: dict[str, Mapping[Any, Any]] = {
            "values": self.values,
            "gradients": self.grads,
            "tapes": self.tapes,
            "pending weight gradients": self.pending,
            "snapshots": self.snapshots,
        }
        return [f"{name} of microbatch {self.number}: {sorted(map(str, t))}" for name, t in tables.items() if t]


class Engine:
    """Runs plans.

    Args:
        lanes: Where issues run.
        run_seed: The run's seed; every drawing stage derives its own (R4).
        step: Steps done before this one.
        generators: The live generators that stages draw from.
        precision: Entered around every forward, first pass and replay alike; None: nothing to enter.
        delay_wgrad: Whether the plans hold W slots for all stages with `wgrad`: their graphs leave the weights out,
            so that no hook of a weight fires before its gradient is there.
        observers: Watch the step.
        stores: Where segment inputs may wait for their replay.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        run_seed: int,
        step: int,
        generators: Sequence[torch.Generator],
        precision: Precision | None = None,
        delay_wgrad: bool = False,
        observers: Sequence[Observer] = (),
        stores: Stores = HOST_ONLY,
    ) -> None:
        self._lanes = lanes
        self._run_seed = run_seed
        self._step = step
        self._generators = generators
        self._precision = precision
        self._delay_wgrad = delay_wgrad
        self._observers = tuple(observers)
        self._stores = stores

    def run(self, plan: Plan, states: Mapping[int, MicrobatchState]) -> None:
        """Run every issue of a plan, then let lanes settle: the compute lane is current after it.

        Args:
            plan: What to run.
            states: The microbatches that take part, by their number in the plan's slots.
        """
        for issue in plan.issues:
            self.issue(issue, states[issue.slot.microbatch])
        self._lanes.settle()

    def issue(self, issue: Issue, owner: MicrobatchState) -> None:
        """Run one issue. What it raises passes through, with a note naming the slot."""
        try:
            for observer in self._observers:
                observer.before(issue, owner)
            self._lanes.begin(issue, owner)
            _HANDLERS[issue.slot.op](self, issue, owner)
            event = self._lanes.end(issue, owner)
            if issue.signals:
                owner.events[issue.slot.op, issue.stage.key] = event
            for observer in self._observers:
                observer.after(issue, owner)
        except Exception as error:
            error.add_note(f"in slot {issue.slot} of the plan, microbatch {owner.number} of the step")
            raise
        values = owner.values
        for key in issue.frees:
            del values[key]

    def seed_of(self, stage: Stage, owner: MicrobatchState) -> int:
        """Seed that a stage draws from, in every pass."""
        return self._seed_at(stage, owner.draws_as, self._step)

    def _seed_at(self, stage: Stage, microbatch: int, step: int) -> int:
        return rng.stage_seed(self._run_seed, step, microbatch, stage.layer, stage.name)

    def _first_pass(self, issue: Issue, owner: MicrobatchState) -> None:
        stage = issue.stage
        if issue.snapshots:
            owner.snapshots[stage.key] = state.take(stage.state)
        contexts = (state.saving_copies(stage.state),) if stage.state and issue.records else ()
        outputs = self._forward(issue, owner, {"pinned": None} if stage.pins else {}, contexts)
        for place, name in issue.collects:
            owner.outputs[name] = outputs[place]
        for effect in stage.effects:
            owner.effects.append((effect, outputs[stage.writes.index(effect.value)]))

    def _replay(self, issue: Issue, owner: MicrobatchState) -> None:
        stage = issue.stage
        contexts = (state.as_of(stage.state, owner.snapshots.pop(stage.key)),) if stage.state else ()
        self._forward(issue, owner, self._replay_keywords(issue, owner), contexts)

    def _replay_keywords(self, issue: Issue, owner: MicrobatchState) -> dict[str, Any]:
        if not issue.pinned:
            return {}
        return {"pinned": tuple(owner.values[key] for key in issue.pinned)}

    def _forward(
        self,
        issue: Issue,
        owner: MicrobatchState,
        keywords: dict[str, Any],
        contexts: Sequence[AbstractContextManager[object]],
    ) -> tuple[Any, ...]:
        """Run a stage's forward in the contexts it needs, keep its graph if asked, store what it writes."""
        stage, values = issue.stage, owner.values
        inputs = [values[key] for key in issue.reads]
        late = self._delay_wgrad and stage.wgrad and issue.records
        plain = not contexts and not late and not stage.draws_rng and not issue.parts
        if not plain or stage.context is not None or self._precision is not None:
            with ExitStack() as stack:
                for context in (*contexts, *self._contexts(issue, owner)):
                    stack.enter_context(context)
                tape, outputs = run_forward(issue, inputs, keywords)
        else:
            tape, outputs = run_forward(issue, inputs, keywords)
        if tape is not None:
            owner.tapes[stage.key] = tape
        for key, output in zip(issue.writes, outputs, strict=True):
            if key is not None:
                values[key] = output
        return outputs

    def _contexts(self, issue: Issue, owner: MicrobatchState) -> list[AbstractContextManager[object]]:
        makers: list[Callable[[], AbstractContextManager[object]]] = []
        if self._precision is not None:
            makers.append(self._precision)
        if issue.stage.context is not None:
            makers.append(issue.stage.context)
        if self._delay_wgrad and issue.stage.wgrad and issue.records:
            makers.append(weights_left_out)
        contexts = [make() for make in makers]
        if issue.stage.draws_rng:
            contexts.append(self._draws(issue, owner))
        if issue.parts:
            contexts.append(rebuilding(issue.parts, makers))
        return contexts

    def _draws(self, issue: Issue, owner: MicrobatchState) -> AbstractContextManager[None]:
        seed_at = partial(self._seed_at, issue.stage, owner.draws_as)
        return rng.seeded(self.seed_of(issue.stage, owner), self._generators, seed_at)

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        gradients = [
            self._gradient(seed, pieces, value, owner)
            for seed, pieces, value in zip(issue.seeds, issue.pieces, issue.stage.writes, strict=True)
        ]
        if issue.stage.adjoint is not None:
            results = self._by_adjoint(issue, owner, gradients)
        else:
            results = self._by_tape(issue, owner, gradients)
        for piece, gradient in zip(issue.gives, results, strict=True):
            if piece is not None and gradient is not None:
                # The layout is part of the number: a matrix product may round differently for another stride.
                owner.grads[piece] = gradient.contiguous()

    def _gradient(
        self, seed: float | None, pieces: Sequence[Piece], value: str, owner: MicrobatchState
    ) -> Tensor | None:
        """Sum what arrived for one value: the loss's own seed, then the readers' pieces in their fixed order (R3)."""
        total = None if seed is None else torch.full_like(owner.outputs[value], seed * owner.scale)
        for piece in pieces:
            gradient = owner.grads.pop(piece, None)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total

    def _by_adjoint(
        self, issue: Issue, owner: MicrobatchState, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        stage = issue.stage
        # Without writes, what the stage's reads do is decided outside the program: the adjoint brings their gradients.
        if stage.adjoint is None or (gradients and all(gradient is None for gradient in gradients)):
            return [None] * len(issue.gives)
        pinned = tuple(owner.values[key] for key in issue.reads)
        with torch.no_grad():
            if stage.draws_rng:
                with self._draws(issue, owner):
                    results: Sequence[Tensor | None] = stage.adjoint(gradients, pinned)
            else:
                results = stage.adjoint(gradients, pinned)
        return results

    def _by_tape(self, issue: Issue, owner: MicrobatchState, gradients: list[Tensor | None]) -> Sequence[Tensor | None]:
        key = issue.stage.key
        tape = owner.tapes.pop(key)
        if issue.stage.sheds:
            tape.take_over(gradients)
        if issue.delays:
            collector = WeightGradients()
            with collect_weight_gradients(collector):
                tape.backward(gradients)
            owner.pending[key] = (collector, _weight_values(collector, tape, issue))
        else:
            tape.backward(gradients)
        return tape.take_gradients(issue.tracked)

    def _store(self, issue: Issue, owner: MicrobatchState) -> None:
        self._transfer(issue, owner, park)

    def _load(self, issue: Issue, owner: MicrobatchState) -> None:
        self._transfer(issue, owner, fetch)

    def _transfer(self, issue: Issue, owner: MicrobatchState, move: Callable[[Any, Store], Any]) -> None:
        store = self._stores[issue.keep]
        for source, target in zip(issue.reads, issue.writes, strict=True):
            if target is not None:
                owner.values[target] = move(owner.values[source], store)

    def _wgrad(self, issue: Issue, owner: MicrobatchState) -> None:
        collector, weight_values = owner.pending.pop(issue.stage.key)
        for weight, gradient in collector.drain_each():
            piece = next((piece for value, piece in weight_values if value is weight), None)
            if piece is None:
                torch.autograd.backward((weight,), (gradient,))
                del gradient  # before the next one is computed
                continue
            earlier = owner.grads.get(piece)
            owner.grads[piece] = gradient if earlier is None else earlier + gradient
            del gradient  # before the next one is computed


# Looked up by name at each call, so that a subclass may replace one; the engine itself holds no reference to them and
# is freed with its last user.
_HANDLERS: dict[Op, Callable[[Engine, Issue, MicrobatchState], None]] = {
    Op.FORWARD: lambda engine, issue, owner: engine._first_pass(issue, owner),
    Op.NO_GRAD: lambda engine, issue, owner: engine._first_pass(issue, owner),
    Op.REPLAY: lambda engine, issue, owner: engine._replay(issue, owner),
    Op.BACKWARD: lambda engine, issue, owner: engine._backward(issue, owner),
    Op.WGRAD: lambda engine, issue, owner: engine._wgrad(issue, owner),
    Op.STORE: lambda engine, issue, owner: engine._store(issue, owner),
    Op.LOAD: lambda engine, issue, owner: engine._load(issue, owner),
}


def _weight_values(collector: WeightGradients, tape: Tape, issue: Issue) -> list[tuple[Tensor, Piece]]:
    """Pending weights that are values (shared parameters): their gradients go to the table, not to `.grad`."""
    pending = {id(item.weight) for item in collector.pending}
    found = []
    for leaf, piece, shared in zip(tape.leaves, issue.gives, issue.shared, strict=True):
        if piece is None or id(leaf) not in pending:
            continue
        if not shared:
            raise RecomputeError(
                f"stage {issue.stage.label} uses {piece[0]!r}, which another stage computes, as a weight whose "
                "gradient is put off: its producer's backward would miss it"
            )
        found.append((leaf, piece))
    return found


def run_forward(issue: Issue, inputs: Sequence[Any], keywords: dict[str, Any]) -> tuple[Tape | None, tuple[Any, ...]]:
    """Call a stage's forward, with a graph if the issue keeps one.

    Returns:
        The tape (None without a graph), and the outputs, detached.
    """
    stage = issue.stage
    differentiable = issue.differentiable
    if issue.records:
        forward = stage.graph_only if issue.graph_only and stage.graph_only is not None else stage.forward
        return Tape.record(forward, inputs, issue.tracked, differentiable, keywords, stage.sheds)
    with torch.no_grad():
        result = stage.forward(*inputs, **keywords)
    outputs = result if len(differentiable) != 1 else (result,)
    return None, tuple(o.detach() if d else o for o, d in zip(outputs, differentiable, strict=True))
