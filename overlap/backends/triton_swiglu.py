"""SwiGLU's elementwise part in Triton: one kernel forward, one backward, a row each program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _forward_kernel(gate_up, probs, out, width, weighted: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weighted:
        value *= tl.load(probs + row).to(tl.float32)
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _backward_kernel(  # type: ignore[no-untyped-def]
    gate_up, probs, grad, grad_gate_up, grad_probs, width, weighted: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    inner = tl.load(grad + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if weighted:
        tl.store(grad_probs + row, tl.sum(inner * silu * up, 0).to(grad_probs.dtype.element_ty))
        inner *= tl.load(probs + row).to(tl.float32)
    grad_gate = inner * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    # The gradient may go over its input: a small row is loaded by several warps, and all must have it.
    tl.debug_barrier()
    kind = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + row * 2 * width + columns, grad_gate.to(kind), mask=inside)
    tl.store(grad_gate_up + row * 2 * width + width + columns, (inner * silu).to(kind), mask=inside)


def swiglu_forward(gate_up: Tensor, probs: Tensor | None, out: Tensor) -> None:
    """Write silu(gate) * up, each row times its weight.

    Args:
        gate_up: [N, 2*W] contiguous, gate first.
        probs: [N] contiguous, or None.
        out: [N, W] contiguous.
    """
    rows, width = out.shape
    if rows:
        weights = gate_up if probs is None else probs
        _forward_kernel[(rows,)](gate_up, weights, out, width, probs is not None, triton.next_power_of_2(width))


def swiglu_backward(
    gate_up: Tensor, probs: Tensor | None, grad: Tensor, grad_gate_up: Tensor, grad_probs: Tensor | None
) -> None:
    """Write the gradients of swiglu_forward's arguments; all contiguous, shaped as those.

    grad_gate_up may be gate_up: a program reads its row, and no other, before it writes it.
    """
    rows, width = grad.shape
    if rows:
        weighted = probs is not None and grad_probs is not None
        weights, grad_weights = (probs, grad_probs) if weighted else (gate_up, grad_gate_up)
        block = triton.next_power_of_2(width)
        _backward_kernel[(rows,)](gate_up, weights, grad, grad_gate_up, grad_weights, width, weighted, block)
