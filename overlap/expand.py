"""expand: an order and a pair of chunks become the flat list of slots to issue.

Forward layer i is paired with backward layer L-1-i; where one side has more layers, the rest run alone, the backward
ones first. Recompute is a later rewrite (passes); only replays that are hidden behind other layers get their slots
here, where the order's R steps say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from overlap.errors import ScheduleError
from overlap.hidden import Hosts, spread
from overlap.ir import Op, Program, Schedule, Slot, Stage
from overlap.orders import REST, STAGE_NAMES, Order, Step, carried


def expand(
    order: Order,
    forward: tuple[int, Program] | None,
    backward: tuple[int, Program] | None,
    hosts: Hosts = Hosts(),  # noqa: B008 (frozen)
    *,
    skips: int = 0,
    stops: int | None = None,
) -> Schedule:
    """Interleave the forward of one microbatch with the backward of another.

    Args:
        order: How the slots of a layer pair interleave.
        forward: (microbatch, program) of the side that runs forward; None: backward runs alone.
        backward: The same for the side that runs backward.
        hosts: Which layers of `backward` are replayed beside which.
        skips: Leading layers of `forward` to leave out, with the chunk's stages before them.
        stops: Layers of `forward` after which to stop; None: with the chunk's last stage.

    Returns:
        Slots in issue order; every stage of either side once, but for those left out; W for every stage with weight
        gradients, and R for every stage of a hosted layer.

    Raises:
        ScheduleError: The order names a stage that nobody has, or leaves out one that a layer has.
    """
    _check_names(order, [side[1] for side in (forward, backward) if side is not None])
    slots: list[Slot] = []
    if forward is not None and not skips:
        slots += [_slot(Op.FORWARD, forward[0], stage) for stage in forward[1].prologue]
    if backward is not None:
        slots += [_slot(Op.REPLAY, backward[0], stage) for stage in hosts.head]
        slots += _chunk_backward(backward[0], backward[1].epilogue)
    ahead = [] if forward is None else [_part(*forward, layer) for layer in forward[1].layers[skips:stops]]
    slots += _pairs(order, ahead, backward, hosts)
    if forward is not None and stops is None:
        slots += [_slot(Op.FORWARD, forward[0], stage) for stage in forward[1].epilogue]
    if backward is not None:
        slots += _chunk_backward(backward[0], backward[1].prologue)
    return tuple(slots)


def _pairs(order: Order, ahead: Sequence[_Part], backward: tuple[int, Program] | None, hosts: Hosts) -> Iterable[Slot]:
    behind = []
    if backward is not None:
        microbatch, program = backward
        for layer in program.layers[::-1]:
            hosted = [program.layer_stages[other] for other in hosts.layers.get(layer, ())]
            behind.append(_Part(microbatch, program.layer_stages[layer], hosted))
    before = _NOTHING
    for front, back in zip_longest(ahead, behind, fillvalue=_NOTHING):
        yield from _pair(order, front, back, before)
        before = back
    for step in order.steps:
        if step in carried(order.steps):
            yield from (_slot(step.op, before.microbatch, stage) for stage in _chosen(order, step, before.stages))


@dataclass(frozen=True, slots=True)
class _Part:
    """One side's layer in a pair, and the layers that are replayed beside it."""

    microbatch: int
    stages: Sequence[Stage]
    hosted: Sequence[Sequence[Stage]] = ()


_NOTHING = _Part(0, ())
"""The side that has no layer left."""


def _part(microbatch: int, program: Program, layer: int) -> _Part:
    return _Part(microbatch, program.layer_stages[layer])


def _pair(order: Order, front: _Part, back: _Part, before: _Part) -> Iterable[Slot]:
    """One forward layer beside one backward layer, in the order's steps; `before` ran backward in the last pair."""
    replays, rest = spread(order, back.hosted)
    late = carried(order.steps)
    for step in order.steps:
        part = front if step.op is Op.FORWARD else before if step in late else back
        for stage in replays.get(step, ()) if step.op is Op.REPLAY else _chosen(order, step, part.stages):
            yield _slot(step.op, part.microbatch, stage)
    for stage in rest:
        yield _slot(Op.REPLAY, back.microbatch, stage)


def _chosen(order: Order, step: Step, stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages of a layer that a step takes."""
    named = {step.stage} if step.stage != REST else {s.name for s in stages} - order.named(step.op)
    chosen = [s for s in stages if s.name in named and (step.op is not Op.WGRAD or s.wgrad)]
    return chosen if step.op is Op.FORWARD else chosen[::-1]


def _chunk_backward(microbatch: int, stages: Sequence[Stage]) -> Iterable[Slot]:
    """Backward of stages outside any layer, last first, each weight gradient right behind."""
    for stage in reversed(stages):
        yield _slot(Op.BACKWARD, microbatch, stage)
        if stage.wgrad:
            yield _slot(Op.WGRAD, microbatch, stage)


def _check_names(order: Order, programs: Sequence[Program]) -> None:
    # A chunk may have no layers, or other ones than its partner: a name is unknown if nobody has it.
    layered = [stage for program in programs for stage in program.stages if stage.layer is not None]
    stages = {stage.name: stage for stage in layered}
    for index, step in enumerate(order.steps):
        if stages and step.stage not in {REST, *STAGE_NAMES, *stages}:
            raise ScheduleError(f"order {order.name} names an unknown stage {step.stage!r}", order.steps, index)
    wanted: Mapping[Op, set[str]] = {
        Op.FORWARD: set(stages),
        Op.BACKWARD: set(stages),
        Op.WGRAD: {stage.name for stage in layered if stage.wgrad},
    }
    for op, names in wanted.items():
        missing = sorted(names - order.named(op)) if not order.has_rest(op) else []
        if missing:
            raise ScheduleError(
                f"order {order.name} has no step {op.value}.{missing[0]}, which stage {stages[missing[0]].label} "
                "needs; use order plain, or an order that names it"
            )


def _slot(op: Op, microbatch: int, stage: Stage) -> Slot:
    return Slot(op, microbatch, stage.layer, stage.name)
