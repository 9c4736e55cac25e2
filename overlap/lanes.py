"""Lanes: where issues run and how they wait for each other.

The engine tells a Lanes object when an issue begins and ends; streams and events are its business alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from overlap.lower import Event, Issue


class Lanes(Protocol):
    """Streams, or what stands for them."""

    def begin(self, issue: Issue, events: Mapping[Event, Any], values: Mapping[Any, Any]) -> None:
        """Switch to the issue's lane and wait for `issue.waits`; tell the allocator of foreign uses.

        Args:
            issue: What runs next.
            events: What `end` returned for earlier issues of the same microbatch.
            values: The microbatch's values, by key.
        """

    def end(self, issue: Issue) -> Any:
        """Mark the end of the issue.

        Returns:
            What `begin` of a waiting issue finds in `events`; only used if `issue.signals`.
        """

    def finish(self) -> None:
        """Join all lanes with the caller's: the step is over, or was abandoned."""


class NullLanes:
    """One lane, as on a CPU: issue order is execution order, so nothing has to wait."""

    def begin(self, issue: Issue, events: Mapping[Event, Any], values: Mapping[Any, Any]) -> None:
        """Nothing to wait for."""

    def end(self, issue: Issue) -> None:
        """Nothing to mark."""

    def finish(self) -> None:
        """Nothing to join."""
