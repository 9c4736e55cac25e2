from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankFailed, RankPool, collect, start_ranks

pytestmark = pytest.mark.distributed


def sum_of_ranks(first: int) -> tuple[int, float, int]:
    total = torch.tensor(float(first + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def test_every_rank_answers_and_workers_are_kept(ranks: RankPool) -> None:
    first = ranks(2, sum_of_ranks, 10)
    again = ranks(2, sum_of_ranks, 20)
    assert [result[:2] for result in first] == [(0, 21.0), (1, 21.0)]
    assert [result[:2] for result in again] == [(0, 41.0), (1, 41.0)]
    assert [result[2] for result in first] == [result[2] for result in again]


def test_the_first_failure_is_shown_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2:(.|\n)*raise_on(.|\n)*ValueError: planted"):
        ranks(2, raise_on, 1)
    assert len(ranks(2, sum_of_ranks, 0)) == 2


def test_a_rank_that_hangs_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 gave no answer in 0\.5 s"):
        ranks(2, sleep_on, 1, 60.0, limit=0.5)


def test_ranks_of_their_own_may_die() -> None:
    with start_ranks(2, exit_on, 1) as workers:
        outcome = collect(workers, 20.0)
    assert outcome.exitcodes == {1: 3}
    assert list(outcome.results) == [0]
