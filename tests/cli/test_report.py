"""What commands print: JSON that every reader accepts."""

from __future__ import annotations

import pytest

from overlap.cli.report import print_json
from tests.cli.run import TINY, command

Capsys = pytest.CaptureFixture[str]


def test_numbers_that_json_does_not_know_are_null(capsys: Capsys) -> None:
    print_json({"a": [1.5, float("nan"), (float("inf"), True)], "b": {"c": -float("inf"), "d": "nan", "e": None}})
    out = "".join(capsys.readouterr().out.split())
    assert out == '{"a":[1.5,null,[null,true]],"b":{"c":null,"d":"nan","e":null}}'


def test_a_diverged_run_prints_json(capsys: Capsys) -> None:
    result = command(capsys, f"train --json {TINY} --steps 3 --lr 1e30 --microbatches 1 --batch 1 --layers 1")
    assert result.status == 0
    assert result.json["losses"][-1] is None
    assert result.json["losses"][0] > 0
