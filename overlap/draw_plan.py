"""Pictures of plans: memory against time of every choice, and the peak over the group size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from recompute.planner import Candidate, Decision

_GIB = 2**30
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130}
_LINE = 0.035
"""Height of a name, as a share of the picture's."""
_ROOM = 0.35
"""Width left for names at the right, as a share of the points'."""
_BLUE, _GREY, _ORANGE, _RED = "#2a6fb0", "#b9c0c8", "#e8a33d", "#c0392b"


def draw_frontier(decision: Decision, path: Path) -> None:
    """Draw every choice as a point, the frontier as a line, the budget as a bound."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.subplots()
        for candidate in decision.candidates:
            colour = _BLUE if candidate.peak <= decision.budget else _GREY
            axes.plot(candidate.peak / _GIB, candidate.milliseconds / 1e3, "o", color=colour, markersize=5)
        line = [(c.peak / _GIB, c.milliseconds / 1e3) for c in decision.frontier]
        axes.plot(*zip(*line, strict=True), color=_ORANGE, linewidth=1.4, label="frontier")
        for candidate in _labelled(decision):
            place = (candidate.peak / _GIB, candidate.milliseconds / 1e3)
            weight = "bold" if candidate is decision.fastest else "normal"
            axes.plot(*place, "o", color=_ORANGE, markersize=6)
            axes.annotate(
                str(candidate.choice), place, (7, 3), textcoords="offset points", fontsize=7, fontweight=weight
            )
        axes.axvline(decision.budget / _GIB, color=_RED, linewidth=1, linestyle="--", label="budget")
        axes.set_xscale("log")
        low, high = (end(c.peak for c in decision.candidates) / _GIB for end in (min, max))
        axes.set_xlim(low / 1.08, high * (high / low) ** _ROOM)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("predicted peak of the fullest rank (GiB)")
        axes.set_ylabel("predicted step (s)")
        axes.set_title("Memory against time, by recompute setting", loc="left", fontweight="bold")
        axes.legend(frameon=False)
        figure.savefig(path)


def _labelled(decision: Decision) -> list[Candidate]:
    """Of the frontier, the fastest that fits, its ends, and others as far as their names have room."""
    frontier = sorted(decision.frontier, key=lambda c: c.milliseconds)
    room = _LINE * max(c.milliseconds for c in decision.candidates) - _LINE * frontier[0].milliseconds
    chosen = [c for c in frontier if c is decision.fastest or c is frontier[0] or c is frontier[-1]]
    for candidate in frontier:
        if all(abs(candidate.milliseconds - other.milliseconds) >= room for other in chosen):
            chosen.append(candidate)
    return chosen


def draw_curve(groups: Sequence[int], lines: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Draw peaks over the group size.

    Args:
        groups: Layers of a segment.
        lines: Bytes per group size, by label; the first is drawn widest, so that equal lines can be seen.
        title: Of the picture.
        path: Of the PNG.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for place, (label, values) in enumerate(lines.items()):
            width = 1.4 + 2.4 * (len(lines) - 1 - place)
            colour = (_BLUE, _ORANGE, _GREY)[place % 3]
            axes.plot(range(len(groups)), [v / 2**20 for v in values], "o-", color=colour, linewidth=width, label=label)
        axes.set_xticks(range(len(groups)), [str(group) for group in groups])
        axes.set_xlabel("layers of a segment (k)")
        axes.set_ylabel("peak (MiB)")
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.legend(frameon=False)
        figure.savefig(path)
