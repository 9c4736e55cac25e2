"""The pipeline schedules: the order of actions of every rank, from torch's generators or ours.

What pairs forward with backward runs as OVERLAP_F_B: interleaved 1F1B in its steady state, and DualPipeV. The others
run one chunk at a time. In all of them a stage's microbatches run backward in ascending order, as the reference does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from overlap.errors import ScheduleError
from overlap.pipelining import compat
from overlap.pipelining.layout import PipelineLayout, Placement
from recompute.checks import check_kind
from recompute.config import check_count, parse_choice
from recompute.errors import ConfigError


class ScheduleKind(StrEnum):
    """How microbatches travel through the virtual stages."""

    INTERLEAVED = "interleaved"
    """Interleaved 1F1B (arXiv 2104.04473) with one more warm-up microbatch, so that the forward and the backward of
    the steady state are always of different microbatches and run as one."""
    DUALPIPEV = "dualpipev"
    """DualPipe (arXiv 2412.19437) as a V: two stages per rank, overlapped pairs, backward cut in two at the ends."""
    ZBV = "zbv"
    """Zero bubble as a V (arXiv 2401.10241): two stages per rank, every backward cut in two, nothing overlapped."""
    ONE_F_ONE_B = "1f1b"
    """Plain 1F1B: one stage per rank, nothing overlapped."""
    GPIPE = "gpipe"
    """All forwards, then all backwards, nothing overlapped."""


SPLITS = frozenset({ScheduleKind.DUALPIPEV, ScheduleKind.ZBV})
"""Schedules that cut backward into gradients of inputs and of weights."""


def placement_of(kind: ScheduleKind) -> Placement:
    """Which ranks hold the stages under a schedule.

    Raises:
        ConfigError: There is no such schedule.
    """
    return Placement.V if parse_choice(ScheduleKind, "schedule", kind) in SPLITS else Placement.LOOP


def make_orders(kind: ScheduleKind, layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    """The compute actions of every rank; no process group is needed.

    Raises:
        ConfigError: torch or a rule of the schedule rejects these counts; says why.
    """
    check_kind("layout", layout, PipelineLayout, "a PipelineLayout")
    check_count("num_microbatches", num_microbatches, at_least=1)
    if layout.placement is not placement_of(kind):
        rule = f"schedule {kind} places its stages as a {placement_of(kind)}"
        raise ConfigError(field="placement", value=layout.placement, rule=rule)
    stages = [compat.DryStage(stage, layout.num_stages, layout.pp) for stage in layout.stages_of(0)]
    try:
        orders = _ORDERS[kind](stages, layout, num_microbatches)
        compat.lower_actions(orders, layout.num_stages, num_microbatches)
    except (ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        value = f"{kind}, pp {layout.pp}, vpp {layout.vpp}, {num_microbatches} microbatches"
        raise ConfigError(field="schedule", value=value, rule=str(error).splitlines()[0]) from error
    return orders


def _interleaved(stages: Sequence[Any], layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    # torch's own checks the counts and says how many microbatches a round has
    plain = compat.ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=no_loss)  # type: ignore[arg-type]
    return {rank: _paired(rank, layout, plain.microbatches_per_round, num_microbatches) for rank in range(layout.pp)}


def _paired(rank: int, layout: PipelineLayout, per_round: int, num_microbatches: int) -> list[compat.Action]:
    """One rank of interleaved 1F1B, the (F, B) of its steady state as one action each."""
    pp, local = layout.pp, layout.vpp
    total = local * num_microbatches
    warm = min(compat.get_warmup_ops(rank, local, per_round, pp, num_microbatches, multiply_factor=2) + 1, total)

    def forward(step: int) -> int:
        return ((step // per_round) % local) * pp + rank

    def backward(step: int) -> int:
        return (local - 1 - ((step - warm) // per_round) % local) * pp + rank

    every = compat.get_1f1b_rank_ops(local, pp, warm, total - warm, warm, rank, forward, backward)
    actions = [action for action in every if action is not None]
    steady = actions[warm : 2 * total - warm]
    pairs = [compat.Action(-1, compat.OVERLAP_F_B, None, pair) for pair in zip(steady[::2], steady[1::2], strict=True)]
    return [*actions[:warm], *pairs, *actions[2 * total - warm :]]


def _dualpipev(stages: Sequence[Any], layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    schedule = compat.ScheduleDualPipeV(list(stages), num_microbatches, loss_fn=no_loss)
    return schedule.pipeline_order


def _zbv(stages: Sequence[Any], layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    schedule = compat.ScheduleZBVZeroBubble(list(stages), num_microbatches, loss_fn=no_loss)
    return schedule.pipeline_order


def _plain(stages: Sequence[Any], layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    if layout.vpp != 1:
        raise ConfigError(field="vpp", value=layout.vpp, rule="must be 1 for schedule 1f1b: interleaved takes more")
    return {rank: _plain_rank(rank, layout.pp, num_microbatches) for rank in range(layout.pp)}


def _plain_rank(rank: int, pp: int, num_microbatches: int) -> list[compat.Action]:
    warm = min(pp - 1 - rank, num_microbatches)
    forward = [compat.Action(rank, compat.FORWARD, number) for number in range(num_microbatches)]
    backward = [compat.Action(rank, compat.FULL_BACKWARD, number) for number in range(num_microbatches)]
    steady = [action for pair in zip(forward[warm:], backward, strict=False) for action in pair]
    return [*forward[:warm], *steady, *backward[num_microbatches - warm :]]


def _gpipe(stages: Sequence[Any], layout: PipelineLayout, num_microbatches: int) -> compat.RankActions:
    orders = {}
    for rank in range(layout.pp):
        own = layout.stages_of(rank)
        forward = [compat.Action(s, compat.FORWARD, number) for s in own for number in range(num_microbatches)]
        backward = [
            compat.Action(s, compat.FULL_BACKWARD, number) for s in reversed(own) for number in range(num_microbatches)
        ]
        orders[rank] = [*forward, *backward]
    return orders


_ORDERS: Mapping[ScheduleKind, Callable[[Sequence[Any], PipelineLayout, int], compat.RankActions]] = MappingProxyType({
    ScheduleKind.INTERLEAVED: _interleaved,
    ScheduleKind.DUALPIPEV: _dualpipev,
    ScheduleKind.ZBV: _zbv,
    ScheduleKind.ONE_F_ONE_B: _plain,
    ScheduleKind.GPIPE: _gpipe,
})  # fmt: skip


def no_loss(*_: object) -> Any:
    """Stands for a loss function: with one, a schedule runs backward. The losses are stages of the last program."""
    raise ScheduleError("losses are part of the last virtual stage's program")


class OrderedSchedule(compat.Runtime):
    """torch's runtime over given orders.

    Args:
        stages: The virtual stages of this rank.
        num_microbatches: Of a step.
        orders: From make_orders().
    """

    def __init__(
        self, stages: Sequence[compat.PipelineStage], num_microbatches: int, orders: compat.RankActions
    ) -> None:
        # the losses are scaled, never stored gradients
        super().__init__(list(stages), num_microbatches, loss_fn=no_loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self.pipeline_order = {rank: list(actions) for rank, actions in orders.items()}
        self._prepare_schedule_with_comms(self.pipeline_order)

    @property
    def own_actions(self) -> list[compat.Action]:
        """The compute actions of this rank, in order."""
        return [action for action in self.pipeline_order[self.rank] if action is not None]

    @property
    def overlapped(self) -> int:
        """Actions of this rank that run forward and backward as one."""
        return count_pairs(self.pipeline_order[self.rank])


def count_pairs(actions: Sequence[compat.Action | None]) -> int:
    """Actions that run forward and backward as one."""
    return sum(action is not None and action.computation_type is compat.OVERLAP_F_B for action in actions)
