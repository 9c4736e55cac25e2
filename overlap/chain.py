"""Chain: a long row of layer pairs whose order can be changed without planning again, to score many orders.

The slots and what they need of each other come from one lowered plan; an order only says in which sequence the slots
of a pair are launched. Which orders are tried is search's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlap.costs import StageCosts
from overlap.hidden import hosts_of
from overlap.ir import Op, Slot
from overlap.lower import Issue
from overlap.orders import Step, carried
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE
from overlap.simulate import Task, place_tasks, task_of
from overlap.steady import group_of, window
from overlap.synthetic import System

_RUNS_FORWARD = (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)


@dataclass(frozen=True, slots=True)
class _Pair:
    by_step: Mapping[Step, Sequence[int]]
    """Issues that a step of the order launches."""
    block: Sequence[int]
    """Replays that are launched just in time, before the first of `needing`."""
    needing: frozenset[Step]
    last: int
    """The issue that ends the pair's backward."""


_NOTHING = _Pair({}, (), frozenset(), -1)
"""Before the first pair."""


class Chain:
    """The pairs of one forward beside one backward, or of a backward alone.

    Args:
        system: As `steady.chain_of` gives it; its own order only has to be legal.
        costs: Milliseconds of the slots; may differ from the system's own.
        alone: Whether backward runs alone, as at the end of a step.
    """

    def __init__(self, system: System, costs: StageCosts, *, alone: bool = False) -> None:
        issues = [i for i in system.plan(forward=not alone, backward=True).issues if i.slot.layer is not None]
        self._host = costs.host_milliseconds
        self._needs = needs_of(issues)
        self._tasks = [task_of(issue, costs, ()) for issue in issues]
        first, last = window(group_of(system.recompute))
        self._measured = (first - 1, last - 1)
        members: list[dict[Slot, int]] = [{} for _ in system.program.layers]
        pair_of = _pairs_of(system)
        for place, issue in enumerate(issues):
            slot = issue.slot
            members[pair_of[slot.op is Op.REPLAY, slot.microbatch, slot.layer]][slot] = place
        self._pairs = [_pair(slots, system) for slots in members[:last]]

    @property
    def steps(self) -> frozenset[Step]:
        """Steps that launch anything."""
        return frozenset(step for pair in self._pairs for step in pair.by_step)

    def milliseconds(self, steps: Sequence[Step], queues: int) -> float:
        """Of one pair in steady state; infinite if the order breaks a dependency."""
        tasks: list[Task] = []
        place: dict[int, int] = {}
        late = carried(steps)
        before = _NOTHING
        for pair in self._pairs:
            block = pair.block
            for step in steps:
                launched = (before if step in late else pair).by_step.get(step, ())
                if block and step in pair.needing:
                    launched, block = (*block, *launched), ()
                for number in launched:
                    after = tuple(place.get(need, -1) for need in self._needs[number])
                    if -1 in after:
                        return float("inf")
                    task = self._tasks[number]
                    place[number] = len(tasks)
                    tasks.append(Task(task.lane, task.milliseconds, task.kernels, after))
            before = pair
        times = place_tasks(tasks, queues, self._host)
        first, last = (times[place[self._pairs[pair].last]][1] for pair in self._measured)
        return (last - first) / (self._measured[1] - self._measured[0])


def needs_of(issues: Sequence[Issue]) -> list[tuple[int, ...]]:
    """Per issue, the places of the issues whose values, gradients or graph it uses: what lowering's waits stand for."""
    makers: dict[object, int] = {}
    needs: list[tuple[int, ...]] = []
    for place, issue in enumerate(issues):
        microbatch, key = issue.slot.microbatch, issue.stage.key
        used: list[object] = [(microbatch, "value", name) for name in (*issue.reads, *issue.pinned)]
        used += [(microbatch, "piece", piece) for group in issue.pieces for piece in group]
        if issue.slot.op is Op.BACKWARD:
            used.append((microbatch, "graph", key))
        elif issue.slot.op is Op.WGRAD:
            used.append((microbatch, "pending", key))
        needs.append(tuple(dict.fromkeys(makers[thing] for thing in used if thing in makers)))
        made: list[object] = [(microbatch, "value", name) for name in issue.writes if name is not None]
        made += [(microbatch, "piece", piece) for piece in issue.gives if piece is not None]
        if issue.slot.op in _RUNS_FORWARD and issue.records:
            made.append((microbatch, "graph", key))
        elif issue.slot.op is Op.BACKWARD:
            made.append((microbatch, "pending", key))
        makers.update(dict.fromkeys(made, place))
    return needs


def _pairs_of(system: System) -> Mapping[tuple[bool, int, int | None], int]:
    """The pair of a slot, by (whether it is a replay, microbatch, layer)."""
    layers = system.program.layers
    found: dict[tuple[bool, int, int | None], int] = {}
    for layer in layers:
        found[False, FORWARD_SIDE, layer] = layer
        found[False, BACKWARD_SIDE, layer] = len(layers) - 1 - layer
    for segment in system.side.segments:
        for layer in segment.layers:
            found[True, BACKWARD_SIDE, layer] = len(layers) - 1 - segment.last
    for host, hosted in hosts_of(system.side).layers.items():
        for layer in hosted:
            found[True, BACKWARD_SIDE, layer] = len(layers) - 1 - host
    return found


def _pair(slots: Mapping[Slot, int], system: System) -> _Pair:
    hosted = {layer for layers in hosts_of(system.side).layers.values() for layer in layers}
    by_step: dict[Step, list[int]] = {}
    block: list[int] = []
    needing: set[Step] = set()
    last = -1
    for slot, place in slots.items():
        if slot.op is Op.REPLAY and slot.layer not in hosted:
            block.append(place)
            continue
        step = Step(Op.FORWARD if slot.op is Op.NO_GRAD else slot.op, slot.stage)
        by_step.setdefault(step, []).append(place)
        if slot.op is Op.BACKWARD:
            stage = system.program.by_key[slot.key]
            last = place if stage is system.program.layer_stages[slot.layer or 0][0] else last
            if system.side.needs_activations(stage):
                needing.add(step)
    return _Pair(by_step, block, frozenset(needing), last)
