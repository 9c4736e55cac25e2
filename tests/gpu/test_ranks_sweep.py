"""Two ranks on GPUs: every case of ranks_cases, in one start of torchrun.

On one GPU the ranks share it, through gloo and through mapped memory; with two or more, each has its own and
collectives are NCCL's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks_cases import CASES, Case

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

ROOT = Path(__file__).resolve().parent.parent.parent
RANKS = 2
LIMIT = 400.0
"""Seconds for all cases."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each case, by name."""
    target = tmp_path_factory.mktemp("ranks") / "results.json"
    start = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, "-m", *start, "-m", "tests.gpu.ranks_sweep", "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert target.is_file(), done.stdout + done.stderr
    return {result["name"]: result for result in json.loads(target.read_text())["cases"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_are_equal_to_the_reference(case: Case, results: dict[str, dict[str, Any]]) -> None:
    """Or differ, where something is broken on purpose."""
    result = results[case.name]
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert "raised" not in result, result["raised"]
    assert result["equal"] == (not case.broken), result
    assert result["segments_alive"] <= (2 if "hidden" in case.rule else 1)
