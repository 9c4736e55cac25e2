"""The issue's command lines: every one equal, and the segments are those that the rule says."""

from __future__ import annotations

import json

import pytest

from overlap.cli import main

BASE = "--layers 4 --hidden 16 --seq 8 --microbatches 3 --dropout 0.1 --steps 1"


def verify(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, dict]:
    code = main(["verify", *BASE.split(), *words.split(), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "segments"),
    [
        ("--method uniform --num-layers 1 --mtp 1 --mhc 4", [[0], [1], [2], [3], [4]]),
        ("--method uniform --num-layers 3 --mtp 1 --mhc 4", [[0, 1, 2], [3], [4]]),
        ("--method uniform --num-layers 1 --mtp 3 --mhc 4", [[0], [1], [2], [3], [4], [5], [6]]),
        ("--method block --num-layers 2 --mtp 1 --mhc 4", [[0], [1]]),
        ("--method block --num-layers 2 --recompute-mtp --mtp 1 --mhc 4", [[0], [1], [4]]),
        ("--method uniform --num-layers 1 --mtp 2 --mhc 4 --mtp-repeat", [[0], [1], [2], [3], [4], [5]]),
        ("--method uniform --num-layers 1 --mtp 1 --mhc 4 --pad --batch 3", [[0], [1], [2], [3], [4]]),
        ("--method uniform --num-layers 2 --mtp 1 --mhc 4 --packed --batch 2", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --mtp 2 --packed --pad --batch 2", [[0, 1], [2, 3], [4], [5]]),
        ("--method uniform --num-layers 1 --mtp 1 --mhc 4 --dense-layers 2", [[0], [1], [2], [3], [4]]),
        ("--method uniform --num-layers 1 --mtp 1 --mhc 4 --dtype bfloat16", [[0], [1], [2], [3], [4]]),
        (
            "--method uniform --num-layers 1 --mtp 2 --mtp-repeat --tied --dtype bfloat16",
            [[0], [1], [2], [3], [4], [5]],
        ),
        ("--method uniform --num-layers 1 --mtp 2 --mtp-repeat --tied --delay-wgrad", [[0], [1], [2], [3], [4], [5]]),
        ("--method uniform --num-layers 1 --mtp 1 --mhc 4 --delay-wgrad", [[0], [1], [2], [3], [4]]),
        ("--method block --num-layers 4 --mtp 1 --mhc 4 --per-token-loss --pad", [[0], [1], [2], [3]]),
        ("--mtp 2 --mhc 2 --mtp-repeat --attention-dropout 0.1 --jitter 0.1", []),
        ("--method uniform --num-layers 1 --mhc 1 --order plain", [[0], [1], [2], [3]]),
    ],
)
def test_equal(words: str, segments: list[list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verify(capsys, words)
    assert verdict["equal"], verdict
    assert code == 0
    assert verdict["segments"] == segments


@pytest.mark.parametrize(
    ("control", "words", "broken"),
    [
        ("drop_bridge", "--mtp 1 --method uniform --num-layers 1", "gradients of 3.hidden from 4.attn are dropped"),
        ("drop_bridge", "--mtp 2 --mhc 2 --method block --num-layers 4", "4.hidden from 5.attn"),
        ("drop_bridge", "--mhc 2", "0.streams from 0.post"),
        ("drop_bridge", "--mhc 2 --cut-attention", "gradients of 0.streams from 0.post, 1.streams from 1.post"),
        ("drop_bridge", "--mtp 1 --mtp-repeat", "3.hidden from 4.attn"),
        ("skip_snapshot", "--mtp 1 --method uniform --num-layers 1", "replays read ids of"),
        ("skip_snapshot", "--mtp 1 --method block --num-layers 1 --recompute-mtp", "replays read ids of"),
        ("skip_snapshot", "--pad --method uniform --num-layers 1", "padding_mask"),
        ("skip_snapshot", "--packed --method block --num-layers 1", "cu_seqlens, positions"),
    ],
)
def test_controls_differ(control: str, words: str, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict = verify(capsys, f"{words} --control {control}")
    assert code == 1
    assert not verdict["equal"]
    assert verdict["gradients"]["different"] != []
    assert broken in verdict["broken"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--control drop_bridge --method uniform --num-layers 1", "no value skips a stage: set --mtp or --mhc"),
        ("--control skip_snapshot --method uniform --num-layers 1", "no replay reads an input"),
        ("--control skip_snapshot --mtp 1", "no replay reads an input"),
        (
            "--control skip_snapshot --mtp 1 --method uniform --num-layers 1 --microbatches 1",
            "no replay reads an input",
        ),
        ("--mhc 0", "mhc=0: must be an integer, 1 or more"),
        ("--mtp 8", "mtp=8: must be below max_seq"),
        ("--mtp -1", "mtp=-1: must be an integer, 0 or more"),
        ("--mtp-repeat", "mtp_repeat=True: has no effect with mtp 0"),
        ("--recompute-mtp --method block --num-layers 1", "recompute_mtp=True: has no effect without --mtp"),
        ("--recompute-mtp --mtp 1", "recompute_mtp=True: has no effect with method none"),
        ("--recompute-mtp --mtp 1 --method uniform --num-layers 1", "recompute_mtp=True: only 'block' takes it"),
        ("--pad --layers 0", "padding=True: has no effect with no layer at all"),
    ],
)
def test_bad_input(words: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *BASE.split(), *words.split(), "--json"]) == 2
    captured = capsys.readouterr()
    assert rule in captured.err
    assert captured.out == ""


def test_plan_shows_what_each_segment_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunk state as each segment saw it: what was fed and what earlier stages wrote; weights are not kept twice."""
    words = "plan --layers 2 --mtp 2 --mtp-repeat --mhc 2 --tied --pad --packed --method uniform --num-layers 2 --json"
    assert main(words.split()) == 0
    segments = json.loads(capsys.readouterr().out)["segments"]
    rows = ["padding_mask", "cu_seqlens", "positions"]
    assert [segment["layers"] for segment in segments] == [[0, 1], [2], [3]]
    assert segments[0]["inputs"] == ["embedded", *rows]
    assert segments[1]["inputs"] == ["1.hidden", "ids", *rows]
    assert segments[2]["inputs"] == ["2.hidden", "ids", *rows]
    assert [segment["fed"] for segment in segments] == [rows, ["ids", *rows], ["ids", *rows]]
    assert segments[1]["pinned"] == ["2.routing", "2.arrival"]
    assert "2.mtp_post" in segments[1]["replayed"]


def test_plan_prints_what_was_fed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layers", "1", "--mtp", "1", "--method", "uniform", "--num-layers", "1"]) == 0
    assert "ids (fed)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["--mtp 2 --mhc 2", "--mtp 1 --mtp-repeat --pad --packed", "--mtp 2 --per-token-loss"]
)
def test_train_shows_the_loss_of_each_depth(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--layers 1 --seq 16 --batch 2 --microbatches 2 --hidden 32 --method uniform --num-layers 1 --steps 12"
    assert main(["train", *shape.split(), *words.split(), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    depths = int(words.split()[1])
    assert list(payload["losses_by_name"]) == ["loss", *(f"mtp{depth + 1}_loss" for depth in range(depths))]
    assert payload["losses_by_name"]["loss"] == payload["losses"]
    for losses in payload["losses_by_name"].values():
        assert len(losses) == 12
        assert losses[-1] < losses[0] - 0.3


def test_train_prints_the_loss_of_each_depth(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "train",
                "--layers",
                "1",
                "--seq",
                "16",
                "--batch",
                "1",
                "--microbatches",
                "1",
                "--steps",
                "1",
                "--mtp",
                "1",
            ]
        )
        == 0
    )
    assert "mtp1_loss" in capsys.readouterr().out


def test_resume_does_not_care_how_it_was_computed(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recomputing the depths is how, not what: a run goes on bitwise with the other setting."""
    shape = [
        "train",
        "--layers",
        "1",
        "--seq",
        "8",
        "--batch",
        "1",
        "--microbatches",
        "2",
        "--mtp",
        "1",
        "--mhc",
        "2",
        "--steps",
        "1",
        "--json",
    ]
    block = ["--method", "block", "--num-layers", "1"]
    saved = str(tmp_path / "run")
    assert main([*shape, *block, "--save", saved]) == 0
    assert main([*shape, *block, "--recompute-mtp", "--resume", saved]) == 0
    resumed = json.loads(capsys.readouterr().out.split("\n}\n")[1] + "\n}")
    assert main([*shape[:-3], "--steps", "2", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert resumed["losses"] == whole["losses"][1:]
