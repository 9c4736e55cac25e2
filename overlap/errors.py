"""Errors a user of overlap/ can see.

    ValueError
    +-- ScheduleError    an order, schedule or plan breaks a rule; shows the schedule with the faulty slot marked
    +-- ProgramError     a model's stages do not fit together; names the stage and the value
    RuntimeError
    +-- RaceError        RecordingLanes saw lanes race; names the slot, the value and the rule
    +-- RanksDisagree    ranks issued different collectives; names the first that differs
    +-- RankFailed       another rank raised, ended or did not arrive; names it and its slot
    +-- PipelineTorn     a step failed while its pipeline's ranks handed over; they can take no other

Wrong settings raise recompute.ConfigError (field, value, rule). What a stage raises while a step runs reaches the
caller as it is, with a note naming the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        # Arguments as they came, so that ranks can hand the error to each other (pickle calls the class with them).
        super().__init__(reason, tuple(slots), index)
        self._excerpt = "" if index is None else f"\n{_excerpt(slots, index)}"

    def __str__(self) -> str:
        return self.reason + self._excerpt


class ProgramError(ValueError):
    """A model's stages do not fit together."""


class RaceError(RuntimeError):
    """Two lanes touch a buffer and nothing orders them.

    Args:
        slot: The slot that touches it.
        value: The value or gradient piece.
        rule: What is broken, as the end of the sentence "this slot ... this value ...".
    """

    def __init__(self, slot: object, value: str, rule: str) -> None:
        self.slot = slot
        self.value = value
        self.rule = rule
        super().__init__(slot, value, rule)

    def __str__(self) -> str:
        return f"{self.slot}, {self.value}: {self.rule}"


class RanksDisagree(RuntimeError):
    """Ranks issued different collectives in a step.

    Args:
        first: By rank, the first entry that differs.
    """

    def __init__(self, first: Mapping[int, str]) -> None:
        self.first = dict(first)
        super().__init__(self.first)

    def __str__(self) -> str:
        return "ranks issued different collectives: " + "; ".join(f"rank {r}: {e}" for r, e in self.first.items())


class RankFailed(RuntimeError):
    """Another rank failed, and this one cannot go on without it.

    Args:
        rank: The other one.
        where: The slot that it was last seen in, in words; a moment old if it ended without a word.
        reason: What became of it.
    """

    def __init__(self, rank: int, where: str, reason: str) -> None:
        self.rank = rank
        self.where = where
        self.reason = reason
        super().__init__(rank, where, reason)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}; it was last seen {self.where}"


class PipelineTorn(RuntimeError):
    """A step of a pipeline failed between messages, which the next step's receives would take for its own."""

    def __str__(self) -> str:
        return (
            "a step of this pipeline failed while its ranks handed over: messages of it may still be under way, and "
            "another step would take them for its own; start the processes again"
        )


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
