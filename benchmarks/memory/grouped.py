"""Weight gradients of the experts: our kernel in several tilings, and torch's grouped product.

`python -m benchmarks.memory.grouped` prints, for writing and for adding: milliseconds (median), TFLOP/s, and the
microseconds that the host takes to launch one. Torch's product is added by a second kernel, after it was made whole.
Each tiling is first checked on small uneven groups against float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.memory.measure import DEVICE
from overlap.model.fused import kernels

ROWS, EXPERTS = 16384, 32
SHAPES = {"gate_up": (2048, 2816), "down": (1408, 2048)}
TILINGS = (
    (128, 256, 32, 8, 5),
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 32, 8, 5),
    (256, 128, 64, 8, 3),
)
"""In the order of `_FIELDS`: the kernel's module needs Triton, and is imported to run only."""
_FIELDS = ("inner", "outer", "rows", "warps", "stages")
_REPEATS = 15
_AHEAD = 2_000_000
"""Cycles that the device is kept busy while the host launches what is timed."""


def main() -> int:
    """Check and time everything."""
    ours = kernels("triton_grouped")
    tilings = [ours.Tiling(**dict(zip(_FIELDS, sizes, strict=True))) for sizes in TILINGS]
    failed = [tiling for tiling in tilings if not _right(ours, tiling)]
    totals: dict[Any, float] = {}
    for name, (inner, outer) in SHAPES.items():
        x, grad, ends = _operands(inner, outer, _uneven())
        into = torch.randn(EXPERTS, inner, outer, device=DEVICE, dtype=torch.bfloat16)
        print(f"\n{name}: {EXPERTS} experts, {ROWS} rows, {inner} x {outer}; ms, TFLOP/s, host us: written | added")
        flops = 2 * ROWS * inner * outer
        torch_whole = partial(F.grouped_mm, x.t(), grad, offs=ends)
        written = _measure(torch_whole, flops)
        added = _measure(partial(_add_whole, into, torch_whole), flops)
        print(f"{'torch':52s} {_cells(written)} | {_cells(added)}", flush=True)
        expected = torch_whole().float()
        for tiling in tilings:
            out = torch.full_like(into, float("nan"))
            written = _measure(partial(ours.write, out, x, grad, ends, tiling), flops)
            added = _measure(partial(ours.add, into, x, grad, ends, tiling), flops)
            error = ((out.float() - expected).norm() / expected.norm()).item()
            if not error < 1e-2 and tiling not in failed:
                failed.append(tiling)
            print(f"{_name(tiling):52s} {_cells(written)} | {_cells(added)} | {error:.1e} from torch's", flush=True)
            totals[tiling] = totals.get(tiling, 0.0) + added[0]
    best = min((tiling for tiling in tilings if tiling not in failed), key=totals.__getitem__, default=ours.TILING)
    print(f"\nadds fastest: {best}{' (in use)' if best == ours.TILING else f'; in use: {ours.TILING}'}")
    print(*(f"WRONG: {tiling}" for tiling in failed), sep="\n")
    return 1 if failed else 0


def _add_whole(into: Tensor, whole: Callable[[], Tensor]) -> None:
    into += whole()


def _name(tiling: Any) -> str:
    return f"{tiling.inner} x {tiling.outer} x {tiling.rows}, {tiling.warps} warps, {tiling.stages} stages"


def _cells(measured: tuple[float, float, float]) -> str:
    return "{:6.3f} {:4.0f} {:4.0f}".format(*measured)


def _measure(call: Callable[[], object], flops: int) -> tuple[float, float, float]:
    """Median milliseconds, TFLOP/s, and the host's microseconds."""
    for _ in range(3):
        call()
    milliseconds = median(_device_ms(call) for _ in range(_REPEATS))
    launches = []
    for _ in range(_REPEATS):
        begin = perf_counter()
        call()
        launches.append((perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return milliseconds, flops / milliseconds / 1e9, median(launches)


def _device_ms(call: Callable[[], object]) -> float:
    begin, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    torch.cuda._sleep(_AHEAD)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _uneven() -> Tensor:
    """Counts as a router gives them: some experts have several times the rows of others."""
    weights = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0)).mul(0.5).exp()
    drawn = torch.multinomial(weights, ROWS, replacement=True, generator=torch.Generator().manual_seed(1))
    return drawn.bincount(minlength=EXPERTS)


def _operands(inner: int, outer: int, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = int(counts.sum())
    x = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(rows, outer, device=DEVICE, dtype=torch.bfloat16)
    return x, grad, counts.cumsum(0, dtype=torch.int32).to(DEVICE)


def _right(ours: Any, tiling: Any) -> bool:
    """Against float64, with groups of no rows, of fewer than a step and of many; widths that fill no tile."""
    counts = [0, 5, 130, 64, 0, 701, 1]
    x, grad, ends = _operands(336, 400, torch.tensor(counts))
    out = torch.full((len(counts), 336, 400), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    ours.write(out, x, grad, ends, tiling)
    cuts = ends[:-1].long().cpu()
    spans = zip(x.double().tensor_split(cuts), grad.double().tensor_split(cuts), strict=True)
    expected = torch.stack([a.t() @ b for a, b in spans])
    error = ((out.double() - expected).norm() / expected.norm()).item()
    into = torch.randn_like(out)
    summed = into + out
    ours.add(into, x, grad, ends, tiling)
    empty = not out[torch.tensor(counts) == 0].any()
    return error < 1e-2 and empty and torch.equal(into, summed)


if __name__ == "__main__":
    sys.exit(main())
