"""Errors a user of overlap/ can see.

    ValueError
    +-- ScheduleError    an order, schedule or plan breaks a rule; shows the schedule with the faulty slot marked
    +-- ProgramError     a model's stages do not fit together; names the stage and the value

Wrong settings raise recompute.ConfigError (field, value, rule). What a stage raises while a step runs reaches the
caller as it is, with a note naming the slot.
"""

from __future__ import annotations

from collections.abc import Sequence

_CONTEXT = 6


class ScheduleError(ValueError):
    """A schedule breaks a rule.

    Args:
        reason: What is wrong, in one sentence.
        slots: The schedule, in issue order; printed around the faulty slot.
        index: Position of the faulty slot in `slots`.
    """

    def __init__(self, reason: str, slots: Sequence[object] = (), index: int | None = None) -> None:
        self.reason = reason
        self.index = index
        super().__init__(reason if index is None else f"{reason}\n{_excerpt(slots, index)}")


class ProgramError(ValueError):
    """A model's stages do not fit together."""


def _excerpt(slots: Sequence[object], index: int) -> str:
    """Print the slots around `index`, one a line, the faulty one marked."""
    first, last = max(0, index - _CONTEXT), min(len(slots), index + _CONTEXT + 1)
    lines = [f"  ... {first} earlier"] if first else []
    for position in range(first, last):
        mark = "   <-- here" if position == index else ""
        lines.append(f"  {position:4d}  {slots[position]}{mark}")
    if last < len(slots):
        lines.append(f"  ... {len(slots) - last} later")
    return "\n".join(lines)
