"""The real launcher: ranks end by themselves, with one status, and leave the process group without a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.run import TINY

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


def test_a_control_fails_on_every_rank_and_is_reported() -> None:
    """The launcher ends all ranks at the first bad status: by then each has one of its own, and rank 0 has reported."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "overlap"]
    words = f"verify {TINY} --ep 2 --layers 1 --steps 1 --microbatches 3 --control swap_slots --json"
    # without it torchrun itself warns
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, *words.split()], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 1
    assert [rank["equal"] for rank in json.loads(found.stdout)["ranks"]] == [False, False]
    assert found.stderr.count("exitcode  : 1 ") == 2
    assert "warn" not in found.stderr.lower()
    assert "destroy_process_group" not in found.stderr
