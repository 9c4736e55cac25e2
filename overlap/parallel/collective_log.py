"""CollectiveLog: what this rank issued, so that ranks can compare it.

Ranks whose collectives pair wrongly hang, or go on with each other's data. Sizes may differ from rank to rank; what
must not differ is which collective comes when, for which slot, of which type and row width.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from torch import Tensor

from overlap.engine import MicrobatchState
from overlap.lower import Issue


class Collectives(Protocol):
    """Takes note of collectives."""

    launched: int
    """How many so far."""

    def record(self, operation: str, what: str, tensor: Tensor) -> None:
        """Note one that is about to be launched.

        Args:
            operation: As `all_to_all`.
            what: Its purpose, as `dispatch tokens`.
            tensor: What it sends, [rows, ...].
        """


class NoLog:
    """Takes no notes; counts."""

    def __init__(self) -> None:
        self.launched = 0

    def record(self, operation: str, what: str, tensor: Tensor) -> None:
        """Count a collective."""
        self.launched += 1


class CollectiveLog:
    """The collectives of a step, in the order of their launch.

    An engine observer too: with it, each is noted with the slot that launched it.
    """

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.launched = 0
        self._slot = ""

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Note the slot, by the microbatch's number in the step."""
        layer = "" if issue.slot.layer is None else f".{issue.slot.layer}"
        self._slot = f"{issue.slot.op.value}{owner.number}{layer}.{issue.slot.stage} "

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """The slot is over."""
        self._slot = ""

    def record(self, operation: str, what: str, tensor: Tensor) -> None:
        """Note a collective."""
        self.launched += 1
        width = "x".join(map(str, tensor.shape[1:])) or "1"
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.entries.append(f"{self._slot}{operation} {what} {dtype} [{width}]")

    def digest(self) -> str:
        """A hash of all entries."""
        return hashlib.blake2b("\n".join(self.entries).encode(), digest_size=8).hexdigest()

    def clear(self) -> None:
        """Begin the next step."""
        self.entries.clear()
        self._slot = ""
