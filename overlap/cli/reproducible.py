"""Have a device compute the same bits each time: without that, two equal steps differ on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ATTENTION = SDPBackend.EFFICIENT_ATTENTION
"""Its backward is deterministic in deterministic mode, and it takes MLA's unequal head widths."""


@contextmanager
def reproducible(device: str) -> Iterator[None]:
    """On a GPU: deterministic algorithms and one attention kernel inside. A CPU reproduces itself anyway.

    Args:
        device: `cpu` or `cuda`; nothing may have run on it yet, as cuBLAS reads its setting when it starts.
    """
    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
