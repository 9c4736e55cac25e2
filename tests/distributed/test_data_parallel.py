"""`verify` and `train` with their parameters replicated or sharded over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import RankPool
from tests.distributed.run import TINY, command_on

pytestmark = pytest.mark.distributed
VERIFY = f"verify {TINY} --layers 2 --method uniform --num-layers 1 --replay hidden --microbatches 3 --steps 1 --json"
TRAIN = f"train {TINY} --layers 2 --batch 1 --microbatches 2 --json"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, "--fsdp --debug-collectives --lead 1"),
        (2, "--fsdp --dtype bfloat16 --delay-wgrad --lead 2"),
        (4, "--fsdp --ep 2 --per-token-loss --seq 8,4,8,4"),
    ],
)
def test_sharded_parameters_change_no_bit(ranks: RankPool, size: int, words: str) -> None:
    statuses, found, _ = command_on(ranks, size, f"{VERIFY} {words}")
    assert statuses == [0] * size
    assert found["equal"]
    assert found["max_live_segments"] == 2
    assert found["config"]["fsdp"] is True


@pytest.mark.parametrize("control", ["swap_slots", "double_effects"])
def test_controls_are_seen_with_shards(ranks: RankPool, control: str) -> None:
    statuses, found, _ = command_on(ranks, 2, f"{VERIFY} --fsdp --control {control}")
    assert statuses == [1, 1]
    assert not found["equal"]


def losses(ranks: RankPool, words: str) -> list[float]:
    statuses, found, _ = command_on(ranks, 2, f"{TRAIN} {words}")
    assert statuses == [0, 0]
    result: list[float] = found["losses"]
    return result


def test_training_goes_on_from_a_checkpoint_of_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = losses(ranks, "--steps 4")
    assert losses(ranks, f"--steps 2 --fsdp --save {folder}") == whole[:2]
    assert losses(ranks, f"--steps 2 --fsdp --method uniform --num-layers 1 --resume {folder}") == whole[2:]
    assert losses(ranks, f"--steps 2 --ep 2 --resume {folder}") == pytest.approx(whole[2:], rel=1e-5)
    assert [path.name for path in folder.glob("step-*")] == ["step-2.0"]


def refused(ranks: RankPool, words: str) -> list[str]:
    statuses, _, answers = command_on(ranks, 2, f"{TRAIN} --steps 1 {words}")
    assert statuses == [2, 2]
    return [answer.err for answer in answers]


def test_files_and_folders_are_told_apart(ranks: RankPool, tmp_path: Path, capsys: Any) -> None:
    from overlap.cli import main

    file = tmp_path / "file"
    file.touch()
    assert all("must be a folder to write, not a file" in text for text in refused(ranks, f"--save {file}"))
    assert all("one file holds the run of one process" in text for text in refused(ranks, f"--resume {file}"))
    folder = tmp_path / "run"
    losses(ranks, f"--steps 1 --save {folder}")
    assert main(f"{TRAIN} --steps 1 --resume {folder}".split()) == 2
    assert "was made with" in capsys.readouterr().err
    assert main(f"{TRAIN} --steps 1 --fsdp".split()) == 2
    assert "fsdp=True: has no effect in one process" in capsys.readouterr().err
