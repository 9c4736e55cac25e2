"""SwiGLU's elementwise part, with a backward that keeps its input only.

Composed of torch's own operations it would keep five tensors of the inner width, two of them in float32. On a GPU one
kernel does it each way; elsewhere rows are worked on in blocks, so that backward's temporaries stay small beside the
gradients.
Legend: N rows, W inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from overlap.model.custom import apply
from overlap.model.fused import contiguous, fused, kernels

_ROWS = 4096
"""Rows of a block: 4096 of width 1408 in float32 are 22 MiB."""
_WIDEST = 16384
"""Largest inner width of the kernel: a row is one block."""


def swiglu(gate_up: Tensor, probs: Tensor | None = None) -> Tensor:
    """silu(gate) * up, each row times its weight.

    Args:
        gate_up: [..., 2*W], gate first; [N, 2*W] with `probs`.
        probs: [N], of gate_up's type or wider; None: no weights.

    Returns:
        [..., W] of gate_up's type.
    """
    return apply(_SwiGLU, gate_up, probs)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        rows = gate_up.flatten(0, -2)
        result = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
        if _one_kernel(gate_up):
            kernels("triton_swiglu").swiglu_forward(rows.contiguous(), contiguous(probs), result)
            return result.view(*gate_up.shape[:-1], result.shape[1])
        for start in range(0, rows.shape[0], _ROWS):
            block = slice(start, start + _ROWS)
            result[block] = _weighted(_product(rows[block]), None if probs is None else probs[block])
        return result.view(*gate_up.shape[:-1], result.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, probs = ctx.saved_tensors
        grad_gate_up, grad_probs = swiglu_gradients(gate_up.flatten(0, -2), probs, grad.flatten(0, -2))
        return grad_gate_up.view_as(gate_up), grad_probs


def swiglu_gradients(rows: Tensor, probs: Tensor | None, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of swiglu's arguments, row by row: those of some rows do not depend on the others.

    Args:
        rows: [N, 2*W].
        probs: [N], or None.
        grad_rows: [N, W], the result's.
    """
    alone = _one_kernel(rows)
    if alone:
        rows, grad_rows, probs = rows.contiguous(), grad_rows.contiguous(), contiguous(probs)
    grad_gate_up = torch.empty_like(rows)
    grad_probs = None if probs is None else torch.empty_like(probs)
    if alone:
        kernels("triton_swiglu").swiglu_backward(rows, probs, grad_rows, grad_gate_up, grad_probs)
        return grad_gate_up, grad_probs
    for start in range(0, rows.shape[0], _ROWS):
        block = slice(start, start + _ROWS)
        gate, up = rows[block].chunk(2, -1)
        inner = grad_rows[block]
        if probs is not None and grad_probs is not None:
            grad_probs[block] = (inner * _product(rows[block])).sum(-1, dtype=probs.dtype)
            inner = _weighted(inner, probs[block])
        grad_gate_up[block] = torch.cat((torch.ops.aten.silu_backward(inner * up, gate), inner * F.silu(gate)), -1)
    return grad_gate_up, grad_probs


def _one_kernel(gate_up: Tensor) -> bool:
    return fused(gate_up) and gate_up.shape[-1] // 2 <= _WIDEST


def _product(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


def _weighted(rows: Tensor, probs: Tensor | None) -> Tensor:
    return rows if probs is None else (rows * probs.unsqueeze(-1)).to(rows.dtype)
