"""search: the best legal order for given stage costs, by local search over the steps of the table.

A move takes one step out and puts it in elsewhere; what breaks a dependency costs infinitely much. The simulator
scores, under one hardware queue and under many. Of equal orders the one wins that bears slower transfers better, then
the one with the shorter backward alone (the end of a step), then the one that carries fewer weight gradients over.
Steps that cost nothing here (stages that the layers do not have, replays that are left out) stay beside a step that
their own order allows, so that the result fits the layers that have them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from overlap.chain import Chain
from overlap.errors import ScheduleError
from overlap.ir import Op
from overlap.orders import REST, Order, Step, carried
from overlap.simulate import QUEUES
from overlap.steady import chain_of
from overlap.synthetic import DENSE, MOE, System

_FORWARD = ("attn", "post_attn", "shared", "dispatch", "experts", "combine", "post", "mtp_post")
_NO_WEIGHTS = frozenset({"dispatch", "combine"})
_SLOWER = 1.15
"""Factor on transfers that decides between equal orders."""
_SHUFFLES = 3
"""Random legal moves before each new descent."""

Score = tuple[float, ...]
"""Milliseconds summed over the queue models, of a pair as given, with slower transfers, and of a backward alone; then
how many weight gradients are carried over."""
_WORST: Score = (float("inf"),) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    order: Order
    score: Score
    tried: int
    """Orders that were scored."""


def search(system: System, *, queues: Sequence[int] = QUEUES, restarts: int = 4, seed: int = 0) -> Found:
    """Look for the order with the shortest layer pair; the same arguments find the same order.

    Args:
        system: What is recomputed and what slots cost; its order is where to start.
        queues: The queue models that count.
        restarts: Descents from a disturbed best order.
        seed: Of the disturbances.

    Raises:
        ScheduleError: The order to start from does not fit.
        ConfigError: A cost is missing.
    """
    chain = chain_of(system)
    chains = [Chain(chain, costs) for costs in (system.costs, system.costs.scaled_transfers(_SLOWER))]
    chains.append(Chain(chain, system.costs, alone=True))
    descent = _Descent(chains, queues)
    steps = _glued(system.order, chains[0].steps)
    best = descent.run(steps)
    rng = random.Random(seed)
    for _ in range(restarts):
        found = descent.run(descent.disturb(best[1], rng))
        best = min(best, found, key=lambda result: result[0])
    order = Order("searched", _flat(best[1]))
    check_fits(replace(system, order=order))
    return Found(order=order, score=best[0], tried=descent.tried)


def check_fits(system: System) -> None:
    """Plan pairs of every kind of layer.

    Raises:
        ScheduleError: The order breaks a rule for one of them.
    """
    for kinds in (MOE, DENSE, MOE + DENSE, DENSE + MOE + MOE + DENSE + MOE):
        replace(system, kinds=tuple(kinds)).plan(forward=True, backward=True)


_Group = tuple[Step, ...]
"""A step that takes time, with those that stay beside it."""


class _Descent:
    """Moves groups as long as that helps."""

    def __init__(self, chains: Sequence[Chain], queues: Sequence[int]) -> None:
        self._chains = chains
        self._queues = queues
        self._known: dict[tuple[_Group, ...], Score] = {}

    @property
    def tried(self) -> int:
        """Orders scored so far."""
        return len(self._known)

    def run(self, order: Sequence[_Group]) -> tuple[Score, tuple[_Group, ...]]:
        """Follow the first move that helps until none does."""
        best = tuple(order)
        score = self._score(best, _WORST)
        if score[0] == float("inf"):
            raise ScheduleError("the order to start from breaks a dependency", _flat(best))
        improved = True
        while improved:
            improved = False
            for other in _moves(best):
                found = self._score(other, score)
                if found < score:
                    best, score, improved = other, found, True
                    break
        return score, best

    def disturb(self, order: tuple[_Group, ...], rng: random.Random) -> tuple[_Group, ...]:
        """Make some random legal moves."""
        for _ in range(_SHUFFLES):
            legal = [other for other in rng.sample(list(_moves(order)), 40) if self._legal(other)]
            order = rng.choice(legal) if legal else order
        return order

    def _legal(self, order: tuple[_Group, ...]) -> bool:
        return self._chains[0].milliseconds(_flat(order), self._queues[0]) < float("inf")

    def _score(self, order: tuple[_Group, ...], beat: Score) -> Score:
        """The score, or something not below `beat` as soon as that is sure."""
        if order not in self._known:
            steps = _flat(order)
            scores: list[float] = []
            for chain in self._chains:
                # Rounded: sums of the same numbers in another order are equal.
                scores.append(round(sum(chain.milliseconds(steps, queues) for queues in self._queues), 6))
                if tuple(scores) > beat[: len(scores)]:
                    scores += [float("inf")] * (len(_WORST) - len(scores))
                    break
            else:
                scores.append(float(len(carried(steps) & self._chains[0].steps)))
            self._known[order] = tuple(scores)
        return self._known[order]


def _moves(order: tuple[_Group, ...]) -> Iterator[tuple[_Group, ...]]:
    """Every order that differs in the place of one group."""
    for place, group in enumerate(order):
        rest = order[:place] + order[place + 1 :]
        for target in range(len(order)):
            if target != place:
                yield (*rest[:target], group, *rest[target:])


def _flat(order: Sequence[_Group]) -> tuple[Step, ...]:
    return tuple(step for group in order for step in group)


def _glued(start: Order, active: frozenset[Step]) -> list[_Group]:
    """The steps that take time in the order of `start`, each with idle steps that may stand beside it."""
    groups: dict[Step, list[Step]] = {step: [step] for step in _spelt(start) if step in active}
    ops = (Op.FORWARD, *([Op.REPLAY] if any(step.op is Op.REPLAY for step in active) else []))
    for op in ops:
        _attach(groups, [Step(op, stage) for stage in _FORWARD])
    backward = [Step(Op.BACKWARD, stage) for stage in reversed(_FORWARD)]
    _attach(groups, backward)
    for step in backward:
        wgrad = Step(Op.WGRAD, step.stage)
        if wgrad not in active and step.stage not in _NO_WEIGHTS:
            group = next(group for group in groups.values() if step in group)
            group.insert(group.index(step) + 1, wgrad)
    return [tuple(group) for group in groups.values()]


def _spelt(start: Order) -> Iterator[Step]:
    """The steps of an order, the stages that `*` stands for by name."""
    for step in start.steps:
        if step.stage != REST:
            yield step
            continue
        stages = _FORWARD if step.op in (Op.FORWARD, Op.REPLAY) else reversed(_FORWARD)
        yield from (Step(step.op, stage) for stage in stages if stage not in start.named(step.op))


def _attach(groups: dict[Step, list[Step]], chain: Sequence[Step]) -> None:
    """Put each idle step of a chain behind the active one before it; those before the first active one, in front."""
    first = next(step for step in chain if step in groups)
    lead: list[Step] = []
    current: Callable[[Step], None] = lead.append
    for step in chain:
        if step in groups:
            current = groups[step].append
        else:
            current(step)
    groups[first][:0] = lead
