"""Types: which torch type a configured name means, and buffers that stay wide when a model is cast down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn

from overlap.model.config import DType

DTYPES: dict[str, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
}

_SAME_WIDTH = {torch.float32: torch.int32, torch.float64: torch.int64}


@cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute scores and losses in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters created inside have this type.

    A later cast would hold both copies for a while, and fails for fake tensors.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class WideBuffers(nn.Module):
    """A module whose own floating-point buffers keep type and value under `model.to(bfloat16)`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {id(buffer) for buffer in self.buffers(recurse=False) if buffer.dtype in _SAME_WIDTH}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            # casts of a module skip integers; seen as bits a buffer still moves between devices, exactly
            return fn(tensor.view(_SAME_WIDTH[tensor.dtype])).view(tensor.dtype)

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call, no-any-return]
