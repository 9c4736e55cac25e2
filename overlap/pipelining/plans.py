"""PairPlans: the plans of a rank's virtual stages: forward of one beside backward of another, or one of them alone.

The two sides are programs of their own. Where a schedule cuts backward in two, the first part gives the gradients of
the inputs, the second those of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from overlap.ir import WEIGHTS, Op, Schedule, StageKey
from overlap.lower import Plan, lower
from overlap.orders import Order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, Planner, make_schedule, sides_of
from overlap.side import Side
from overlap.validate import validate
from recompute.config import RecomputeConfig


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a plan: what a virtual stage does for one microbatch."""

    stage: int
    """Number of the virtual stage."""
    config: RecomputeConfig
    trained: frozenset[StageKey]
    """Program.trained() of the stage."""


class PairPlans:
    """Makes the plans of one rank, and keeps them.

    Args:
        planners: Of each virtual stage of the rank.
        order: How a pair of layers interleaves.
        delayed: Whether weight gradients have slots of their own.
        pin: Where backward is cut in two: also put off the weight gradients of recomputed segments, which keeps
            their activations until then (R13). They are part of the first half otherwise.
    """

    def __init__(self, planners: Mapping[int, Planner], order: Order, *, delayed: bool, pin: bool = False) -> None:
        self._planners = planners
        self._order = order
        self._delayed = delayed
        self._pin = pin
        self._plans: dict[tuple[Half | None, Half | None], Plan] = {}
        self._halves: dict[Half, tuple[Plan, Plan]] = {}
        self._evaluations: dict[int, Plan] = {}

    def pair(self, forward: Half | None, backward: Half | None) -> Plan:
        """Forward of one stage's microbatch beside backward of another's; None: the other side alone.

        Raises:
            ScheduleError: The order does not fit the programs.
        """
        if (forward, backward) not in self._plans:
            ahead, behind = self._side(forward), self._side(backward)
            schedule = make_schedule(self._order, ahead, behind, delayed=self._delayed, placed=True)
            kept = {} if forward is None else {FORWARD_SIDE: self._survivors(forward)}
            self._plans[forward, backward] = lower(schedule, sides_of(ahead, behind), kept)
        return self._plans[forward, backward]

    def halves(self, backward: Half) -> tuple[Plan, Plan]:
        """Backward alone, cut in two: gradients of the inputs, then the weight gradients that were put off."""
        if backward not in self._halves:
            side = self._planners[backward.stage].side(backward.config, backward.trained)
            schedule = make_schedule(self._order, None, side, delayed=True, placed=True)
            now, later = _put_off(schedule, side, self._pin)
            validate((*now, *later), {BACKWARD_SIDE: side})
            plan = lower((*now, *later), {BACKWARD_SIDE: side}, {})
            first, second = plan.issues[: len(now)], plan.issues[len(now) :]
            self._halves[backward] = (replace(plan, issues=first), replace(plan, issues=second, imports={}))
        return self._halves[backward]

    def evaluation(self, stage: int) -> Plan:
        """Forward that no backward follows (R17)."""
        if stage not in self._evaluations:
            side = Side(self._planners[stage].program, (), frozenset(), keeps_graph=False)
            schedule = make_schedule(self._order, side, None, delayed=False, placed=True)
            self._evaluations[stage] = lower(schedule, {FORWARD_SIDE: side}, {})
        return self._evaluations[stage]

    def _side(self, half: Half | None) -> Side | None:
        return None if half is None else self._planners[half.stage].side(half.config, half.trained)

    def _survivors(self, half: Half) -> frozenset[tuple[str, int]]:
        return self._planners[half.stage].survivors(half.config, half.trained)


def _put_off(schedule: Schedule, side: Side, pin: bool) -> tuple[Schedule, Schedule]:
    """Cut a backward's slots in two: the rest, and the weight gradients that may come later."""
    later = [
        slot
        for slot in schedule
        if slot.op is Op.WGRAD and (pin or side.segment(side.program.by_key[slot.key]) is None)
    ]
    late = {slot.key for slot in later}
    # The sum of a shared parameter's uses waits for all of them.
    shared = side.program.by_key.get((None, WEIGHTS))
    if shared is not None and any(r.key in late for value in shared.writes for r in side.program.readers[value]):
        later += [slot for slot in schedule if slot.op is Op.BACKWARD and slot.key == shared.key]
    return tuple(slot for slot in schedule if slot not in later), tuple(later)
