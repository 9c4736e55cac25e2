"""Held: what one microbatch holds, in storage ids; the counterpart of the engine's MicrobatchState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlap.ir import StageKey
from overlap.lower import Key, Piece
from overlap.memory.bins import Claims
from overlap.memory.facts import Kind
from overlap.memory.gap import Gap
from overlap.memory.refs import Ref

Ids = tuple[int, ...]
"""Storage ids, one per tensor of a value; OUTSIDE where the storage is not counted."""


class Held:
    """What one microbatch holds: the engine's MicrobatchState with storage ids in place of tensors.

    Args:
        feeds: The storages of the values that it starts with.
    """

    def __init__(self, feeds: Mapping[str, Ids]) -> None:
        self.begun = False
        """Whether a slot has run; what it starts with belongs to no kind before."""
        self.values: dict[Key, Ids] = {(name, 0): ids for name, ids in feeds.items()}
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
            host=[key for value in gap.host for key in self.values.get(value, ())],
            pending=[key for _, _, visible in self.pending.values() for key in visible],
        )
