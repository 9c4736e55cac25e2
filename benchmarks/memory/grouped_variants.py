"""Variants of the grouped weight gradient under trial: TMA loads, a persistent grid, targets fetched ahead into L2.

`python -m benchmarks.memory.grouped_variants` prints as `benchmarks.memory.grouped` does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from benchmarks.memory.grouped import EXPERTS, ROWS, SHAPES, _cells, _measure, _operands, _uneven
from benchmarks.memory.measure import DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A tiling, and how it reads and runs."""

    inner: int = 128
    outer: int = 128
    rows: int = 64
    warps: int = 8
    stages: int = 3
    tma: bool = True
    ahead: bool = False
    programs: int = 0
    """Programs per multiprocessor; 0: one for each tile."""
    registers: int | None = None


VARIANTS = (
    Variant(),
    Variant(stages=2),
    Variant(ahead=True, registers=128),
    Variant(programs=2),
    Variant(programs=2, ahead=True, registers=128),
    Variant(warps=4),
    Variant(warps=4, ahead=True),
    Variant(outer=256),
    Variant(outer=256, stages=4),
    Variant(outer=256, stages=4, ahead=True),
    Variant(outer=256, stages=4, programs=1),
    Variant(outer=256, stages=4, programs=1, ahead=True),
    Variant(inner=256, stages=4),
    Variant(inner=64, outer=256, warps=4),
    Variant(inner=64, outer=256, warps=4, ahead=True),
    Variant(rows=128, stages=2, outer=256),
    Variant(tma=False, ahead=True, registers=128),
    Variant(tma=False, ahead=True, outer=256, stages=4),
)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def variant_kernel(  # type: ignore[no-untyped-def]  # noqa: D103
    x, grad, into, ends, inner, outer, x_row, grad_row, into_expert, into_inner, tiles,
    adds: tl.constexpr, tma: tl.constexpr, ahead: tl.constexpr,
    block_inner: tl.constexpr, block_outer: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(inner, block_inner), tl.cdiv(outer, block_outer)
    row = tl.arange(0, block_rows)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, tile = number // (across * down), number % (across * down)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends + expert) - first
        i_start, o_start = tile % across * block_inner, tile // across * block_outer
        i, o = i_start + tl.arange(0, block_inner), o_start + tl.arange(0, block_outer)
        base = into + expert.to(tl.int64) * into_expert
        if adds and ahead:
            lines = base + tl.minimum(i, inner - 1).to(tl.int64) * into_inner + o_start
            nbytes = tl.zeros_like(i) + tl.minimum(outer - o_start, block_outer) * 2
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [lines.to(tl.int64), nbytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        total = tl.zeros((block_inner, block_outer), tl.float32)
        if tma:
            for start in range(0, rows, block_rows):
                x_tile = load_ragged(x, first, rows, [start, i_start])
                grad_tile = load_ragged(grad, first, rows, [start, o_start])
                total = tl.dot(tl.trans(x_tile), grad_tile, total)
        else:
            x_base, grad_base = x + first.to(tl.int64) * x_row, grad + first.to(tl.int64) * grad_row
            x_offsets, grad_offsets = row[:, None] * x_row + i[None, :], row[:, None] * grad_row + o[None, :]
            for start in range(0, rows, block_rows):
                left = (row < rows - start)[:, None]
                x_tile = tl.load(x_base + x_offsets, mask=left & (i < inner)[None, :], other=0.0)
                grad_tile = tl.load(grad_base + grad_offsets, mask=left & (o < outer)[None, :], other=0.0)
                total = tl.dot(tl.trans(x_tile), grad_tile, total)
                x_base += block_rows * x_row
                grad_base += block_rows * grad_row
        target = base + i[:, None].to(tl.int64) * into_inner + o[None, :]
        inside = (i < inner)[:, None] & (o < outer)[None, :]
        result = total.to(tl.bfloat16)
        if adds:
            result = tl.load(target, mask=inside).to(tl.float32) + result.to(tl.float32)
        tl.store(target, result.to(into.dtype.element_ty), mask=inside)


def launch(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, adds: bool, v: Variant) -> None:
    """As the package's write() and add(), contiguous tensors only."""
    experts, inner, outer = into.shape
    tiles = experts * triton.cdiv(inner, v.inner) * triton.cdiv(outer, v.outer)
    programs = v.programs * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    read = (
        (create_ragged_descriptor(x, [v.rows, v.inner]), create_ragged_descriptor(grad, [v.rows, v.outer]))
        if v.tma
        else (x, grad)
    )
    strides = (x.stride(0), grad.stride(0), into.stride(0), into.stride(1))
    blocks = (adds, v.tma, v.ahead, v.inner, v.outer, v.rows)
    variant_kernel[(min(programs, tiles) or tiles,)](
        *read, into, ends, inner, outer, *strides, tiles, *blocks,
        num_warps=v.warps, num_stages=v.stages, maxnreg=v.registers,
    )  # fmt: skip


def main() -> int:
    """Check and time every variant that compiles."""
    wrong = 0
    for variant in VARIANTS:
        line, right = f"{_name(variant):60s}", True
        try:
            for inner, outer in SHAPES.values():
                cells, ok = _times(variant, inner, outer)
                line, right = f"{line} | {cells}", right and ok
            right = right and _right(variant)
        except Exception as error:
            line, right = f"{line} | {type(error).__name__}: {str(error)[:200]}", False
        wrong += not right
        print(line, "" if right else "WRONG", flush=True)
    return min(wrong, 1)


def _times(variant: Variant, inner: int, outer: int) -> tuple[str, bool]:
    torch.manual_seed(0)
    x, grad, ends = _operands(inner, outer, _uneven())
    into = torch.randn(EXPERTS, inner, outer, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full_like(into, float("nan"))
    flops = 2 * ROWS * inner * outer
    launch(out, x, grad, ends, False, variant)
    error = (out - torch.nn.functional.grouped_mm(x.t(), grad, offs=ends)).float().norm() / out.float().norm()
    summed = into + out
    launch(into, x, grad, ends, True, variant)
    ok = bool(error < 1e-2) and torch.equal(into, summed)
    written = _measure(lambda: launch(out, x, grad, ends, False, variant), flops)
    added = _measure(lambda: launch(into, x, grad, ends, True, variant), flops)
    return f"{_cells(written)} | {_cells(added)}", ok


def _right(variant: Variant) -> bool:
    counts = [0, 5, 130, 64, 0, 701, 1]
    x, grad, ends = _operands(336, 400, torch.tensor(counts))
    out = torch.full((len(counts), 336, 400), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    launch(out, x, grad, ends, False, variant)
    cuts = ends[:-1].long().cpu()
    spans = zip(x.double().tensor_split(cuts), grad.double().tensor_split(cuts), strict=True)
    expected = torch.stack([a.t() @ b for a, b in spans])
    return bool((out.double() - expected).norm() < 1e-2 * expected.norm()) and not out[[0, 4]].any()


def _name(v: Variant) -> str:
    rest = replace(v, inner=128, outer=128, rows=64, warps=8, stages=3)
    names = [name for name in ("tma", "ahead") if getattr(rest, name)]
    names += [f"{v.programs} programs"] * bool(v.programs)
    return f"{v.inner} x {v.outer} x {v.rows}, {v.warps} warps, {v.stages} stages, {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main())
