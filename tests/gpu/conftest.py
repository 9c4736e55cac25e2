"""GPU tests: deterministic algorithms, one attention backend, and skipped where there is no GPU."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
BACKEND = SDPBackend.EFFICIENT_ATTENTION
"""The attention backend of every GPU test: deterministic in deterministic mode, and takes MLA's unequal head widths."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, unwritten memory filled with NaN, and the named attention backend."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.use_deterministic_algorithms(True)
    # On by default with deterministic algorithms: torch.utils.deterministic.fill_uninitialized_memory.
    try:
        with sdpa_kernel(BACKEND):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
