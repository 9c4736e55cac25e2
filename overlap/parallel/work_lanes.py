"""WorkLanes: lanes on a CPU whose communication runs beside the compute, as collectives that are waited for late.

The communication lane behaves as a stream: its slots are numbered, and waiting for one of them waits for all before
it, as lowering assumes when it leaves implied waits out.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from overlap.ir import Lane
from overlap.lanes import Owner
from overlap.lower import Issue
from overlap.parallel.works import Launched, Works


class WorkLanes:
    """The host runs compute slots; a communication slot only launches.

    Args:
        works: Where the transport hands over what it launches.
    """

    def __init__(self, works: Works) -> None:
        self._works = works
        self._issued = 0
        """Communication slots so far."""
        self._pending: deque[tuple[int, Launched]] = deque()
        """What they launched and nobody waited for yet, oldest first, by number of the slot."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WorkLanes:
        """Copies of a model use the same lanes, one step at a time."""
        return self

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Wait for what the issue waits for; collect what a communication slot launches."""
        for event in issue.waits:
            self._wait(owner.events[event])
        if issue.lane is Lane.COMM:
            # On a stream the slots of one lane follow each other. Here nothing orders a launch behind an earlier one.
            if self._pending and self._reads_pending(issue, owner):
                self._wait(self._issued)
            self._works.start()

    def end(self, issue: Issue, owner: Owner) -> int:
        """Keep what the issue launched.

        Returns:
            The number of the last communication slot: who waits for this issue waits for that and all before it.
        """
        if issue.lane is Lane.COMM:
            self._issued += 1
            self._pending.extend((self._issued, launched) for launched in self._works.stop())
        return self._issued

    def enter(self, lane: Lane) -> None:
        """The host is on all lanes at once."""

    def settle(self) -> None:
        """Memory is the host's: nothing is held."""

    def finish(self) -> None:
        """Wait for all that is under way, also after a failure: ranks that go on are waiting for it too."""
        self._works.stop()
        try:
            self._wait(self._issued)
        finally:
            self._pending.clear()

    def _wait(self, number: int) -> None:
        while self._pending and self._pending[0][0] <= number:
            _, launched = self._pending.popleft()
            launched.work.wait()

    def _reads_pending(self, issue: Issue, owner: Owner) -> bool:
        under_way = {tensor.untyped_storage()._cdata for _, launched in self._pending for tensor in launched.tensors}
        values = [owner.values[key] for key in (*issue.reads, *issue.pinned)]
        pieces = [owner.grads[piece] for group in issue.pieces for piece in group if piece in owner.grads]
        return any(torch.is_tensor(value) and value.untyped_storage()._cdata in under_way for value in values + pieces)
