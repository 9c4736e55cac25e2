"""What single operators allocate and free within themselves: neither dispatch modes nor fake tensors show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from overlap.memory.operands import OPERANDS
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


def safe_softmax_bytes(x: Tensor, *rest: Any, **keywords: Any) -> int:
    """Which elements are -inf and which rows are nothing else, a byte each; and the zero that such rows become.

    Source: ATen/native/SoftMax.cpp, _safe_softmax. The last axis must be the one that is normalised.
    """
    return x.numel() + x[..., :1].numel() + x.element_size()


def sort_bytes(x: Tensor, *rest: Any, **keywords: Any) -> int:
    """The indices of one row, rearranged (ATen/native/cpu/SortingKernel.cpp); the last axis must be the sorted one."""
    return x.shape[-1] * torch.int64.itemsize


def repeat_bytes(x: Tensor, repeats: Sequence[int]) -> int:
    """A permutation of the axes and the parts it is joined from (ATen/native/TensorShape.cpp, repeat)."""
    return 4 * len(repeats) * torch.int64.itemsize


def flash_bytes(query: Tensor, key: Tensor, *rest: Any, **keywords: Any) -> int:
    """Each thread's block of scores, two numbers a row of it, and its rows of the result.

    Source: ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention.
    """
    rows, columns = _block(query, key)
    return torch.get_num_threads() * rows * (columns + 2 + query.shape[-1]) * query.element_size()


def flash_backward_bytes(grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **keywords: Any) -> int:
    """Each thread's two blocks of scores and one number a row; and the gradient if tokens do not lie one by one in it.

    Source: as of flash_bytes, cpu_flash_attention_backward.
    """
    rows, columns = _block(query, key)
    copied = 0 if grad.transpose(1, 2).is_contiguous() else tensor_bytes(grad)
    return copied + torch.get_num_threads() * rows * (2 * columns + 1) * query.element_size()


def _block(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _one_expert(into: Tensor, x: Tensor, *rest: Any) -> int:
    return one_expert_bytes(into, x)


ON_CPU: Inside = MappingProxyType({
    **OPERANDS,
    torch.ops.aten._safe_softmax.default: safe_softmax_bytes,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: flash_bytes,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_backward_bytes,
    torch.ops.aten.sort.stable: sort_bytes,
    torch.ops.aten.repeat.default: repeat_bytes,
    torch.ops.aten.logsumexp.default: logsumexp_bytes,
    # The zero for the rows of no expert, when there are none too.
    torch.ops.overlap.grouped_mm.default: lambda x, *rest: x.element_size(),
    torch.ops.overlap.grouped_mm_wgrad_add.default: _one_expert,
})  # fmt: skip
"""Of the operators that this package's models use."""
