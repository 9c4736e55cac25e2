"""run: steps placed in time by hand-made schedules, transfers, what is bubble and what is exposed, deadlock."""

from __future__ import annotations

import pytest

from overlap.errors import ScheduleError
from overlap.pipeline_model.actions import Step
from overlap.pipeline_model.run import PlainTimes, StepTime, run_pipeline
from recompute import ConfigError
from tests.pipeline_model.tools import schedule

ONE_TWO = PlainTimes(forward=1, backward=2, wgrad=0.5, pair=2.25)


def test_two_ranks_by_hand() -> None:
    run = run_pipeline(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2), ONE_TWO)
    assert run.placed == (((0, 1), (1, 2), (4, 6), (7, 9)), ((1, 2), (2, 4), (4, 5), (5, 7)))
    assert run.milliseconds == 9
    assert [rank.bubble for rank in run.ranks] == [3, 3]
    assert [rank.exposed_p2p for rank in run.ranks] == [0, 0]
    assert run.bubble_share == pytest.approx(6 / 18)


def test_a_transfer_is_exposed_only_while_it_is_under_way() -> None:
    run = run_pipeline(schedule("0F0 0B0", "1F0 1B0"), ONE_TWO, 0.25)
    assert run.placed == (((0, 1), (4.5, 6.5)), ((1.25, 2.25), (2.25, 4.25)))
    first, second = run.ranks
    assert (first.working, first.exposed_p2p, first.bubble) == (3, 0.25, 3.25)
    assert (second.working, second.exposed_p2p, second.bubble) == (3, 0.25, 3.25)


def test_a_rank_sends_one_after_another() -> None:
    times = PlainTimes(forward=1, backward=1, wgrad=0, pair=1)
    run = run_pipeline(schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", microbatches=2), times, 3.0)
    assert [start for start, _ in run.placed[1]][:2] == [4, 7]


def test_split_backwards_send_after_their_input_part() -> None:
    run = run_pipeline(schedule("0F0 0I0 0W0", "1F0 1I0 1W0"), ONE_TWO)
    assert run.placed == (((0, 1), (3.5, 5), (5, 5.5)), ((1, 2), (2, 3.5), (3.5, 4)))


def test_a_v_hands_over_on_its_rank_without_a_transfer() -> None:
    run = run_pipeline(schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", stages=4), ONE_TWO, 0.5)
    assert run.placed[1][:2] == ((1.5, 2.5), (2.5, 3.5))
    assert run.placed[0][1:3] == ((4, 5), (5, 7))


def test_what_is_ready_early_leaves_early() -> None:
    class Early:
        def of(self, step: Step) -> StepTime:
            return StepTime(milliseconds=4, ready=(1.0,) * len(step), exposed_a2a=0.5)

    run = run_pipeline(schedule("0F0 0B0", "1F0 1B0"), Early())
    assert run.placed == (((0, 4), (6, 10)), ((1, 5), (5, 9)))
    assert [rank.exposed_a2a for rank in run.ranks] == [1, 1]


def test_a_pair_waits_for_both() -> None:
    run = run_pipeline(schedule("0F0 0F1;0B0 0B1", "1F0 1B0 1F1 1B1", microbatches=2), ONE_TWO)
    assert run.placed[0] == ((0, 1), (4, 6.25), (9.25, 11.25))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ScheduleError, match="wait for each other: rank 0 never runs 0F1;0B0") as caught:
        run_pipeline(schedule("0F0 0F1;0B0 0B1", "1F0 1F1 1B0 1B1", microbatches=2), ONE_TWO)
    assert "0F1;0B0   <-- here" in str(caught.value)


@pytest.mark.parametrize("p2p", [-1.0, float("nan"), float("inf")])
def test_a_transfer_takes_time(p2p: float) -> None:
    with pytest.raises(ConfigError, match=r"p2p_ms=.*must be a number of at least 0"):
        run_pipeline(schedule("0F0 0B0"), ONE_TWO, p2p)
