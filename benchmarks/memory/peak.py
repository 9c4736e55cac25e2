"""What is alive at a step's highest point: `python -m benchmarks.memory.peak --proxy proxy-8 --arm "te fp8 block"`.

Allocations from before the step (weights, gradients, what libraries keep) are not in it. One line per slot and place in
our source: MiB, number of allocations.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory.cases import PROXIES, Case, hidden
from benchmarks.memory.te import ARMS, BackendBench
from overlap.backends import load_backend
from overlap.memory.snapshot import record_snapshot
from overlap.step import train_step
from recompute import RecomputeConfig

_OURS = ("/overlap/", "/recompute/")
_MIB = 2**20
Event = Mapping[str, Any]


def alive_at_peak(events: Sequence[Event]) -> list[Event]:
    """Allocations that are alive when most bytes are, of those that the events make."""
    highest, last = max((total, -place) for place, total in enumerate(_totals(events)))
    if highest <= 0:
        return []
    live: dict[int, Event] = {}
    for event in events[: 1 - last]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return list(live.values())


def _totals(events: Sequence[Event]) -> Iterator[int]:
    known: dict[int, int] = {}
    total = 0
    for event in events:
        if event["action"] == "alloc":
            known[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= known.pop(event["addr"], 0)
        yield total


def grouped(events: Sequence[Event]) -> list[tuple[int, int, str]]:
    """(bytes, allocations, slot and place) of each group, largest first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for event in events:
        groups[f"{event.get('user_metadata', '')}  {_place(event)}"].append(event["size"])
    return sorted(((sum(sizes), len(sizes), name) for name, sizes in groups.items()), reverse=True)


def _place(event: Event) -> str:
    """The innermost frame of our source."""
    for frame in event["frames"]:
        if any(part in frame["filename"] for part in _OURS):
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "elsewhere"


def main() -> int:
    """Record a step and print the groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--proxy", choices=PROXIES, default="proxy-8")
    parser.add_argument("--arm", choices=ARMS, default="te bf16")
    parser.add_argument("--replay-hidden", action="store_true")
    parser.add_argument("--lines", type=int, default=40)
    args = parser.parse_args()
    if args.arm.startswith("te"):
        # Before torch's first use of cuDNN.
        load_backend("te")
    bench = BackendBench(args.proxy, args.arm)
    one = RecomputeConfig.uniform(1)
    case = Case(proxy=args.proxy, recompute=hidden(one) if args.replay_hidden else one)
    print(bench.measure(case, steps=1))
    chunk = bench.chunk(case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        with record_snapshot(path) as observer:
            train_step(chunk, bench.feeds, observers=(observer,))
        snapshot = pickle.loads(path.read_bytes())
    events = max(snapshot["device_traces"], key=len)
    for nbytes, count, name in grouped(alive_at_peak(events))[: args.lines]:
        print(f"{nbytes / _MIB:9.1f} MiB {count:5d}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
