"""Device kernels: attention and RMSNorm on fake tensors as an accelerator's fused kernels hold memory.

Fake tensors lie on the CPU, where attention with values narrower than keys falls back to full score matrices, and where
RMSNorm is composed of float32 operations. On a GPU one kernel serves: attention keeps query, key, value, output and one
float32 per row, RMSNorm its input and one float32 per row. Kernels of our own are given the tensors that they write to:
fake tensors take their paths, without the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from overlap.memory.inside import Inside, logsumexp_bytes, tensor_bytes
from overlap.model.custom import apply
from overlap.model.fused import kernels_without_work
from overlap.model.grouped import one_expert_bytes

_FLOAT = 4


class DeviceKernels(TorchFunctionMode):
    """Use as a context, around a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self._ours = ExitStack()

    def __enter__(self) -> Self:
        """Kernels of our own take their paths too."""
        self._ours.enter_context(kernels_without_work())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        """As before."""
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self._ours.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put the device's kernels in place of attention and RMSNorm."""
        if func is F.rms_norm:
            return apply(_RMSNorm, args[0], (kwargs or {})["weight"])
        if func is F.scaled_dot_product_attention:
            query, key, value = args
            return apply(_Attention, query, key, value)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor
        out, sums = device_attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, sums = ctx.saved_tensors
        result: tuple[Tensor, Tensor, Tensor] = device_attention_backward(grad, query, key, value, out, sums)
        return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor
        result, sizes = device_rms_norm(x, weight)
        ctx.save_for_backward(x, weight, sizes)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = device_rms_norm_backward(grad, *ctx.saved_tensors)
        return result


@torch.library.custom_op("overlap::device_rms_norm", mutates_args=())
def device_rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x [..., C], and one float32 per row; on fake tensors only."""
    raise NotImplementedError("a stand-in that has shapes only")


@torch.library.custom_op("overlap::device_rms_norm_backward", mutates_args=())
def device_rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradients; on fake tensors only."""
    raise NotImplementedError("a stand-in that has shapes only")


@device_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@device_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


@torch.library.custom_op("overlap::device_attention", mutates_args=())
def device_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over [B, H, S, d]: the output, and one float32 per row; on fake tensors only."""
    raise NotImplementedError("a stand-in that has shapes only")


@torch.library.custom_op("overlap::device_attention_backward", mutates_args=())
def device_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients; on fake tensors only."""
    raise NotImplementedError("a stand-in that has shapes only")


@device_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length = query.shape[:3]
    # The kernel writes [B, S, H, d]: what follows takes it without a copy.
    out = value.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, length, dtype=torch.float32)


@device_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # Each as [B, S, H, d] too.
    grads = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (query, key, value)]
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _attention_flops(query: Sequence[int], value: Sequence[int]) -> int:
    """Of the forward's two products, half of the score matrix masked."""
    batch, heads, length, width = query
    return batch * heads * length * length * (width + value[-1])


_ATTENTION, _BACKWARD = torch.ops.overlap.device_attention, torch.ops.overlap.device_attention_backward
_GROUPED, _GROUPED_WGRAD = torch.ops.overlap.grouped_mm, torch.ops.overlap.grouped_mm_wgrad
_GROUPED_ADD = torch.ops.overlap.grouped_mm_wgrad_add


def _attention_workspace(grad: Tensor, query: Tensor, *rest: Tensor) -> int:
    """Gradients of queries are added up in float32, beside one float32 per row.

    Source: cudnn_frontend, node/scaled_dot_product_flash_attention.h, dQ_accum and softmax_sum. What the kernel itself
    asks for beside these is known to cuDNN alone.
    """
    return (query.numel() + query[..., 0].numel()) * _FLOAT


def _copies(*tensors: Tensor) -> int:
    """Of what does not lie in one piece."""
    return sum(tensor_bytes(x) for x in tensors if not x.is_contiguous())


def _embedding_sums(grad: Tensor, ids: Tensor, rows: int, *rest: Any) -> int:
    """Float32 sums over runs of equal ids, each run cut into pieces; short inputs take another kernel.

    Source: ATen/native/cuda/Embedding.cu (3072 ids), EmbeddingBackwardKernel.cu (pieces of ten).
    """
    count = ids.numel()
    return (min(count, rows) + -(-count // 10)) * grad.shape[-1] * _FLOAT if count > 3072 else 0


def _adding(into: Tensor, x: Tensor, *rest: Any) -> int:
    """Our kernel for bfloat16 adds tile by tile; other types go expert by expert."""
    return 0 if x.dtype is torch.bfloat16 else one_expert_bytes(into, x)


INSIDE: Inside = MappingProxyType({
    torch.ops.aten.logsumexp.default: logsumexp_bytes,
    torch.ops.aten.embedding_dense_backward.default: _embedding_sums,
    # ATen/native/cuda/layer_norm_kernel.cu works on contiguous tensors.
    torch.ops.overlap.device_rms_norm.default: lambda x, weight: _copies(x),
    torch.ops.overlap.device_rms_norm_backward.default: lambda grad, x, *rest: _copies(grad, x),
    torch.ops.overlap.device_attention_backward.default: _attention_workspace,
    torch.ops.overlap.grouped_mm_wgrad_add.default: _adding,
})  # fmt: skip
"""What a device's operators allocate and free within themselves, as far as arguments tell.

Left out, being small or unknown: radix sort and top-k buffers, a grouped product's table of sizes, partial sums of
norm weights. cuBLAS workspaces are there before the step: it keeps them per stream.
"""


def register_flops() -> None:
    """Tell torch's table of floating-point operations about the operators of this package; once is enough."""
    formulas: dict[Any, Callable[..., int]] = {
        _ATTENTION: lambda query, key, value, **_: _attention_flops(query, value),
        # Five products of the same shapes, where the forward has two.
        _BACKWARD: lambda grad, query, key, value, *rest, **_: 5 * _attention_flops(query, value) // 2,
        _GROUPED: lambda x, weight, *rest, **_: 2 * x[0] * x[1] * weight[2],
        _GROUPED_ADD: lambda into, x, grad, *rest, **_: 2 * x[0] * x[1] * grad[1],
        _GROUPED_WGRAD: lambda x, grad, *rest, **_: 2 * x[0] * x[1] * grad[1],
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
