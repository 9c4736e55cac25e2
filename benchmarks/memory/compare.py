"""Two result files side by side: every figure that both have, and the ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.memory.golden import TOLERANCES, Payload, load, rows_of
from overlap.cli.report import table

FIELDS: Sequence[str] = (*(tolerance.field for tolerance in TOLERANCES), "predicted_peak", "host_us_per_slot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure in both files."""

    part: str
    case: str
    field: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.second / self.first


def ratios(first: Payload, second: Payload) -> list[Ratio]:
    """The figures that both files have; one that is 0 in the first file was not measured there."""
    one, two = rows_of(first), rows_of(second)
    return [
        Ratio(part=key[0], case=key[1], field=name, first=row[name], second=two[key][name])
        for key, row in one.items()
        if key in two
        for name in FIELDS
        if row.get(name) and name in two[key]
    ]


def show(first: Path, second: Path) -> int:
    """Print the ratios; exit status 1 if the files have no figure in common."""
    found = ratios(load(first), load(second))
    rows = [(f"{r.part}: {r.case}", r.field, f"{r.first:.4g}", f"{r.second:.4g}", f"{r.ratio:.3f}") for r in found]
    title = f"{first.name} against {second.name}"
    Console().print(table(title, ("case", "figure", first.stem, second.stem, "ratio"), rows))
    return 0 if found else 1
