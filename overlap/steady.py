"""steady: what a layer pair costs in the middle of a long chain of them, and what a whole step costs.

Owns the choice of the part that is measured; how slots are placed in time is simulate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from overlap.ir import Lane, Op
from overlap.orders import Order
from overlap.simulate import exposure, simulate
from overlap.synthetic import MOE, System
from overlap.timeline import Timeline
from recompute.config import Method, RecomputeConfig

_SETTLE = 4
"""Pairs after which the lanes' lead over each other no longer changes."""
_TRANSFERS = ("dispatch", "combine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One layer pair (a layer's F, B, W and R) in steady state; times in milliseconds."""

    milliseconds: float
    compute_idle: float
    exposed: Mapping[str, float]
    """Idle compute while a transfer runs, per kind (`F.dispatch`, ... `R.combine`)."""
    bound: float
    """The longer of the pair's compute and its communication: no order takes less."""

    @property
    def over_bound(self) -> float:
        """Share by which the pair takes longer than the bound."""
        return self.milliseconds / self.bound - 1


def group_of(recompute: RecomputeConfig) -> int:
    """Layers of a segment; 1 where layers are recomputed singly or not at all."""
    return recompute.num_layers if recompute.method is Method.UNIFORM and recompute.num_layers else 1


def chain_of(system: System) -> System:
    """The same order and rule over a chain of MoE layers that is long enough, all of them recomputed if any is."""
    recompute = system.recompute
    group = group_of(recompute)
    every = RecomputeConfig.uniform(group, replay=recompute.replay) if recompute.enabled else recompute
    return replace(system, kinds=(MOE,) * sum(window(group)), recompute=every)


def window(group: int) -> tuple[int, int]:
    """The first pair of the measured part of a chain, and the one past its last: settled, and whole segments.

    As much of the same stands behind it.
    """
    pairs = group * -(-_SETTLE // group)
    return pairs, 2 * pairs


def measure(system: System, queues: int) -> Steady:
    """Simulate a chain of layer pairs and measure its steady state.

    Raises:
        ScheduleError: The order does not fit.
        ConfigError: A cost is missing.
    """
    chain = chain_of(system)
    timeline = simulate(system.order.name, chain.pair_run(), system.costs, queues)
    first, last = window(group_of(system.recompute))
    start, end = (_backward_end(timeline, chain, pair - 1) for pair in (first, last))
    pairs = last - first
    ops = (Op.FORWARD, Op.BACKWARD, *([Op.REPLAY] if system.recompute.enabled else []))
    kinds = [f"{op.value}.{stage}" for op in ops for stage in _TRANSFERS]
    found = exposure(timeline, start, end, kinds)
    return Steady(
        milliseconds=found.milliseconds / pairs,
        compute_idle=found.compute_idle / pairs,
        exposed={kind: time / pairs for kind, time in found.exposed.items()},
        bound=max(timeline.busy(lane, start, end) for lane in (Lane.COMPUTE, Lane.COMM)) / pairs,
    )


def measure_step(system: System, microbatches: int, queues: int) -> Timeline:
    """Simulate a whole step of the system's own layers."""
    return simulate(f"{system.order.name}, {queues} queue(s)", system.step_runs(microbatches), system.costs, queues)


def with_order(system: System, order: Order) -> System:
    """The system under another order."""
    return replace(system, order=order)


def _backward_end(timeline: Timeline, chain: System, pair: int) -> float:
    """When the backward of a pair's layer ended."""
    layer = chain.program.layers[-1 - pair]
    key = chain.program.layer_stages[layer][0].key
    return next(span.end for span in timeline.spans if span.slot.op is Op.BACKWARD and span.slot.key == key)
