"""What a schedule holds: microbatches in flight per virtual stage and rank, read off its actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap.pipelining import compat

_STARTS = (compat.FORWARD,)
_ENDS = (compat.FULL_BACKWARD, compat.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Most microbatches whose forward has run and whose backward has not."""

    stages: Mapping[int, int]
    """Per virtual stage."""
    ranks: Mapping[int, int]
    """Per rank, its stages together."""
    waiting: Mapping[int, int]
    """Per rank, most weight gradients that a cut backward has put off."""


def in_flight(orders: compat.RankActions) -> InFlight:
    """Count along the orders of make_orders(). Within a pair the forward comes first."""
    stages: dict[int, int] = {}
    ranks: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for rank, actions in orders.items():
        live: dict[int, int] = {}
        pending = ranks[rank] = waiting[rank] = 0
        for action in (part for item in actions if item is not None for part in item.sub_actions or (item,)):
            kind, stage = action.computation_type, action.stage_index
            live[stage] = live.get(stage, 0) + (kind in _STARTS) - (kind in _ENDS)
            pending += (kind is compat.BACKWARD_INPUT) - (kind is compat.BACKWARD_WEIGHT)
            stages[stage] = max(stages.get(stage, 0), live[stage])
            ranks[rank] = max(ranks[rank], sum(live.values()))
            waiting[rank] = max(waiting[rank], pending)
    return InFlight(stages=stages, ranks=ranks, waiting=waiting)
