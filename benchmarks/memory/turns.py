"""Step times of several ways to run a step, measured in turns, so that drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.memory.measure import Measured, timed
from overlap.cuda_graph import WARM_UP

_UNCOUNTED = 2
"""Rounds before the first that counts: what was recorded last is slower at first (3 % on an H200), whichever it is."""


def in_turns(steps: Sequence[tuple[str, Callable[[], None]]], rounds: int = 7) -> list[Measured]:
    """The median step of each; memory is not comparable and left out.

    Args:
        steps: Names, and calls that run one step each; those that are CUDA graphs are recorded first, all of them.
        rounds: How many steps of each count.
    """
    calls = [call for _, call in steps]
    for call in calls:
        for _ in range(WARM_UP + 1):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for number in range(-_UNCOUNTED, rounds):
        first = number % len(calls)
        # Each round starts elsewhere, so that no step always follows the same one.
        for place in (*range(first, len(calls)), *range(first)):
            milliseconds = timed(calls[place])
            if number >= 0:
                times[place].append(milliseconds)
    return [
        Measured(name=name, activation_peak=0.0, reserved=0.0, step=median(taken), steps=tuple(taken))
        for (name, _), taken in zip(steps, times, strict=True)
    ]
