"""Run commands on ranks of the pool, as torchrun would start them."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any, NamedTuple

from overlap.cli import main
from tests.distributed.ranks import RankPool

TINY = "--hidden 16 --heads 2 --seq 8 --ffn-width 16 --expert-width 8 --shared-width 8"


class Answer(NamedTuple):
    """What one rank's command left behind."""

    status: int
    out: str
    err: str


def run_command(words: str) -> Answer:
    """On one rank: run `python -m overlap WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words.split())
    return Answer(status, out.getvalue(), err.getvalue())


def command_on(ranks: RankPool, size: int, words: str) -> tuple[list[int], dict[str, Any], list[Answer]]:
    """Run it on all ranks: every status, what rank 0 printed as JSON, everything."""
    answers = ranks(size, run_command, words)
    assert all(answer.out == "" for answer in answers[1:])
    printed: dict[str, Any] = json.loads(answers[0].out) if answers[0].out else {}
    return [answer.status for answer in answers], printed, answers
