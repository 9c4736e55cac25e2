"""From settings to a Plan: expand, rewrite, validate, lower, in that order; plans are made once and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from overlap.errors import ScheduleError
from overlap.expand import expand
from overlap.hidden import Hosts, hosts_of
from overlap.ir import Program, Schedule, StageKey
from overlap.keeping import add_transfers
from overlap.lead import check_lead, handed_over, interleave, leading, remaining
from overlap.lower import Key, Plan, backward_reads, lower
from overlap.orders import Order, get_order
from overlap.passes import add_replay, delay_wgrad, drop_untrained, elide_replay
from overlap.selective import rebuilt_parts, rebuilt_stages
from overlap.side import Side
from overlap.transfers import place_transfers
from overlap.validate import validate
from recompute.config import RecomputeConfig, Replay
from recompute.segments import RecomputeSegment, plan_segments

FORWARD_SIDE = 1
"""Microbatch number of the side that runs forward, in a plan's slots."""
BACKWARD_SIDE = 0
LEAD_SIDE = 2
"""Of the side whose first layers run beside another one's forward."""
StepPlan = tuple[Plan, Mapping[int, int]]
"""A plan of a step, and for each microbatch number of its slots the number within the step."""


def segments_of(program: Program, config: RecomputeConfig) -> tuple[RecomputeSegment, ...]:
    """The segments of a program's layers under a config (R1); the rule counts from the program's first layer."""
    mtp, first = len(program.mtp_layers), program.first_layer
    segments = plan_segments(len(program.layers) - mtp, mtp, config)
    return tuple(RecomputeSegment(tuple(layer + first for layer in segment.layers)) for segment in segments)


def make_schedule(
    order: Order,
    forward: Side | None,
    backward: Side | None,
    *,
    delayed: bool,
    elide: bool = True,
    replay_first: bool = False,
    lead: Side | None = None,
    placed: bool = False,
) -> Schedule:
    """The slots of a pair of sides: expanded, recomputed, checked.

    Args:
        order: How they interleave.
        forward: Runs forward; None: backward runs alone.
        backward: Runs backward; None: forward runs alone.
        delayed: Whether weight gradients have slots of their own.
        elide: False: replay every stage, needed or not. The simulator compares.
        replay_first: Replay before anything of the segment's backward. The simulator compares.
        lead: Runs its first layers beside `forward`, which runs whole, without a backward.
        placed: Move the sends and receives of pipeline parts to where place_transfers wants them.

    Raises:
        ScheduleError: The order does not fit the programs, or has no R steps for a replay that is to be hidden.
    """
    sides = sides_of(forward, backward, lead)
    schedule = expand(
        order,
        None if forward is None else (FORWARD_SIDE, forward.program),
        None if backward is None else (BACKWARD_SIDE, backward.program),
        Hosts() if backward is None else _hosts(order, backward),
        skips=0 if forward is None else forward.skips,
    )
    if lead is not None:
        first = expand(order, (LEAD_SIDE, lead.program), None, stops=lead.stops)
        schedule = interleave(schedule, first, lead.program)
    schedule = drop_untrained(schedule, sides)
    schedule = delay_wgrad(schedule, sides, delayed=delayed)
    schedule = add_replay(schedule, sides, first=replay_first)
    if elide:
        schedule = elide_replay(schedule, sides)
    if placed:
        # Before S and L, which stand by the slots that write and replay.
        schedule = place_transfers(schedule, sides)
    schedule = add_transfers(schedule, sides)
    validate(schedule, sides)
    return schedule


def _hosts(order: Order, backward: Side) -> Hosts:
    if backward.hidden and not order.replays:
        reason = "has no R steps, so it hides no replay: add them, take a built-in order that has them, or replay "
        raise ScheduleError(f"order {order.name} {reason}just in time", order.steps)
    return hosts_of(backward)


def sides_of(forward: Side | None, backward: Side | None, lead: Side | None = None) -> dict[int, Side]:
    """Those that are there, by their number in slots."""
    every = {FORWARD_SIDE: forward, BACKWARD_SIDE: backward, LEAD_SIDE: lead}
    return {number: side for number, side in every.items() if side is not None}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan depends on; equal requests share one plan."""

    forward: RecomputeConfig | None
    backward: RecomputeConfig | None
    trained: frozenset[StageKey]
    lead: RecomputeConfig | None = None
    """Of the microbatch whose lead runs beside `forward`."""
    begun: bool = False
    """Whether the lead of `forward` ran in an earlier plan."""


class Planner:
    """Makes the plans of one program and order, and keeps them.

    Args:
        program: The stages.
        order: How slots interleave.
        delayed: Whether weight gradients have slots of their own.
        lead: Layers of a lead.

    Raises:
        ConfigError: The program has no such lead.
    """

    def __init__(self, program: Program, order: Order, *, delayed: bool, lead: int = 0) -> None:
        check_lead(lead, len(program.layers))
        self.program = program
        self.order = order
        self.delayed = delayed
        self.lead = lead
        self._plans: dict[PlanRequest, Plan] = {}
        self._sides: dict[tuple[RecomputeConfig, frozenset[StageKey]], Side] = {}
        self._survivors: dict[tuple[RecomputeConfig, frozenset[StageKey]], frozenset[Key]] = {}

    def side(self, config: RecomputeConfig, trained: frozenset[StageKey]) -> Side:
        """The program as one microbatch runs it under `config`."""
        if (config, trained) not in self._sides:
            segments = segments_of(self.program, config)
            self._sides[config, trained] = Side(
                self.program,
                segments,
                trained,
                hidden=config.replay is Replay.HIDDEN,
                alone=rebuilt_stages(self.program, config, segments),
                parts=rebuilt_parts(self.program, config, segments),
                keep=config.keep,
            )
        return self._sides[config, trained]

    def survivors(self, config: RecomputeConfig, trained: frozenset[StageKey]) -> frozenset[Key]:
        """Values that a microbatch's backward reads of its first pass: what the gap keeps beside graphs (R2)."""
        if (config, trained) not in self._survivors:
            # Where replays go does not change what they read.
            side = replace(self.side(config, trained), hidden=False)
            schedule = make_schedule(get_order("plain"), None, side, delayed=False)
            reads = backward_reads(schedule, {BACKWARD_SIDE: side})
            self._survivors[config, trained] = reads.get(BACKWARD_SIDE, frozenset())
        return self._survivors[config, trained]

    def schedule(self, request: PlanRequest) -> Schedule:
        """The slots behind a plan."""
        forward, backward, lead = self._asked(request)
        return make_schedule(self.order, forward, backward, delayed=self.delayed, lead=lead)

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for one pair of sides, made at the first request.

        Raises:
            ScheduleError: The order does not fit the program.
        """
        if request not in self._plans:
            sides = sides_of(*self._asked(request))
            kept = {} if request.forward is None else {FORWARD_SIDE: self.survivors(request.forward, request.trained)}
            if request.lead is not None:
                rest = remaining(self.side(request.lead, request.trained), self.lead)
                kept[LEAD_SIDE] = handed_over(rest, self.survivors(request.lead, request.trained))
            self._plans[request] = lower(self.schedule(request), sides, kept)
        return self._plans[request]

    def step(self, configs: Sequence[RecomputeConfig], trained: frozenset[StageKey]) -> list[StepPlan]:
        """The plans of a step: forward of the first alone, then pairs, then backward of the last alone.

        With a lead the second forward begins in the first plan, if there is a second microbatch.

        Args:
            configs: Of each microbatch.
            trained: `Program.trained()`.

        Raises:
            ScheduleError: The order does not fit the program.
        """
        lead = bool(self.lead) and len(configs) > 1
        plans: list[StepPlan] = []
        for ahead in range(len(configs) + 1):
            numbers = {FORWARD_SIDE: ahead, BACKWARD_SIDE: ahead - 1, **({LEAD_SIDE: 1} if lead and not ahead else {})}
            numbers = {side: number for side, number in numbers.items() if 0 <= number < len(configs)}
            forward, backward, early = (
                configs[numbers[side]] if side in numbers else None for side in (FORWARD_SIDE, BACKWARD_SIDE, LEAD_SIDE)
            )
            request = PlanRequest(forward, backward, trained, lead=early, begun=lead and ahead == 1)
            plans.append((self.plan(request), numbers))
        return plans

    def _asked(self, request: PlanRequest) -> tuple[Side | None, Side | None, Side | None]:
        """The sides of a request: forward, backward, lead."""
        forward, backward, lead = (
            None if config is None else self.side(config, request.trained)
            for config in (request.forward, request.backward, request.lead)
        )
        if forward is not None and request.begun:
            forward = remaining(forward, self.lead)
        return forward, backward, None if lead is None else leading(lead, self.lead)

    def forward_plan(self) -> Plan:
        """The plan of a forward that no backward follows (R17)."""
        request = PlanRequest(None, None, frozenset())
        if request not in self._plans:
            side = Side(self.program, (), frozenset(), keeps_graph=False)
            schedule = make_schedule(self.order, side, None, delayed=False)
            self._plans[request] = lower(schedule, {FORWARD_SIDE: side}, {})
        return self._plans[request]
