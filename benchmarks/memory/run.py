"""Run a suite and write its results: `python -m benchmarks.memory.run --suite h200 --out benchmarks/memory/results`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory import compare, golden
from benchmarks.memory.cases import PROXIES, memory_cases
from benchmarks.memory.markdown import markdown
from benchmarks.memory.measure import Bench, Measured
from benchmarks.memory.oracle import oracle
from benchmarks.memory.slots import slots
from benchmarks.memory.speed import exposed, host, loopback, overhead, queues, wide
from benchmarks.memory.te import te, te_light
from overlap.backends import load_backend
from overlap.timeline import chrome_trace

BACKEND = SDPBackend.CUDNN_ATTENTION
"""The fastest that takes MLA's unequal head widths; its backward does not reproduce itself, so tests use another."""


def environment(program: str = "python -m benchmarks.memory.run") -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "date": datetime.now(tz=UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(),
        "attention": BACKEND.name,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "unset"),
    }


def memory() -> list[dict[str, Any]]:
    """Activation peaks of every memory case."""
    results: list[Measured] = []
    for proxy in PROXIES:
        bench = Bench(proxy)
        for case in memory_cases():
            if case.proxy == proxy:
                results.append(bench.measure(case))
                report(results[-1])
        results.append(bench.forward_working_set())
        report(results[-1])
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    return [asdict(result) for result in results]


def report(result: Measured) -> None:
    """A line of progress."""
    line = f"{result.name:62s} peak {result.activation_peak:8.1f} MiB  reserved {result.reserved:8.0f}"
    print(f"{line}  step {result.step:8.1f} ms", flush=True)


Part = tuple[str, Callable[[], list[dict[str, Any]]]]
GRAPH: tuple[Part, ...] = (
    ("graph_overhead", partial(overhead, graph=True)),
    ("graph_loopback", partial(loopback, graph=True)),
    ("graph_exposed", partial(exposed, graph=True)),
)
"""Steps launched as CUDA graphs: the host does not set their times."""
SUITES: dict[str, Sequence[Part]] = {
    "memory": (("memory", memory),),
    "oracle": (("oracle", oracle),),
    "oracle-slots": (("slots", slots),),
    "overhead": (("overhead", overhead),),
    "loopback": (("loopback", loopback),),
    "wide": (("wide", wide),),
    "exposed": (("exposed", exposed),),
    "host": (("host", host),),
    "graph": GRAPH,
    "queues": (("queues", queues),),
    "te": (("te", te),),
    "te-light": (("te", te_light),),
    # Peaks first: recordings keep some memory for good.
    "h200": (("memory", memory), ("host", host), ("overhead", overhead), ("loopback", loopback), *GRAPH),
}


def main() -> int:
    """Run and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=SUITES)
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="print the ratios of two result files instead")
    parser.add_argument("--check", action="store_true", help="exit status 1 where a figure leaves its golden number")
    parser.add_argument("--out", default="benchmarks/memory/results", metavar="DIR")
    parser.add_argument("--tag", default="", help="added to the file's name")
    args = parser.parse_args()
    if args.compare is not None:
        return compare.show(*map(FilePath, args.compare))
    if args.suite is None:
        parser.error("give --suite or --compare")
    if args.suite.startswith("te"):
        # Its libraries go by the cuDNN that is loaded first; torch loads its own when it is first used.
        load_backend("te")
    folder = FilePath(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{args.suite}{args.tag}.json"
    payload: dict[str, Any] = {"suite": args.suite, "environment": environment()}
    with sdpa_kernel(BACKEND):
        for name, part in SUITES[args.suite]:
            payload[name] = part()
            write(target, payload)  # after each part: what is measured is kept if a later one fails
    print(f"wrote {target}")
    return check(payload) if args.check else 0


def write(target: FilePath, payload: dict[str, Any]) -> None:
    """Write the results as JSON and Markdown; timelines go to a trace beside them.

    Args:
        target: The JSON file.
        payload: The suite's name, its environment, and the rows of each part.
    """
    rows = [row for part in payload.values() if isinstance(part, list) for row in part]
    timelines = [row["timeline"] for row in rows if "timeline" in row]
    if timelines:
        trace = json.dumps(chrome_trace(timelines))
        target.with_name(f"{target.stem}_trace.json").write_text(trace + "\n")
    plain = {
        name: [{k: v for k, v in row.items() if k != "timeline"} for row in part] if isinstance(part, list) else part
        for name, part in payload.items()
    }
    target.write_text(json.dumps(plain, indent=1) + "\n")
    target.with_suffix(".md").write_text(markdown(plain))


def check(payload: dict[str, Any]) -> int:
    """Print what left its golden number, or its prediction; exit status 1 if anything did."""
    missed = golden.oracle_failures(payload)
    if "oracle" not in payload:
        missed = [str(failure) for failure in golden.check(payload, golden.load(golden.GOLDEN))]
    print("\n".join(missed) or "all within tolerance")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
