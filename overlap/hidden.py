"""Hidden replay (R10): which layers are replayed beside which backward layer, and at which steps of the order.

While the c layers of one segment run backward, the k layers of the segment that comes next are replayed in forward
order, split evenly over them; so at most two segments are live. An eager layer hosts the segment directly next to it.
The segment whose backward comes first has no layer before it: its first transfer goes beside the chunk's last stages,
the rest is replayed just in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

from overlap.ir import Lane, Op, Stage
from overlap.orders import REST, Order, Step
from overlap.side import Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where the replays of a backward side go; empty: nowhere in particular, they are added just in time."""

    layers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Per layer that runs backward, the layers that are replayed beside it, in forward order."""
    head: tuple[Stage, ...] = ()
    """Stages of the first segment that are replayed before the chunk's last stages run backward."""


def hosts_of(side: Side) -> Hosts:
    """Place the replays of every segment that needs one."""
    if not side.hidden:
        return Hosts()
    layers: dict[int, tuple[int, ...]] = {}
    head: tuple[Stage, ...] = ()
    for segment in side.segments:
        if not any((layer, s.name) in side.replay_needed for layer in segment.layers for s in _stages(side, layer)):
            continue
        if segment.last == side.program.layers[-1]:
            head = _first_transfer(side, segment.layers) if side.program.epilogue else ()
            continue
        before = _unit(side, segment.last + 1)[::-1]
        for place, host in enumerate(before):
            first, last = (len(segment) * end // len(before) for end in (place, place + 1))
            layers[host] = segment.layers[first:last]
    return Hosts(layers=layers, head=head)


def spread(order: Order, layers: Sequence[Sequence[Stage]]) -> tuple[Mapping[Step, Sequence[Stage]], Sequence[Stage]]:
    """Give the stages of the replayed layers to the order's R steps.

    One layer follows the steps' names. Several are strung together and spread evenly over the steps, so that their
    transfers do not all come at the end.

    Returns:
        The stages of each R step, and those that no step takes: they come after the pair.
    """
    steps = [step for step in order.steps if step.op is Op.REPLAY]
    stages = list(chain.from_iterable(layers))
    if len(layers) > 1:
        taken: dict[Step, list[Stage]] = {step: [] for step in steps}
        for place, stage in enumerate(stages):
            taken[steps[place * len(steps) // len(stages)]].append(stage)
        return taken, ()
    named = order.named(Op.REPLAY)
    by_step = {step: [s for s in stages if s.name == step.stage] for step in steps if step.stage != REST}
    rest = [stage for stage in stages if stage.name not in named]
    return (by_step, rest) if not order.has_rest(Op.REPLAY) else ({**by_step, Step(Op.REPLAY, REST): rest}, ())


def _stages(side: Side, layer: int) -> Sequence[Stage]:
    return side.program.layer_stages[layer]


def _unit(side: Side, layer: int) -> tuple[int, ...]:
    """The layers that run backward together with `layer`: its segment, or itself."""
    segment = side.segment_of.get(layer)
    return (layer,) if segment is None else side.segments[segment].layers


def _first_transfer(side: Side, layers: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a segment up to its first transfer; none if it transfers nothing."""
    stages = [stage for layer in layers for stage in _stages(side, layer) if stage.key in side.replay_needed]
    before = list(takewhile(lambda stage: stage.lane is Lane.COMPUTE, stages))
    return tuple(stages[: len(before) + 1]) if len(before) < len(stages) else ()
