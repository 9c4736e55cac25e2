"""Steps in turns: what runs in which order, and what counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.memory import turns
from overlap.cuda_graph import WARM_UP


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps as they run; the nth one that is timed takes n milliseconds."""
    ran: list[str] = []
    timed: list[str] = []

    def time(call: Callable[[], None]) -> float:
        call()
        timed.append(ran[-1])
        return float(len(timed))

    monkeypatch.setattr(turns, "timed", time)
    return ran


def test_steps_take_turns_and_each_round_starts_elsewhere(clock) -> None:
    names = ("a", "b", "c")
    found = turns.in_turns([(name, partial(clock.append, name)) for name in names], rounds=3)
    recorded, timed = clock[: -5 * 3], clock[-5 * 3 :]
    assert recorded == [name for name in names for _ in range(WARM_UP + 1)], "all are recorded before one is timed"
    assert ["".join(timed[place : place + 3]) for place in range(0, 15, 3)] == ["bca", "cab", "abc", "bca", "cab"]
    assert [(result.name, result.steps, result.step) for result in found] == [
        ("a", (7.0, 12.0, 14.0), 12.0),
        ("b", (8.0, 10.0, 15.0), 10.0),
        ("c", (9.0, 11.0, 13.0), 11.0),
    ], "the first two rounds do not count"


def test_two_steps_of_one_name_stay_two(clock) -> None:
    found = turns.in_turns([("a", partial(clock.append, "a"))] * 2, rounds=1)
    assert [result.name for result in found] == ["a", "a"]
