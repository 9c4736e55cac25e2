"""The picture of a pipeline's run: a row per rank, a bar per step, coloured by what it does, shaded by chunk."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from overlap.pipeline_model.actions import Step, Work, step_text
from overlap.pipeline_model.run import PipelineRun

_PAIR = "FB"
_COLOURS = {"F": "#7fb8e6", "B": "#7cc29a", "I": "#9fd0b4", "W": "#dcc6ee", _PAIR: "#f0b55a"}
_LABELS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
           _PAIR: "forward beside backward"}  # fmt: skip
_LIGHTER = 0.45
"""How far the colour of a rank's later virtual stages goes to white."""
_NARROWEST_LABEL = 0.015
"""Share of the picture's width below which a bar carries no name."""
_HEIGHT = 0.9
_MOST_EDGED = 300
"""Bars of a row from which on they have no edges."""


def draw_pipeline(run: PipelineRun, path: Path, *, start: float = 0.0, end: float | None = None) -> None:
    """Draw a run.

    Args:
        run: What to draw.
        path: Of the PNG.
        start: Where the picture begins, in milliseconds.
        end: Where it ends; None: with the run.
    """
    last = run.milliseconds if end is None else end
    figure = Figure(figsize=(15, 1.2 + 0.28 * max(4, len(run.ranks))), dpi=130, layout="constrained")
    axes = figure.subplots()
    used = {work for rank in range(len(run.ranks)) for work in _draw_rank(axes, run, rank, start, last)}
    axes.set_yticks(range(len(run.ranks)), [f"rank {rank}" for rank in range(len(run.ranks))], fontsize=7)
    axes.set_xlim(start, last)
    axes.set_ylim(len(run.ranks) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{run.schedule.name}: {run.milliseconds:.1f} ms, bubble {run.bubble_share:.1%}", loc="left", fontsize=9,
        fontweight="bold",
    )  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=_COLOURS[work], label=label) for work, label in _LABELS.items() if work in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.savefig(path)


def _draw_rank(axes: Axes, run: PipelineRun, rank: int, start: float, end: float) -> set[str]:
    """Draw one row; returns the kinds of work in it."""
    bars: list[tuple[float, float]] = []
    colours: list[tuple[float, float, float]] = []
    used: set[str] = set()
    for step, (left, right) in zip(run.schedule.ranks[rank], run.placed[rank], strict=True):
        left, right = max(left, start), min(right, end)
        if right <= left:
            continue
        used.add(_kind(step))
        bars.append((left, right - left))
        colours.append(_colour(step, len(run.ranks)))
        if right - left > _NARROWEST_LABEL * (end - start):
            text = step_text(step).replace(";", "\n")
            axes.text((left + right) / 2, rank, text, ha="center", va="center", fontsize=5, clip_on=True)
    # Edges would hide bars that are narrower than they are.
    edge = 0.2 if len(bars) < _MOST_EDGED else 0.0
    axes.broken_barh(bars, (rank - _HEIGHT / 2, _HEIGHT), facecolors=colours, edgecolor="white", linewidth=edge)
    return used


def _kind(step: Step) -> str:
    return "".join(action.work.value for action in step)


def _colour(step: Step, ranks: int) -> tuple[float, float, float]:
    red, green, blue = to_rgb(_COLOURS[_kind(step)])
    forward = next((action for action in step if action.work is Work.FORWARD), step[0])
    share = _LIGHTER if forward.stage // ranks % 2 else 0.0
    return red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share
