from __future__ import annotations

import os

import pytest
import torch

from overlap.cli.reproducible import reproducible


def test_a_gpu_runs_deterministic_algorithms_and_one_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with reproducible("cuda"):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_cpu_is_left_as_it_is() -> None:
    with reproducible("cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
