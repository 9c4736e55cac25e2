"""Run a command in process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from overlap.cli import main

TINY = "--hidden 16 --heads 2 --seq 8 --ffn-width 16 --expert-width 8 --shared-width 8"


@dataclass(frozen=True)
class Result:
    """What a command leaves behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as one JSON object."""
        value = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(value, dict)
        return value


def command(capsys: pytest.CaptureFixture[str], words: str, *more: str) -> Result:
    """Run `python -m overlap WORDS MORE...`; the status is that of the process."""
    capsys.readouterr()
    try:
        status: Any = main([*words.split(), *more])
    except SystemExit as stop:  # argparse
        status = stop.code
    captured = capsys.readouterr()
    assert isinstance(status, int)
    return Result(status, captured.out, captured.err)


def refused(capsys: pytest.CaptureFixture[str], words: str, *more: str) -> str:
    """Run a command that must end in status 2 with nothing on stdout; returns what it says."""
    result = command(capsys, words, *more)
    assert result.status == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    return result.err
