"""A rank that raises, dies or hangs: the others end within the time limit, naming it and its slot."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch.distributed as dist

from overlap.errors import RankFailed
from overlap.parallel.attach import DataSettings
from overlap.parallel.watch import Sighting, Watch, is_collective
from overlap.step import train_step
from tests.distributed.ranks import collect, start_ranks
from tests.parallel.models import feeds_of, parallel_chunk, world_of

pytestmark = pytest.mark.distributed
SECONDS = 2.0
FAILS_IN = "R1.1.experts"


class Fail:
    """Fails in one slot of the last rank."""

    def __init__(self, how: str, rank: int) -> None:
        self._how = how
        self._last = rank == dist.get_world_size() - 1

    def before(self, issue: Any, owner: Any) -> None:
        if self._last and f"{issue.slot.op}{owner.number}.{issue.stage.label}" == FAILS_IN:
            if self._how == "raise":
                raise ValueError("planted")
            if self._how == "die":
                os._exit(7)
            time.sleep(60)

    def after(self, issue: Any, owner: Any) -> None: ...


def step_with_failure(how: str, fsdp: bool) -> tuple[str, str]:
    """What this rank ends with: the exception and its text."""
    from recompute import RecomputeConfig

    world = world_of(seconds=SECONDS)
    chunk = parallel_chunk(world, DataSettings(fsdp=fsdp), recompute=RecomputeConfig.uniform(1))
    watch = Watch(world, interval=0.05)
    try:
        with watch.guard():
            train_step(chunk, feeds_of(world.rank, 3), observers=(watch, Fail(how, world.rank)))
    except (RankFailed, ValueError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize(
    ("how", "size", "fsdp", "reason"),
    [
        ("raise", 2, False, "raised ValueError: planted"),
        ("die", 2, True, "ended without a word"),
        # two ranks wait alike: neither is to take the other for the culprit
        ("hang", 3, True, "did not arrive within the time limit"),
    ],
)
def test_the_others_name_the_rank_that_failed_and_its_slot(how: str, size: int, fsdp: bool, reason: str) -> None:
    last = size - 1
    with start_ranks(size, step_with_failure, how, fsdp, timeout=SECONDS) as workers:
        outcome = collect(workers[:last] if how == "hang" else workers, 30.0)
    assert outcome.failures == {}
    for rank in range(last):
        kind, text = outcome.results[rank]
        assert kind == "RankFailed"
        assert text.startswith(f"rank {last} {reason}; it was last seen in slot")
        # a rank that dies has written its slot a moment before
        assert how == "die" or text.endswith(FAILS_IN)
    assert outcome.results.get(last) == (("ValueError", "planted") if how == "raise" else None)
    assert outcome.exitcodes == ({last: 7} if how == "die" else {})


def stalled() -> list[str]:
    """What a rank logs that does not move for a while."""
    world, messages = world_of(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("overlap.parallel.watch").addHandler(handler)
    watch = Watch(world, interval=0.02, patience=0.1)
    with watch.guard():
        time.sleep(0.5)
        dist.barrier()
    assert {seen.state for seen in watch.sightings().values()} <= {"runs", "ended"}
    return messages


def test_a_rank_that_does_not_move_says_once_where_all_ranks_are(ranks) -> None:
    for messages in ranks(2, stalled):
        assert len(messages) == 1
        assert "rank 0 runs outside a step's slots; rank 1 runs outside" in messages[0]


def test_only_collectives_are_another_ranks_fault() -> None:
    assert is_collective(dist.DistBackendError("timeout"))
    assert is_collective(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_collective(RuntimeError("shapes do not match"))
    assert not is_collective(ValueError("gloo"))


def test_a_failure_names_rank_reason_and_slot() -> None:
    error = RankFailed(3, "in slot F0.1.attn", "raised ValueError: x")
    assert str(error) == "rank 3 raised ValueError: x; it was last seen in slot F0.1.attn"
    assert Sighting(rank=0, state="runs", where="", beat=1).why == ""
