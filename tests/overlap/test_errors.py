"""Messages of the errors, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from overlap.errors import ProgramError, RaceError, ScheduleError

SLOTS = [f"F0.{layer}.attn" for layer in range(20)]


def test_schedule_error_marks_the_slot_among_its_neighbours() -> None:
    error = ScheduleError("F0.9.attn is wrong", SLOTS, 9)
    lines = str(error).splitlines()
    assert lines[:2] == ["F0.9.attn is wrong", "  ... 3 earlier"]
    assert lines[2] == "     3  F0.3.attn"
    assert lines[8] == "     9  F0.9.attn   <-- here"
    assert lines[-1] == "  ... 4 later"
    assert (error.reason, error.index) == ("F0.9.attn is wrong", 9)


def test_a_short_schedule_is_printed_whole() -> None:
    assert str(ScheduleError("wrong", ["a", "b"], 1)) == "wrong\n     0  a\n     1  b   <-- here"


def test_without_slots_the_reason_stands_alone() -> None:
    assert str(ScheduleError("no such order")) == "no such order"


def test_race_error_names_slot_value_and_rule() -> None:
    error = RaceError("F0.0.experts", "0.sent @0", "is used too early")
    assert str(error) == "F0.0.experts, 0.sent @0: is used too early"
    assert (error.slot, error.value, error.rule) == ("F0.0.experts", "0.sent @0", "is used too early")


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error", [ScheduleError("r", SLOTS, 3), ScheduleError("r"), ProgramError("p"), RaceError("s", "v", "r")]
)
def test_errors_survive_pickling(travel, error: Exception) -> None:
    again = travel(error)
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_hierarchy() -> None:
    assert issubclass(ScheduleError, ValueError)
    assert issubclass(ProgramError, ValueError)
    assert issubclass(RaceError, RuntimeError)
