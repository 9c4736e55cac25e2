"""Lanes: where issues run and how they wait for each other.

The engine tells a Lanes object when an issue begins and ends; streams and events are its business alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from overlap.ir import Lane, StageKey
from overlap.lower import Event, Issue, Key
from overlap.pieces import Piece
from recompute.tape import Tape
from recompute.wgrad import WeightGradients


class Owner(Protocol):
    """What lanes see of a microbatch (engine.MicrobatchState)."""

    @property
    def number(self) -> int:
        """Its number within the step; no two that are alive share one."""

    @property
    def values(self) -> Mapping[Key, Any]:
        """Its values."""

    @property
    def grads(self) -> Mapping[Piece, Any]:
        """Its gradient pieces."""

    @property
    def tapes(self) -> Mapping[StageKey, Tape]:
        """Its graphs."""

    @property
    def pending(self) -> Mapping[StageKey, tuple[WeightGradients, Any]]:
        """Its pending weight gradients."""

    @property
    def events(self) -> Mapping[Event, Any]:
        """What `end` returned for its earlier issues that signal."""


@runtime_checkable
class Lanes(Protocol):
    """Streams, or what stands for them."""

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Switch to the issue's lane and wait for `issue.waits`; take care of memory that other lanes own.

        Args:
            issue: What runs next.
            owner: The microbatch it belongs to.
        """

    def end(self, issue: Issue, owner: Owner) -> Any:
        """Mark the end of the issue; what it frees goes right after.

        Returns:
            What `begin` of a waiting issue finds in `owner.events`; only used if `issue.signals`.
        """

    def enter(self, lane: Lane) -> None:
        """Make a lane current outside any issue, as for a receive that is posted between two plans."""

    def settle(self) -> None:
        """A plan is over: make the compute lane current; SETTLING have back what it used of their memory."""

    def finish(self) -> None:
        """Join all lanes with the caller's: the step is over, or was abandoned."""


class NullLanes:
    """One lane, as on a CPU: issue order is execution order, so nothing has to wait."""

    def begin(self, issue: Issue, owner: Owner) -> None:
        """Nothing to wait for."""

    def end(self, issue: Issue, owner: Owner) -> None:
        """Nothing to mark."""

    def enter(self, lane: Lane) -> None:
        """There is only one."""

    def settle(self) -> None:
        """Nothing is held."""

    def finish(self) -> None:
        """Nothing to join."""
