"""SlotSnapshot: torch's CUDA memory snapshot of a step, every allocation tagged with the slot that made it.

Open the file at pytorch.org/memory_viz: the tag stands beside each allocation's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from overlap.engine import MicrobatchState
from overlap.lower import Issue
from overlap.memory.gap import slot_text

Tag = Callable[[str], None]
_BETWEEN = "between slots"


class SlotSnapshot:
    """Observer of a step.

    Args:
        tag: Names the allocations that follow.
    """

    def __init__(self, tag: Tag) -> None:
        self._tag = tag

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Allocations belong to this slot from now on."""
        self._tag(slot_text(issue, owner.number))

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """They belong to no slot."""
        self._tag(_BETWEEN)


def _no_tag(name: str) -> None:
    """Nothing: an old torch cannot tag."""


@contextmanager
def record_snapshot(path: Path, entries: int = 1_000_000) -> Iterator[SlotSnapshot]:
    """Record what a step allocates, and write it when the context ends.

    Args:
        path: Of the snapshot, a pickle.
        entries: Events to keep at most.

    Yields:
        The observer to hand to `train_step`.
    """
    torch.cuda.memory._record_memory_history(max_entries=entries)
    # Newer than the oldest torch that is supported: without it the snapshot has stacks only.
    tag: Tag = vars(torch.cuda.memory).get("_set_memory_metadata", _no_tag)
    try:
        yield SlotSnapshot(tag)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # torch's
    finally:
        tag("")
        torch.cuda.memory._record_memory_history(enabled=None)
