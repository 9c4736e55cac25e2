"""Trace: how live bytes move while one slot runs, in a form that holds in every schedule. Never imports torch.

Within a slot some storages die that were there before: gradients that it takes, what its graph kept. Whether that
frees memory depends on who else holds them, which differs between schedules; so the slot is cut at these deaths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from overlap.memory.refs import Ref


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a slot up to a death of something that was there before. Bytes."""

    rise: int
    """Highest point above the window's start; at least 0."""
    change: int
    """What the storages born in the slot add up to over the window."""
    dies: Ref | None
    """What dies at its end; None: the slot ends."""


Trace = tuple[Window, ...]
NOTHING: Trace = ()
"""Of a slot that allocates nothing."""


def make_trace(events: Iterable[tuple[int, Ref | None]]) -> Trace:
    """Cut a slot's events into windows.

    Args:
        events: In order: (bytes, None) for a storage of the slot's own, negative when it dies; (0, ref) when one
            dies that was there before.
    """
    windows: list[Window] = []
    rise = level = 0
    for nbytes, ref in events:
        level += nbytes
        rise = max(rise, level)
        if ref is not None:
            windows.append(Window(rise, level, ref))
            rise = level = 0
    return (*windows, Window(rise, level, None))


def highest(trace: Trace, start: int, frees: Mapping[Ref, int]) -> int:
    """The highest live sum while a slot runs.

    Args:
        trace: Of the slot.
        start: Live bytes when it begins.
        frees: Bytes that the death of a storage gives back; a ref that is not there gives none.
    """
    level = top = start
    for window in trace:
        top = max(top, level + window.rise)
        level += window.change
        if window.dies is not None:
            level -= frees.get(window.dies, 0)
    return top
