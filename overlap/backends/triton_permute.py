"""Rows gathered by index, and summed where several go into one, in Triton: one kernel, no rows in between.

Legend: M rows to read, R rows to write, k rows of the former for each of the latter, C width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Elements that a program writes: columns of one row, or several narrow rows."""


@triton.jit(do_not_specialize=["held", "rows"])  # type: ignore[untyped-decorator]  # no stubs
def _gather_kernel(  # type: ignore[no-untyped-def]
    x, index, out, held, rows, width, x_row, x_column,
    count: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    wanted, inside = row < rows, (column < width)[None, :]
    source = tl.load(index + row * count, mask=wanted, other=held).to(tl.int64)[:, None]
    total = tl.load(x + source * x_row + column[None, :] * x_column, mask=(source < held) & inside, other=0.0)
    if count > 1:
        total = total.to(tl.float32)
        for slot in tl.static_range(1, count):
            source = tl.load(index + row * count + slot, mask=wanted, other=held).to(tl.int64)[:, None]
            taken = tl.load(x + source * x_row + column[None, :] * x_column, mask=(source < held) & inside, other=0.0)
            total += taken.to(tl.float32)
    target = out + row[:, None] * width + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=wanted[:, None] & inside)


def gather(x: Tensor, index: Tensor, out: Tensor, count: int) -> None:
    """Write to each row of `out` the sum of its k rows of x, from the first to the last, in float32.

    One row alone is copied bit by bit. An index of M or more reads zeros.

    Args:
        x: [M, C] or [M], bfloat16 or float32; any strides.
        index: [R * k] integers, contiguous.
        out: [R, C] or [R], of x's type, contiguous.
        count: k.
    """
    rows = out.shape[0]
    width, column = (1, 1) if x.dim() == 1 else (x.shape[1], x.stride(1))
    if rows:
        columns = min(triton.next_power_of_2(width), _BLOCK)
        height = _BLOCK // columns
        grid = (triton.cdiv(rows, height), triton.cdiv(width, columns))
        _gather_kernel[grid](x, index, out, x.shape[0], rows, width, x.stride(0), column, count, height, columns)
