"""Actions: what a schedule checks about itself, which neighbours are paired, the lists of GPipe and 1F1B."""

from __future__ import annotations

import pytest

from overlap.errors import ScheduleError
from overlap.pipeline_model.actions import gpipe, one_f_one_b, pair_steady, step_text, unpaired
from tests.pipeline_model.tools import schedule, steps, texts


def paired(text: str, warmup: int) -> str:
    return " ".join(map(step_text, pair_steady([step[0] for step in steps(text)], warmup)))


def test_only_the_steady_state_is_paired() -> None:
    assert paired("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", 2) == "0F0 0F1 0F2;0B0 0F3;0B1 0B2 0B3"
    assert paired("0F0 0F1 0B0 0B1", 2) == "0F0 0F1 0B0 0B1", "all forwards are warm-up: F1 and B0 are no pair"


def test_a_microbatch_is_not_paired_with_itself() -> None:
    assert paired("0F0 0B0 0F1 0B1", 0) == "0F0 0B0 0F1 0B1"


def test_a_steady_state_alternates() -> None:
    with pytest.raises(ScheduleError, match="does not alternate") as caught:
        paired("0F0 0F1 0F2 0B0 0B1 0B2", 1)
    assert "0F1   <-- here" in str(caught.value)


def test_pairs_come_apart_again() -> None:
    assert unpaired(steps("0F0 0F1;0B0 0B1")) == steps("0F0 0F1 0B0 0B1")


def test_gpipe_and_one_f_one_b() -> None:
    assert texts(gpipe(2, 1, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert texts(gpipe(2, 2, 1)) == ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]
    assert texts(one_f_one_b(3, 3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2",
    ]
    assert texts(one_f_one_b(3, 1))[0] == "0F0 0B0", "fewer microbatches than ranks"


def test_what_a_schedule_knows() -> None:
    made = schedule("0F0 0F1 3F0 3F1;3B0 3B1 0B0 0B1", "1F0 2F0 1F1 2F1;2B0 1B0 2I1 1B1 2W1", stages=4, microbatches=2)
    assert made.rank_of == {0: 0, 3: 0, 1: 1, 2: 1}
    assert made.paired_share == 2 / 8


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["0F0 0B0 0B0"], "rank 0 runs 0B0 out of order, a second time"),
        (["0B0 0F0"], "rank 0 runs 0B0 out of order"),
        (["0F0 0W0 0I0"], "rank 0 runs 0W0 out of order"),
        (["0F0 0B0 0W0"], "rank 0 runs 0W0 out of order"),
        (["0F0", "0B0"], "rank 1 runs 0B0 .* as another rank's stage"),
        (["0F0"], "stage 0 does not finish microbatch 0"),
        (["0F0 0I0"], "stage 0 does not finish microbatch 0"),
    ],
)
def test_bad_schedules_are_named(ranks: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule(*ranks, stages=1)
