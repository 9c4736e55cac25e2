"""Ranks on GPUs, through torchrun: with one GPU they share it and talk by gloo, with several each has its own and NCCL.

Each rank is bitwise equal to its own reference on real streams.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (
    "--hidden 128 --heads 4 --ffn-width 256 --expert-width 96 --shared-width 96 --experts 8 --batch 2 --seq 64,48 "
    "--layers 3 --steps 2 --microbatches 4 --json --device cuda"
)
HIDDEN = "--method uniform --num-layers 1 --replay hidden"


def run_ranks(backend: str, words: str) -> tuple[int, dict[str, object], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = subprocess.run(
        [*command, "-m", "tests.gpu.rank_worker", f"expect={backend}", *f"verify {SHAPE} {words}".split()],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return found.returncode, json.loads(found.stdout) if found.stdout else {}, found.stderr


CASES = [
    f"--ep 2 {HIDDEN}",
    f"--ep 2 {HIDDEN} --dtype bfloat16 --mtp 1 --mhc 2 --dropout 0.1",
    "--ep 2 --method uniform --num-layers 2 --delay-wgrad --route first-rank",
    "--ep 2 --method block --num-layers 2 --experts 2 --order single_queue",
    f"--ep 2 {HIDDEN} --capacity 1.0 --dtype bfloat16 --debug-collectives",
]


@pytest.mark.parametrize("words", CASES)
def test_two_ranks_on_one_gpu(words: str) -> None:
    status, printed, err = run_ranks("gloo", f"{words} --collective-backend gloo")
    assert status == 0, err
    assert printed["equal"] is True


def test_a_control_fails_on_one_gpu() -> None:
    """Negative control of the test above."""
    status, printed, err = run_ranks("gloo", f"{CASES[0]} --collective-backend gloo --control swap_slots")
    assert status == 1, err
    assert printed["equal"] is False


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", CASES)
def test_two_ranks_on_two_gpus(words: str) -> None:
    status, printed, err = run_ranks("nccl", words)
    assert status == 0, err
    assert printed["equal"] is True
