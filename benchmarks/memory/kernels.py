"""Where a step's device time goes: kernels and copies by name, side by side for several ways to run the step.

`python -m benchmarks.memory.kernels` prints milliseconds and counts; a kernel that takes longer beside communication
shows in its row, a host that is late shows in the gaps.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace

import torch
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory.cases import Case, Wire, hidden
from benchmarks.memory.measure import Bench, timed
from benchmarks.memory.run import BACKEND
from benchmarks.memory.speed import UNIFORM

_ROWS = 30
_NAME = 58


def main() -> int:
    """Profile one step of each case."""
    bench = Bench("proxy-8")
    local = Case(proxy="proxy-8", recompute=UNIFORM)
    wire = replace(local, wire=Wire.HOST_LOOPBACK, wire_scale=0.4)
    cases = [local, replace(wire, recompute=hidden(UNIFORM), delay_wgrad=True, order="single_queue")]
    with sdpa_kernel(BACKEND):
        columns = [_profile(bench, case) for case in cases]
    for case, column in zip(cases, columns, strict=True):
        print(f"{case.name:80s} step {column['step'][0]:.1f} ms, all kernels {column['kernels'][0]:.1f} ms")
    names = sorted({name for column in columns for name in column}, key=lambda name: -columns[0].get(name, (0, 0))[0])
    for name in names[:_ROWS]:
        cells = (column.get(name, (0.0, 0)) for column in columns)
        print(f"{name[:_NAME]:{_NAME}s}", *(f"{time:8.2f} {count:5d}" for time, count in cells))
    return 0


def _profile(bench: Bench, case: Case) -> dict[str, tuple[float, int]]:
    """Milliseconds and count by name; `step` is a step without the profiler, `kernels` the sum of kernels."""
    step = bench.step_of(case)
    step()
    step()
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    found["step"] = (min(timed(step) for _ in range(3)), 1)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    for event in prof.events():
        if event.device_type.name != "CUDA":
            continue
        for name in (event.name, *(() if event.name.startswith("Mem") else ("kernels",))):
            time, count = found[name]
            found[name] = (time + event.time_range.elapsed_us() / 1e3, count + 1)
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
