"""verify over ranks: every rank equals its own reference at the same expert parallel size, bit for bit."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import RankPool
from tests.distributed.run import TINY, command_on

pytestmark = pytest.mark.distributed
SMALL = f"{TINY} --layers 2 --steps 2 --microbatches 3 --json"
HIDDEN = "--method uniform --num-layers 1 --replay hidden"


@pytest.mark.parametrize(
    ("size", "words", "replayed"),
    [
        # 3 microbatches, 2 layers and a depth, two A2As each: mHC's gradient needs what combine brought
        (2, f"--ep 2 {HIDDEN} --mtp 1 --mhc 2 --dropout 0.1", 18),
        (2, "--ep 2 --dtype bfloat16 --seq 8,12 --method uniform --num-layers 2 --debug-collectives", 9),
        (2, f"--ep 2 --route first-rank --pad --seq 12,8 --delay-wgrad {HIDDEN}", 6),
        (2, "--ep 2 --experts 2 --method block --num-layers 1 --delay-wgrad --lead 2", 3),
        (2, f"--ep 2 --capacity 0.75 {HIDDEN} --dropout 0.1 --pad", 6),
        (2, "--ep 2 --tied --packed --attention gqa --order single_queue --dtype float64", 0),
        (4, f"--ep 4 {HIDDEN} --route balanced", 6),
        (4, "--ep 2 --method uniform --num-layers 1", 6),
        (2, "--method uniform --num-layers 1", 6),
    ],
)
def test_equal_on_every_rank(ranks: RankPool, size: int, words: str, replayed: int) -> None:
    """Row 41 (experts == ranks), row 42 (one rank gets all tokens)."""
    statuses, printed, _ = command_on(ranks, size, f"verify {SMALL} {words}")
    assert statuses == [0] * size
    assert printed["equal"] is True
    assert printed["replayed_a2a"] == replayed
    assert [rank["rank"] for rank in printed["ranks"]] == list(range(size))
    for rank in printed["ranks"]:
        assert rank["equal"]
        assert rank["gradients"]["compared"] > 20
        assert rank["gradients"]["different"] == rank["buffers"]["different"] == []


@pytest.mark.parametrize("control", ["no_rng", "unpinned_routing", "double_effects", "drop_bridge", "swap_slots"])
def test_controls_fail_on_every_rank(ranks: RankPool, control: str) -> None:
    words = f"verify {SMALL} --steps 1 --ep 2 {HIDDEN} --mtp 1 --dropout 0.1 --control {control}"
    statuses, printed, answers = command_on(ranks, 2, words)
    assert statuses == [1, 1]
    assert [rank["equal"] for rank in printed["ranks"]] == [False, False]
    assert answers[0].err.startswith(f"control {control}: ")
    assert answers[1].err == ""


def test_bad_input_is_named_on_every_rank(ranks: RankPool) -> None:
    _, _, answers = command_on(ranks, 2, f"verify {SMALL} --ep 2 --experts 5 --topk 1")
    assert [answer.status for answer in answers] == [2, 2]
    assert [answer.err for answer in answers] == [
        f"error: rank {rank}: ep=2: must divide experts (5)\n" for rank in (0, 1)
    ]


def test_training_reports_once(ranks: RankPool) -> None:
    statuses, printed, answers = command_on(ranks, 2, f"train {TINY} --ep 2 --layers 1 --steps 2 --json")
    assert statuses == [0, 0]
    assert len(printed["losses"]) == 2
    assert printed["config"]["ep"] == 2
    assert [answer.err for answer in answers] == ["", ""]
