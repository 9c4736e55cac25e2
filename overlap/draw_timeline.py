"""Pictures of timelines: a band per lane, a bar per slot, one timeline above the other on the same scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from overlap.ir import Op
from overlap.timeline import Timeline

_COLOURS = {
    Op.FORWARD: "#7fb8e6",
    Op.NO_GRAD: "#7fb8e6",
    Op.REPLAY: "#f0b55a",
    Op.BACKWARD: "#7cc29a",
    Op.WGRAD: "#c3e3d0",
    Op.CALL: "#b9c0c8",
}
_LABELS = {Op.FORWARD: "forward", Op.REPLAY: "replay", Op.BACKWARD: "backward", Op.WGRAD: "weight gradient"}
_HEIGHT = 0.8
_NARROWEST_LABEL = 0.03
"""Share of the picture's width below which a bar carries no name."""


def draw_timelines(timelines: Sequence[Timeline], path: Path, *, start: float = 0.0, end: float | None = None) -> None:
    """Draw timelines one above the other.

    Args:
        timelines: At least one; all start at 0.
        path: Of the PNG.
        start: Where the picture begins, in milliseconds.
        end: Where it ends; None: with the longest timeline.
    """
    last = max(timeline.end for timeline in timelines) if end is None else end
    figure = Figure(figsize=(15, 0.9 + 1.5 * len(timelines)), dpi=130, layout="constrained")
    rows = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline in zip(rows, timelines, strict=True):
        _draw(axes, timeline, start, last)
    rows[-1].set_xlabel("milliseconds")
    handles = [Patch(color=_COLOURS[op], label=label) for op, label in _LABELS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.savefig(path)


def _draw(axes: Axes, timeline: Timeline, start: float, end: float) -> None:
    lanes = timeline.lanes[::-1]
    for row, lane in enumerate(lanes):
        for span in timeline.on(lane):
            if span.end > start and span.start < end and span.end > span.start:
                left, right = max(span.start, start), min(span.end, end)
                axes.barh(
                    row, right - left, _HEIGHT, left, color=_COLOURS[span.slot.op], edgecolor="white", linewidth=0.4
                )
                if right - left > _NARROWEST_LABEL * (end - start):
                    text = _text(span.slot.op, span.slot.stage, span.slot.layer)
                    axes.text((left + right) / 2, row, text, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axes.set_xlim(start, end)
    axes.set_title(timeline.name, loc="left", fontsize=9, fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _text(op: Op, stage: str, layer: int | None) -> str:
    where = "" if layer is None else f"\n{layer}"
    return f"{'F' if op is Op.NO_GRAD else op.value}.{stage}{where}"
