"""SwiGLU's elementwise part, with a backward that keeps its input only.

Composed of torch's own operations it would keep five tensors of the inner width, two of them in float32. On a GPU one
kernel does it each way; elsewhere rows are worked on in blocks, so that backward's temporaries stay small beside the
gradients. Input and gradient are the largest tensors of a layer: where the caller allows it they share their memory.
Legend: N rows, W inner width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from overlap.model.custom import apply, graph_is_kept
from overlap.model.fused import contiguous, fused, kernels

_ROWS = 4096
"""Rows of a block: 4096 of width 1408 in float32 are 22 MiB."""
_WIDEST = 16384
"""Largest inner width of the kernel: a row is one block."""


def swiglu(gate_up: Tensor, probs: Tensor | None = None, *, consumes: bool = False) -> Tensor:
    """silu(gate) * up, each row times its weight.

    Args:
        gate_up: [..., 2*W], gate first; [N, 2*W] with `probs`.
        probs: [N], of gate_up's type or wider; None: no weights.
        consumes: Backward writes gate_up's gradient over gate_up, unless the graph is kept for another backward. The
            caller promises that nothing else reads gate_up once backward gets there: no other function has it as an
            input, none has saved it as an output, and nobody outside the graph looks at it.

    Returns:
        [..., W] of gate_up's type.
    """
    return apply(_SwiGLU, gate_up, probs, consumes)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor | None, consumes: bool) -> Tensor:
        ctx.save_for_backward(gate_up, probs)
        ctx.consumes = consumes
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate_up, probs = ctx.saved_tensors
        rows = gate_up.detach().flatten(0, -2)
        consumes = ctx.consumes and not graph_is_kept()
        grad_gate_up, grad_probs = swiglu_gradients(rows, probs, grad.flatten(0, -2), rows if consumes else None)
        if consumes:
            # Kernels of our own do not: torch tells whoever has saved it all the same.
            increment_version(gate_up)
        return grad_gate_up.view_as(gate_up), grad_probs, None


def swiglu_gradients(
    rows: Tensor, probs: Tensor | None, grad_rows: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of swiglu's arguments, row by row: those of some rows do not depend on the others.

    Args:
        rows: [N, 2*W].
        probs: [N], or None.
        grad_rows: [N, W], the result's.
        out: Takes the gradient of `rows`, and may be `rows`; None: new memory.
    """
    alone = _one_kernel(rows)
    if alone:
        rows, grad_rows, probs = rows.contiguous(), grad_rows.contiguous(), contiguous(probs)
    grad_gate_up = torch.empty_like(rows) if out is None or (alone and not out.is_contiguous()) else out
    grad_probs = None if probs is None else torch.empty_like(probs)
    if alone:
        kernels("triton_swiglu").swiglu_backward(rows, probs, grad_rows, grad_gate_up, grad_probs)
        return grad_gate_up if out is None or out is grad_gate_up else out.copy_(grad_gate_up), grad_probs
    for start in range(0, rows.shape[0], _ROWS):
        block = slice(start, start + _ROWS)
        gate, up = rows[block].chunk(2, -1)
        inner = grad_rows[block]
        if probs is not None and grad_probs is not None:
            grad_probs[block] = (inner * _product(rows[block])).sum(-1, dtype=probs.dtype)
            inner = _weighted(inner, probs[block])
        # Both halves are there before either is written: `rows` and the result may be one.
        grad_gate_up[block] = torch.cat((torch.ops.aten.silu_backward(inner * up, gate), inner * F.silu(gate)), -1)
    return grad_gate_up, grad_probs


def _one_kernel(gate_up: Tensor) -> bool:
    return fused(gate_up) and gate_up.shape[-1] // 2 <= _WIDEST


def _product(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


def _weighted(rows: Tensor, probs: Tensor | None) -> Tensor:
    return rows if probs is None else (rows * probs.unsqueeze(-1)).to(rows.dtype)
