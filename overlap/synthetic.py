"""Synthetic programs and plans: the stages of a Mixture-of-Experts decoder without functions, to be simulated.

Owns what the simulator needs in place of a model; nothing here runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from overlap.builder import ProgramBuilder, Value
from overlap.costs import StageCosts
from overlap.ir import Op, Program
from overlap.lead import handed_over, leading, remaining
from overlap.lower import Key, Plan, backward_reads, lower
from overlap.orders import Order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, LEAD_SIDE, make_schedule, segments_of, sides_of
from overlap.side import Side
from overlap.simulate import Run
from recompute.config import RecomputeConfig, Replay

MOE, DENSE = "M", "D"
"""Letters of layer kinds."""
TODAY = "fused"
"""The order that is simulated with all of today's best system's habits, not only its order: what follows a combine
runs on the communication lane with it, and a replay comes whole, before anything else of its layer pair."""


@dataclass(slots=True)
class _Weight:
    """A parameter that trains."""

    requires_grad: bool = True


def _never(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a synthetic program is planned and simulated, never run")


def synthetic_program(
    kinds: Sequence[str], costs: StageCosts, *, fused: bool = False, first: bool = True, last: bool = True
) -> Program:
    """A decoder with one layer per letter (M: MoE, D: dense) and the optional stages that `costs` knows.

    Args:
        kinds: Letters of the layers.
        costs: A layer has `shared` and `post_attn` if these have a time, and weight gradients where W has.
        fused: Whether `post` runs on the communication lane.
        first: Whether it has the embedding; otherwise it is fed the hidden states.
        last: Whether it has the head; otherwise it hands the hidden states on.
    """
    b = ProgramBuilder()
    layer = _Layer(b, costs, fused)
    if first:
        (hidden,) = layer.compute("embed", b.input("ids"), outputs=("embedded",))
    else:
        hidden = b.input("hidden", needs_grad=True)
    for index, kind in enumerate(kinds):
        with b.layer(index):
            hidden = layer.add(kind, hidden)
    if not last:
        return b.build(outputs=(hidden,))
    (loss,) = layer.compute("head", hidden, outputs=("loss",))
    b.loss(loss)
    return b.build()


class _Layer:
    """Adds stages to a builder."""

    def __init__(self, b: ProgramBuilder, costs: StageCosts, fused: bool) -> None:
        self._b, self._costs, self._fused = b, costs, fused

    def compute(self, name: str, *reads: Value, outputs: Sequence[str], **more: Any) -> tuple[Value, ...]:
        """A stage with parameters."""
        wgrad = self._costs.has(Op.WGRAD, name)
        return self._b.compute(name, _never, *reads, outputs=outputs, parameters=[_Weight()], wgrad=wgrad, **more)

    def add(self, kind: str, hidden: Value) -> Value:
        """All stages of a layer."""
        if self._costs.has(Op.FORWARD, "post_attn"):
            (hidden,) = self.compute("attn", hidden, outputs=("context",))
        name = "post_attn" if self._costs.has(Op.FORWARD, "post_attn") else "attn"
        if kind == DENSE:
            residual, tokens = self.compute(name, hidden, outputs=("residual", "tokens"))
            (mixed,) = self.compute("experts", tokens, outputs=("mixed",))
            (out,) = self._b.compute("post", _never, residual, mixed, outputs=("out",), adjoint=_never)
            return out
        written = ("residual", "tokens", "probs")
        residual, tokens, probs, routing = self.compute(
            name, hidden, outputs=written, nondiff=("routing",), pins=("routing",)
        )
        extra: tuple[Value, ...] = ()
        if self._costs.has(Op.FORWARD, "shared"):
            extra = self.compute("shared", tokens, outputs=("extra",))
        sent = self._b.comm("dispatch", _never, tokens, probs, routing, outputs=("sent", "weights"), adjoint=_never)
        (done,) = self.compute("experts", *sent, outputs=("done",))
        (mixed,) = self._b.comm("combine", _never, done, routing, outputs=("mixed",), adjoint=_never)
        post = self._b.comm if self._fused else self._b.compute
        (out,) = post("post", _never, residual, mixed, *extra, outputs=("out",), adjoint=_never)
        return out


@dataclass(frozen=True, kw_only=True)
class System:
    """Everything that plans of synthetic layers depend on."""

    kinds: tuple[str, ...]
    order: Order
    recompute: RecomputeConfig
    costs: StageCosts
    delayed: bool = True
    lead: int = 0
    """Layers of the second forward of a step that run beside the first."""
    first: bool = True
    """Whether it begins with the embedding, as the first virtual stage of a pipeline does."""
    last: bool = True
    """Whether it ends with the head."""

    @cached_property
    def program(self) -> Program:
        """The synthetic program."""
        return synthetic_program(self.kinds, self.costs, fused=self.today, first=self.first, last=self.last)

    @cached_property
    def side(self) -> Side:
        """The program as a microbatch runs it."""
        hidden = self.recompute.replay is Replay.HIDDEN
        return Side(self.program, segments_of(self.program, self.recompute), self.program.trained(), hidden=hidden)

    def plan(self, *, forward: bool, backward: bool) -> Plan:
        """The plan in which these sides run.

        Raises:
            ScheduleError: The order does not fit.
        """
        return plan_chunks(self if forward else None, self if backward else None)

    def pair_run(self) -> list[Run]:
        """One forward beside one backward; what ran before is not there."""
        return [(self.plan(forward=True, backward=True), {FORWARD_SIDE: 1, BACKWARD_SIDE: 0})]

    def step_runs(self, microbatches: int) -> list[Run]:
        """A training step: forward of the first alone, then pairs, then backward of the last alone.

        With a lead the second forward begins beside the first one, if there is a second.
        """
        leads = bool(self.lead) and microbatches > 1
        pair = self.plan(forward=True, backward=True) if microbatches > 1 else Plan(issues=(), imports={}, exports={})
        runs: list[Run] = [
            (self.plan(forward=True, backward=False), {FORWARD_SIDE: 0}),
            *((pair, {FORWARD_SIDE: number, BACKWARD_SIDE: number - 1}) for number in range(1, microbatches)),
            (self.plan(forward=False, backward=True), {BACKWARD_SIDE: microbatches - 1}),
        ]
        if leads:
            runs[0] = (plan_chunks(self, None, lead=True), {FORWARD_SIDE: 0, LEAD_SIDE: 1})
            runs[1] = (plan_chunks(self, self, begun=True), runs[1][1])
        return runs

    @property
    def today(self) -> bool:
        """Whether the order is simulated with all of today's best system's habits."""
        return self.order.name == TODAY

    @cached_property
    def survivors(self) -> frozenset[Key]:
        """Values that the backward reads of the first pass."""
        side = replace(self.side, hidden=False)
        schedule = make_schedule(self.order, None, side, delayed=False, elide=not self.today)
        return backward_reads(schedule, {BACKWARD_SIDE: side}).get(BACKWARD_SIDE, frozenset())


def plan_chunks(forward: System | None, backward: System | None, *, lead: bool = False, begun: bool = False) -> Plan:
    """The plan in which one chunk runs forward beside another one's (or the same one's) backward.

    Args:
        forward: Runs forward; None: the other runs alone.
        backward: Runs backward; under the same order and settings.
        lead: Whether `forward` runs its lead for the next microbatch too, beside the one that it runs whole.
        begun: Whether the lead of `forward` ran in an earlier plan.

    Raises:
        ScheduleError: The order does not fit.
    """
    one = next(chunk for chunk in (forward, backward) if chunk is not None)
    ahead = None if forward is None else remaining(forward.side, one.lead) if begun else forward.side
    behind = None if backward is None else backward.side
    early = leading(one.side, one.lead) if lead else None
    schedule = make_schedule(
        one.order, ahead, behind, delayed=one.delayed, elide=not one.today, replay_first=one.today, lead=early
    )
    kept = {} if forward is None else {FORWARD_SIDE: forward.survivors}
    if lead:
        kept[LEAD_SIDE] = handed_over(remaining(one.side, one.lead), one.survivors)
    return lower(schedule, sides_of(ahead, behind, early), kept)
