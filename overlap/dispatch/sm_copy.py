"""SmCopy: a stand-in for communication by kernel, as NCCL's all-to-all is: a copy that holds a few multiprocessors.

Where communication is a kernel, one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) makes it wait for compute issued
before it; copy engines do not queue there. Triton is imported only when the transport is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from overlap.dispatch.routing import Routing
from overlap.dispatch.transport import Gradients
from recompute.errors import ConfigError

Copy = Callable[[Tensor, Tensor, int, int], None]
"""copy(source, target, programs, rounds): both uint8 of equal length."""


class SmCopy:
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

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Copy the rows; the weights are few bytes and stay."""
        return self._trip(tokens), probs

    def dispatch_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, None]:
        """Copy the rows' gradient."""
        tokens = grads[0]
        return None if tokens is None else self._trip(tokens), grads[1], None

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """Copy the rows."""
        return self._trip(rows)

    def combine_adjoint(self, grads: Gradients, pinned: Sequence[Any]) -> tuple[Tensor | None, None]:
        """Copy the gradient."""
        rows = grads[0]
        return None if rows is None else self._trip(rows), None

    def copied(self, rows: Tensor) -> Tensor:
        """A copy of `rows` made by the kernel."""
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        if rows.numel():
            source, target = rows.flatten().view(torch.uint8), result.flatten().view(torch.uint8)
            self._copy(source, target, self._programs, self._rounds)
        return result

    def _trip(self, rows: Tensor) -> Tensor:
        result: Tensor = _Copied.apply(rows, self)  # type: ignore[no-untyped-call]  # torch's
        return result


class _Copied(torch.autograd.Function):
    """The copy, differentiable: the gradient is copied too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: SmCopy) -> Tensor:
        """Copy."""
        ctx.transport = transport
        return transport.copied(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Copy."""
        return ctx.transport.copied(gradients[0]), None


def _load_copy() -> Copy:
    try:
        kernels = import_module("overlap.backends.triton_copy")
    except ImportError as error:
        raise ConfigError(field="transport", value="sm_copy", rule=f"needs Triton ({error})") from error
    copy: Copy = kernels.copy_bytes
    return copy
