"""predict: walk the lowered plans of a step with storage facts, holding storages exactly as the engine holds tensors.

Nothing runs: a table maps what the engine would have there to storage ids, and what no table holds is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from overlap.engine import Feeds
from overlap.ir import Op, StageKey
from overlap.lower import Issue, Key, Piece
from overlap.memory.bins import Border, Claims, Storage, Usage, sum_bins
from overlap.memory.facts import OUTSIDE_REF, Facts, Footprint, Kind, Ref, Source, backward_kind, forward_kind
from overlap.memory.gap import Gap, slot_text
from overlap.step import StepPlan

Ids = tuple[int, ...]
_OUTSIDE = -1
_FORWARDS = (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)


class _Held:
    """What one microbatch holds: the engine's MicrobatchState with storage ids in place of tensors."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.values: dict[Key, Ids] = {(name, 0): (_OUTSIDE,) * parts for name, parts in footprint.feeds.items()}
        self.grads: dict[Piece, Ids] = {}
        self.graphs: dict[StageKey, tuple[Kind, Mapping[Ref, int]]] = {}
        self.pending: dict[StageKey, tuple[Kind, Mapping[Ref, int], Ids]] = {}
        self.snapshots: dict[StageKey, Ids] = {}
        self.outputs: list[Ids] = []
        """Losses, outputs and the values of effects."""

    def ids(self) -> Iterable[Iterable[int]]:
        """The ids in every table."""
        yield from self.values.values()
        yield from self.grads.values()
        yield from (names.values() for _, names in self.graphs.values())
        yield from (names.values() for _, names, _ in self.pending.values())
        yield from self.snapshots.values()
        yield from self.outputs

    def claims(self, gap: Gap) -> Claims:
        """The ids that belong to a kind of memory by name."""
        return Claims(
            segment_inputs=[key for value in gap.segment_inputs for key in self.values.get(value, ())],
            pinned=[key for value in gap.pinned for key in self.values.get(value, ())],
            pending=[key for _, _, visible in self.pending.values() for key in visible],
        )


class Walk:
    """A step, issue by issue.

    Args:
        footprints: Of each microbatch; the same object where the shapes are the same.
        gaps: Of each microbatch, as `gaps_of` gives them.
    """

    def __init__(self, footprints: Sequence[Footprint], gaps: Sequence[Gap]) -> None:
        self._gaps = gaps
        self._held = [_Held(footprint) for footprint in footprints]
        self._ids = count()
        self._storages: dict[int, Storage] = {}
        # The step's own copies of in-place state, for the case that it fails; the same for all microbatches.
        self._step = self._new((size for sizes in footprints[0].snapshots.values() for size in sizes), Op.CALL)
        self._curve: list[Border] = []

    def run(self, plans: Sequence[StepPlan]) -> Usage:
        """Walk the plans of a step, as `step_plans` gives them."""
        for plan, forward, backward in plans:
            for issue in plan.issues:
                numbers = (backward, forward)
                number = numbers[issue.slot.microbatch]
                if number is not None:
                    self._issue(issue, number)
        return Usage(curve=tuple(self._curve))
