"""Pictures of a comparison of recompute rules: loss curves and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlap.memory.bins import Bin, Usage
from overlap.memory.profile import Profile

_MIB = 2**20
BIN_COLOURS = {
    Bin.SEGMENT_INPUTS: "#2a6fb0",
    Bin.PINNED_ROUTING: "#7fb8e6",
    Bin.PENDING_WGRAD: "#9467bd",
    Bin.LIVE_SEGMENT: "#e8a33d",
    Bin.RNG_STATES: "#333333",
    Bin.REST: "#b9c0c8",
}
BIN_LABELS = {
    Bin.SEGMENT_INPUTS: "segment inputs",
    Bin.PINNED_ROUTING: "pinned routing",
    Bin.PENDING_WGRAD: "pending weight gradients",
    Bin.LIVE_SEGMENT: "live segment",
    Bin.RNG_STATES: "generator states",
    Bin.REST: "eager graphs, temporaries, gradients",
}
STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """One recompute rule, trained and profiled."""

    name: str
    losses: tuple[float, ...]
    """Per step."""
    milliseconds: float
    """Median step."""
    profile: Profile


def draw_losses(results: Sequence[RuleResult], path: Path) -> None:
    """Draw the loss curve of every rule, each line over the one before, and their differences."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.8), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        for place, result in enumerate(results):
            # Equal curves hide each other: the later ones are drawn thinner, so that all can be seen.
            width = 1.2 + 2.2 * (len(results) - 1 - place)
            colour = f"C{place}"
            upper.plot(result.losses, color=colour, linewidth=width, label=result.name)
            gaps = [abs(a - b) for a, b in zip(result.losses, results[0].losses, strict=True)]
            lower.plot(gaps, color=colour, linewidth=width)
        largest = max(abs(a - b) for result in results for a, b in zip(result.losses, results[0].losses, strict=True))
        verdict = "the same to the bit" if largest == 0 else f"largest difference {largest:.2e}"
        upper.set_title(f"Training on text under each recompute rule: {verdict}", loc="left", fontweight="bold")
        upper.set_ylabel("loss (nats per byte)")
        upper.legend(frameon=False)
        lower.set_ylabel("difference\nfrom none")
        lower.set_ylim(-0.1 * max(largest, 1e-9), 1.1 * max(largest, 1e-9))
        lower.set_yticks([0, largest] if largest else [0])
        lower.set_xlabel("step")
        figure.savefig(path)


def draw_memory(results: Sequence[RuleResult], path: Path) -> None:
    """Draw what is alive at each rule's peak, the prediction beside it, and memory over the slots of a step."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
        _peaks(upper, results)
        _curves(lower, results)
        figure.savefig(path)


def _peaks(axes: Axes, results: Sequence[RuleResult]) -> None:
    for place, result in enumerate(results):
        at_peak = _peak_bytes(result.profile.measured)
        bottom = 0.0
        for kind in Bin:
            height = at_peak[kind] / _MIB
            axes.bar(place, height, 0.6, bottom=bottom, color=BIN_COLOURS[kind], edgecolor="white", linewidth=0.5)
            bottom += height
        predicted = result.profile.predicted.total / _MIB
        axes.plot([place - 0.38, place + 0.38], [predicted] * 2, color="black", linewidth=1.6)
        axes.annotate(f"{bottom:.1f} MiB", (place, bottom), (0, 4), textcoords="offset points", ha="center")
    for kind in Bin:
        if any(_peak_bytes(result.profile.measured)[kind] for result in results):
            axes.bar(0, 0, color=BIN_COLOURS[kind], label=BIN_LABELS[kind])
    axes.plot([], [], color="black", linewidth=1.6, label="predicted peak")
    axes.set_xticks(range(len(results)), [result.name for result in results])
    axes.set_ylabel("live at the peak (MiB)")
    axes.set_title("Activation memory of one step, by recompute rule", loc="left", fontweight="bold")
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper right")


def _curves(axes: Axes, results: Sequence[RuleResult]) -> None:
    for place, result in enumerate(results):
        totals = [border.total / _MIB for border in result.profile.measured.curve]
        # Replays add slots: each step is stretched to the same width.
        share = [index / max(len(totals) - 1, 1) for index in range(len(totals))]
        axes.plot(share, totals, color=f"C{place}", linewidth=1.1, label=result.name)
    axes.set_xlabel("share of the step's slots")
    axes.set_ylabel("live (MiB)")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=len(results), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def _peak_bytes(usage: Usage) -> dict[Bin, int]:
    """Bytes of each kind at the slot where the total is highest."""
    border = max(usage.curve, key=lambda border: border.total)
    return dict(border.bytes)
