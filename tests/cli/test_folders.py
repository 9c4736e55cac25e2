"""Folders that commands write to: refused by name before anything runs."""

from __future__ import annotations

import pytest

from overlap.cli.folders import file_at, folder_at
from recompute.errors import ConfigError
from tests.cli.run import command

COMMANDS = {
    "plan": "plan --budget 1GiB --layers 2 --out",
    "timeline": "timeline --layers 2 --out",
    "pipeline": "timeline --pp 2 --out",
    "curve": "profile --layers 2 --method uniform --num-layers 1 --curve",
    "groups": "profile --oracle --groups 1 --layers 2 --out",
    "demo": "demo --layers 2 --out",
}


def test_a_folder_is_made(tmp_path):
    made = folder_at("out", str(tmp_path / "a" / "b"))
    assert made.is_dir()
    assert folder_at("out", str(made)) == made


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out=.*file/below': must be a folder that can be made"):
        folder_at("out", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_commands_say_so_and_exit_2(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    result = command(capsys, words, str(tmp_path / "file"))
    assert (result.status, result.out) == (2, "")
    assert "must be a folder that can be made" in " ".join(result.err.split())


def test_a_file_in_a_folder_that_is_made(tmp_path):
    path = file_at("save", str(tmp_path / "a" / "saved.pt"))
    assert path.parent.is_dir()
    assert not path.exists()


def test_a_file_that_cannot_be_made(tmp_path, capsys):
    """Found before anything is trained or searched."""
    (tmp_path / "file").write_text("")
    for where, rule in ((tmp_path, "must be a file to write"), (tmp_path / "file" / "below", "that can be made")):
        with pytest.raises(ConfigError, match=rule):
            file_at("save", str(where))
        for words in ("train --steps 100000 --save", "simulate --search --write"):
            result = command(capsys, words, str(where))
            assert (result.status, result.out) == (2, "")
            assert rule in result.err
