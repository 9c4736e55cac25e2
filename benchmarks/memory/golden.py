"""Golden numbers: a committed result file, and by how much a new run may differ before the benchmark fails."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
GOLDEN = RESULTS / "graph_2026-11-30.json"
"""Times. Peaks are checked against their predictions, by the suite `oracle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a figure may be from its golden number."""

    field: str
    above: float = 0.0
    """Largest share above it."""
    below: float = 1.0
    """Largest share below it; 1: it may be any less."""
    only: str = ""
    """Part of the names of the cases that it is for; empty: all."""
    margin: float = 0.0
    """How much more on either side, in the figure's own unit: for those that may be near nothing."""


TOLERANCES: tuple[Tolerance, ...] = (
    # The allocator is deterministic: an unexplained gain is a mistake of the benchmark, too.
    Tolerance(field="activation_peak", above=0.02, below=0.02),
    Tolerance(field="reserved", above=0.05),
    # Launched one by one, a step takes as long as the host does, and hosts differ by a factor of two.
    Tolerance(field="step", above=0.08, only="CUDA graph"),
    Tolerance(field="of_bound", above=0.02, only="CUDA graph"),
    Tolerance(field="of_plain", above=0.03, only="CUDA graph"),
    # Of a few milliseconds, by events of their own: 2.8 and 7.6 % of the same case in two runs.
    Tolerance(field="replay_exposed_share", margin=0.05, only="CUDA graph"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A figure outside its tolerance."""

    part: str
    case: str
    field: str
    golden: float
    found: float

    def __str__(self) -> str:
        """Print for people."""
        return f"{self.part}: {self.case}: {self.field} {self.found:.4g}, golden {self.golden:.4g}"


Payload = Mapping[str, Any]


def load(path: Path) -> Payload:
    """Read a result file."""
    payload: Payload = json.loads(path.read_text(encoding="utf-8"))
    return payload


def rows_of(payload: Payload) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The rows of a result file by (part, case name); the scale of a wire is calibrated in each run and left out."""
    parts = ((name, rows) for name, rows in payload.items() if isinstance(rows, list))
    return {(name, _case(str(row["name"]), place)): row for name, rows in parts for place, row in enumerate(rows)}


def check(payload: Payload, golden: Payload, tolerances: Sequence[Tolerance] = TOLERANCES) -> list[Failure]:
    """Compare the rows that both files have.

    Raises:
        ValueError: They share no row: the check would check nothing.
    """
    found, wanted = rows_of(payload), rows_of(golden)
    shared = [key for key in found if key in wanted]
    if not shared:
        raise ValueError("the run and the golden file have no case in common; for peaks, use --suite oracle --check")
    return [failure for key in shared for failure in _failures(key, found[key], wanted[key], tolerances)]


def oracle_failures(payload: Payload) -> list[str]:
    """Cases of the suite `oracle` whose prediction misses by more than its tolerance."""
    return [str(row["name"]) for row in payload.get("oracle", ()) if not row["within"]]


def _failures(
    key: tuple[str, str], found: Mapping[str, Any], golden: Mapping[str, Any], tolerances: Sequence[Tolerance]
) -> Iterator[Failure]:
    for tolerance in tolerances:
        name = tolerance.field
        if not golden.get(name) or name not in found or tolerance.only not in str(golden["name"]):
            continue
        low = golden[name] * (1 - tolerance.below) - tolerance.margin
        high = golden[name] * (1 + tolerance.above) + tolerance.margin
        if not low <= found[name] <= high:
            yield Failure(part=key[0], case=key[1], field=name, golden=golden[name], found=found[name])


def _case(name: str, place: int) -> str:
    case, separator, _ = name.partition("_loopback x")
    return f"{place}: {case}" if separator else name
