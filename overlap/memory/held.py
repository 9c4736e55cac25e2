"""Held: what one microbatch holds, in storage ids; the counterpart of the engine's MicrobatchState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlap.ir import StageKey
from overlap.lower import Key
from overlap.memory.bins import Bin
from overlap.memory.facts import Kind
from overlap.memory.gap import Gap
from overlap.memory.ledger import Holds, Ids, Ledger, Table
from overlap.memory.refs import Ref
from overlap.pieces import Piece

Graph = tuple[Kind, Mapping[Ref, int]]
"""The forward that made it, and what it holds."""
Pending = tuple[Kind, Mapping[Ref, int], Ids]
"""The same of a weight gradient that waits, and the tensors that it waits with."""


class Held:
    """What one microbatch holds: the engine's MicrobatchState with storage ids in place of tensors.

    Args:
        ledger: Told of everything that is held.
        gap: Which values are there for a named purpose.
        feeds: The storages of the values that it starts with.
    """

    def __init__(self, ledger: Ledger, gap: Gap, feeds: Mapping[str, Ids]) -> None:
        self._ledger = ledger
        self._kinds = {
            **dict.fromkeys(gap.pinned, Bin.PINNED_ROUTING),
            **dict.fromkeys(gap.segment_inputs, Bin.SEGMENT_INPUTS),
            **dict.fromkeys(gap.host, Bin.HOST_INPUTS),
        }
        self._begun = False
        self.values: Table[Key, Ids] = Table(ledger, self._of_value)
        self.grads: Table[Piece, Ids] = Table(ledger, _of_ids)
        self.graphs: Table[StageKey, Graph] = Table(ledger, _of_graph)
        self.pending: Table[StageKey, Pending] = Table(ledger, _of_pending)
        self.snapshots: Table[StageKey, Ids] = Table(ledger, _of_ids)
        self.values.update({(name, 0): ids for name, ids in feeds.items()})

    def begin(self) -> None:
        """A slot runs; what it started with belongs to no kind before the first."""
        if not self._begun:
            self._begun = True
            for key, ids in self.values.items():
                if key in self._kinds:
                    for storage in ids:
                        self._ledger.claim(storage, self._kinds[key], 1)

    def keep(self, ids: Ids) -> None:
        """Losses, outputs and the values of effects stay until the step ends."""
        self._ledger.hold(_of_ids(None, ids))

    def _of_value(self, key: Key, ids: Ids) -> Holds:
        kind = self._kinds.get(key) if self._begun else None
        return [(storage, kind) for storage in ids]


def _of_ids(_: object, ids: Iterable[int]) -> Holds:
    return [(storage, None) for storage in ids]


def _of_graph(_: StageKey, graph: Graph) -> Holds:
    return [(storage, None) for storage in graph[1].values()]


def _of_pending(_: StageKey, pending: Pending) -> Holds:
    _kind, names, visible = pending
    return [*((storage, None) for storage in names.values()), *((storage, Bin.PENDING_WGRAD) for storage in visible)]
