"""What single operators allocate and free within themselves: neither dispatch modes nor fake tensors show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from overlap.model.grouped import one_expert_bytes

Inside = Mapping[Any, Callable[..., int]]
"""Per operator, bytes at its highest point beside its results, from its arguments."""


def tensor_bytes(x: Tensor) -> int:
    """Of its elements, each once."""
    return x.numel() * x.element_size()


def logsumexp_bytes(x: Tensor, dim: Any, keepdim: bool = False) -> int:
    """The row maxima, and the exponentials of all elements less these (ATen/native/ReduceOps.cpp, logsumexp_out_impl).

    The last axis must be the one that is summed.
    """
    return tensor_bytes(x) + x[..., :1].numel() * x.element_size()


def _one_expert(into: Tensor, x: Tensor, *rest: Any) -> int:
    return one_expert_bytes(into, x)


ON_CPU: Inside = MappingProxyType({
    torch.ops.aten.logsumexp.default: logsumexp_bytes,
    torch.ops.overlap.grouped_mm_wgrad_add.default: _one_expert,
})  # fmt: skip
"""Of the operators that this package's models use."""
