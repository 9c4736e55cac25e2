"""`demo`: its own defaults, its files, its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap.cli import main
from overlap.draw import BIN_COLOURS, BIN_LABELS
from overlap.memory.bins import Bin

SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--experts", "2", "--batch", "1", "--microbatches", "2"]


def test_with_its_own_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--steps", "1", "--out", str(tmp_path), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["losses_equal"]
    assert payload["memory_exact"]
    assert len(payload["rules"]) == 4
    for name in ("losses.png", "memory.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize("words", [["--method", "uniform", "--num-layers", "1"], ["--steps", "0"]])
def test_bad_input(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", *SMALL, *words, "--out", str(tmp_path)]) == 2
    assert "error:" in capsys.readouterr().err


def test_every_kind_of_memory_has_a_colour_and_a_name() -> None:
    assert set(BIN_COLOURS) == set(BIN_LABELS) == set(Bin)
