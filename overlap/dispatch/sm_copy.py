"""SmCopy: a stand-in for communication by kernel, as NCCL's all-to-all is: a copy that holds a few multiprocessors.

Where communication is a kernel, one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) makes it wait for compute issued
before it; copy engines do not queue there. Triton is imported only when the transport is made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from overlap.dispatch.round_trip import RoundTrip
from recompute.errors import ConfigError

Copy = Callable[[Tensor, Tensor, int, int], None]
"""copy(source, target, programs, rounds): both uint8 of equal length."""


class SmCopy(RoundTrip):
    """A transport whose trips are copy kernels of `programs` thread blocks, each done `rounds` times.

    Raises:
        ConfigError: `programs` or `rounds` is below 1, or Triton is not installed.
    """

    def __init__(self, programs: int = 8, rounds: int = 1) -> None:
        for name, value in (("programs", programs), ("rounds", rounds)):
            if value < 1:
                raise ConfigError(field=name, value=value, rule="must be at least 1")
        self._programs = programs
        self._rounds = rounds
        self._copy = _load_copy()

    def round_trip(self, rows: Tensor) -> Tensor:
        """A copy of `rows` made by the kernel."""
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        if rows.numel():
            source, target = rows.flatten().view(torch.uint8), result.flatten().view(torch.uint8)
            self._copy(source, target, self._programs, self._rounds)
        return result


def _load_copy() -> Copy:
    try:
        kernels = import_module("overlap.backends.triton_copy")
    except ImportError as error:
        raise ConfigError(field="transport", value="sm_copy", rule=f"needs Triton ({error})") from error
    copy: Copy = kernels.copy_bytes
    return copy
