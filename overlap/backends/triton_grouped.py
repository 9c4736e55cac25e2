"""Weight gradients of all experts in Triton: one launch, which writes them or adds them to what is there.

A program does one tile of one expert and loops over the expert's rows, in order: no atomics, nothing split along rows.
Both forms round the float32 sum to the operands' type first, so that adding has the bits of writing, then `+=`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the work is cut: tiles of `inner` x `outer` elements, `rows` a step; warps and stages as Triton has them."""

    inner: int
    outer: int
    rows: int
    warps: int
    stages: int


TILING = Tiling(inner=128, outer=256, rows=32, warps=8, stages=5)
"""Both forms use it. On an H200 the fastest of `python -m benchmarks.memory.grouped`, written and added.

Added to float32 it spills registers, behind the loop only.
"""


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _wgrad_kernel(  # type: ignore[no-untyped-def]
    x,
    grad,
    into,
    ends,
    inner,
    outer,
    x_row,
    x_column,
    grad_row,
    grad_column,
    into_expert,
    into_inner,
    into_outer,
    adds: tl.constexpr,
    block_inner: tl.constexpr,
    block_outer: tl.constexpr,
    block_rows: tl.constexpr,
):
    across, down = tl.cdiv(inner, block_inner), tl.cdiv(outer, block_outer)
    expert, tile = tl.program_id(0) // (across * down), tl.program_id(0) % (across * down)
    i_start, o_start = tile % across * block_inner, tile // across * block_outer
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    rows = tl.load(ends + expert) - first
    # the corners in 64 bits; within a tile 32 do
    x += first.to(tl.int64) * x_row + i_start.to(tl.int64) * x_column
    grad += first.to(tl.int64) * grad_row + o_start.to(tl.int64) * grad_column
    into += expert.to(tl.int64) * into_expert + i_start.to(tl.int64) * into_inner + o_start.to(tl.int64) * into_outer
    row, i, o = tl.arange(0, block_rows), tl.arange(0, block_inner), tl.arange(0, block_outer)
    x_offsets = row[:, None] * x_row + i[None, :] * x_column
    grad_offsets = row[:, None] * grad_row + o[None, :] * grad_column
    target = into + i[:, None] * into_inner + o[None, :] * into_outer
    i_inside, o_inside = i < inner - i_start, o < outer - o_start
    inside = i_inside[:, None] & o_inside[None, :]
    total = tl.zeros((block_inner, block_outer), tl.float32)
    for start in range(0, rows, block_rows):
        left = (row < rows - start)[:, None]
        x_tile = tl.load(x + x_offsets, mask=left & i_inside[None, :], other=0.0)
        grad_tile = tl.load(grad + grad_offsets, mask=left & o_inside[None, :], other=0.0)
        total = tl.dot(tl.trans(x_tile), grad_tile, total)
        x += block_rows * x_row
        grad += block_rows * grad_row
    result = total.to(x.dtype.element_ty)
    if adds:
        result = tl.load(target, mask=inside).to(tl.float32) + result.to(tl.float32)
    tl.store(target, result.to(into.dtype.element_ty), mask=inside)


def write(out: Tensor, x: Tensor, grad: Tensor, ends: Tensor, tiling: Tiling = TILING) -> None:
    """Write each expert's x^T grad; exact zeros for an expert without rows.

    Args:
        out: [E, I, O] bfloat16; any strides, as for all arguments.
        x: [N, I] bfloat16, sorted by expert.
        grad: [N, O] bfloat16.
        ends: [E] int32, the row behind each expert's last; rows behind the last of them belong to no expert.
        tiling: How the work is cut.
    """
    _launch(out, x, grad, ends, False, tiling)


def add(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, tiling: Tiling = TILING) -> None:
    """Add each expert's x^T grad, rounding as `into += out` with write()'s `out` does.

    As there, an expert without rows adds zeros: -0.0 becomes 0.0.

    Args:
        into: [E, I, O] bfloat16 or float32.
        x: As for write().
        grad: As for write().
        ends: As for write().
        tiling: As for write().
    """
    _launch(into, x, grad, ends, True, tiling)


def _launch(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, adds: bool, tiling: Tiling) -> None:
    experts, inner, outer = into.shape
    grid = (experts * triton.cdiv(inner, tiling.inner) * triton.cdiv(outer, tiling.outer),)
    strides = (*x.stride(), *grad.stride(), *into.stride())
    blocks = (adds, tiling.inner, tiling.outer, tiling.rows)
    _wgrad_kernel[grid](
        x, grad, into, ends, inner, outer, *strides, *blocks, num_warps=tiling.warps, num_stages=tiling.stages
    )
