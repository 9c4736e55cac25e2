"""`train`: the loss falls, no rule changes a bit of it, save and resume go on as if uninterrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.run import TINY, command, refused

Capsys = pytest.CaptureFixture[str]
SMALL = f"train --json --layers 2 --batch 2 --microbatches 2 {TINY}"
RULES = ["--method none", "--method uniform --num-layers 1", "--method uniform --num-layers 2",
         "--method block --num-layers 1"]  # fmt: skip


def losses(capsys: Capsys, words: str, *more: str) -> list[float]:
    result = command(capsys, f"{SMALL} {words}", *more)
    assert result.status == 0, result.err
    found = result.json["losses"]
    assert isinstance(found, list)
    return found


def test_contract(capsys: Capsys) -> None:
    result = command(capsys, f"{SMALL} --steps 3")
    assert (result.status, result.err) == (0, "")
    payload = result.json
    assert {"losses", "first_step", "tokens_per_second", "config"} <= set(payload)
    assert len(payload["losses"]) == 3
    assert payload["first_step"] == 0
    assert payload["tokens_per_second"] > 0
    assert payload["config"]["steps"] == 3


def test_the_loss_falls(capsys: Capsys) -> None:
    found = losses(capsys, "--steps 40 --lr 0.01 --batch 4")
    assert sum(found[-5:]) / 5 < found[0] - 1.5
    assert found[0] == pytest.approx(5.7, abs=0.6)


@pytest.mark.parametrize("words", ["--dropout 0.1", "--dtype bfloat16 --tied", "--per-token-loss --delay-wgrad"])
def test_no_rule_changes_a_bit(words: str, capsys: Capsys) -> None:
    curves = [losses(capsys, f"--steps 4 {words} {rule}") for rule in RULES]
    assert all(curve == curves[0] for curve in curves)
    assert losses(capsys, f"--steps 4 {words} --seed 1") != curves[0]
    assert losses(capsys, f"--steps 4 {words} --order plain") == curves[0]


@pytest.mark.parametrize("rule", RULES[:2])
def test_save_and_resume(rule: str, capsys: Capsys, tmp_path: Path) -> None:
    """Losses after a resume, and every tensor of the next checkpoint, equal the uninterrupted run's."""
    whole, half, rest = (str(tmp_path / name) for name in ("whole.pt", "half.pt", "rest.pt"))
    words = f"--dropout 0.1 {rule}"
    expected = losses(capsys, f"--steps 6 {words} --save", whole)
    first = losses(capsys, f"--steps 3 {words} --save", half)
    second = losses(capsys, f"--steps 3 {words} --resume {half} --save", rest)
    assert first + second == expected
    assert_same(torch.load(whole, weights_only=True), torch.load(rest, weights_only=True))
    started_over = losses(capsys, f"--steps 3 {words}")
    assert started_over == first != second


def assert_same(expected: object, found: object) -> None:
    """Equality of nested containers with tensors, bit by bit."""
    assert type(expected) is type(found)
    if isinstance(expected, dict) and isinstance(found, dict):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert_same(value, found[key])
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        assert len(expected) == len(found)
        for left, right in zip(expected, found, strict=True):
            assert_same(left, right)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)
    else:
        assert expected == found


def test_a_resumed_run_may_recompute_otherwise(capsys: Capsys, tmp_path: Path) -> None:
    """How gradients are computed is no part of the run: no rule changes a bit."""
    half = str(tmp_path / "half.pt")
    expected = losses(capsys, "--steps 4 --dropout 0.1")
    losses(capsys, "--steps 2 --dropout 0.1 --save", half)
    words = "--dropout 0.1 --steps 2 --method uniform --num-layers 1 --order plain --delay-wgrad --lead 2 --resume"
    assert losses(capsys, words, half) == expected[2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers 3", "layers=3: the checkpoint {path} was made with layers=2"),
        ("--seed 1", "seed=1: the checkpoint {path} was made with seed=0"),
        ("--dtype bfloat16", "dtype='bfloat16': the checkpoint {path} was made with dtype='float32'"),
        ("--batch 3", "batch=3: the checkpoint {path} was made with batch=2"),
        ("--lr 0.1", "lr=0.1: the checkpoint {path} was made with lr=0.003"),
    ],
)
def test_a_checkpoint_of_another_config(words: str, message: str, capsys: Capsys, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.pt")
    losses(capsys, "--steps 1 --save", path)
    assert message.format(path=path) in refused(capsys, f"{SMALL} {words} --resume", path)


def test_a_checkpoint_of_another_text(capsys: Capsys, tmp_path: Path) -> None:
    path, text = str(tmp_path / "saved.pt"), tmp_path / "text.txt"
    text.write_text("some other text " * 20)
    losses(capsys, "--steps 1 --save", path)
    assert "text=[" in refused(capsys, f"{SMALL} --text {text} --resume", path)


def test_what_is_no_checkpoint(capsys: Capsys, tmp_path: Path) -> None:
    missing, rubbish, other = (tmp_path / name for name in ("missing.pt", "rubbish.pt", "other.pt"))
    rubbish.write_bytes(b"rubbish")
    torch.save({"weights": torch.zeros(1)}, other)
    for path, rule in (
        (missing, "must be a readable file"),
        (tmp_path, "must be a folder with a complete checkpoint"),
        (rubbish, "must be a checkpoint of this program"),
        (other, "must be a checkpoint of format"),
    ):
        message = refused(capsys, f"{SMALL} --resume", str(path))
        assert f"resume='{path}'" in message
        assert rule in message


def test_text_files(capsys: Capsys, tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("abcdefgh" * 8)
    other.write_text("zyxwvuts" * 8)
    found = losses(capsys, "--steps 2 --text", str(text))
    assert found == losses(capsys, "--steps 2 --text", str(text))
    assert found != losses(capsys, "--steps 2 --text", str(other))
    assert found != losses(capsys, "--steps 2 --text", str(text), str(other))


def test_text_that_will_not_do(capsys: Capsys, tmp_path: Path) -> None:
    good, missing, empty, short = (tmp_path / name for name in ("good", "missing", "empty", "short"))
    good.write_text("x" * 100)
    empty.touch()
    short.write_text("12345678")
    for path, rule in (
        (missing, "must be a readable file (No such file or directory)"),
        (tmp_path, "must be a readable file (Is a directory)"),
        (empty, "must not be empty"),
        (short, "must hold at least one sequence of 8 bytes and the byte after it; it holds 8"),
    ):
        for paths in ([str(path)], [str(good), str(path)]):
            message = refused(capsys, f"{SMALL} --text", *paths)
            assert f"text='{path}'" in message
            assert rule in message
    short.write_text("123456789")
    assert len(losses(capsys, "--steps 1 --text", str(short))) == 1


def test_a_save_that_fails_leaves_the_old_file(capsys: Capsys, tmp_path: Path, monkeypatch) -> None:
    """The file appears whole or not at all."""
    path = tmp_path / "saved.pt"
    losses(capsys, "--steps 1 --save", str(path))
    before = path.read_bytes()

    def fail(payload: object, where: Path) -> None:
        Path(where).write_bytes(b"half a checkpoint")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        command(capsys, f"{SMALL} --steps 1 --save", str(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 0", "steps=0: must be at least 1"),
        ("--lr 0", "lr=0.0: must be above 0"),
        ("--lr nan", "lr=nan: must be above 0"),
        ("--lr inf", "lr=inf: must be above 0 and finite"),
        ("--save .", "save='.': must be a file to write, not a folder"),
    ],
)
def test_refused(words: str, message: str, capsys: Capsys) -> None:
    assert message in refused(capsys, f"{SMALL} {words}")


def test_own_models_are_not_trained(capsys: Capsys) -> None:
    message = refused(capsys, "train --program examples.own_layer:build")
    assert "program='examples.own_layer:build': train knows the built-in decoder only" in message


def test_for_people(capsys: Capsys) -> None:
    result = command(capsys, f"{SMALL.replace('--json ', '')} --steps 2")
    assert result.status == 0
    assert "in 2 steps" in result.out
