"""Curve: live bytes by kind at every slot border of a step, as a picture and as one interactive page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from overlap.draw import BIN_COLOURS, BIN_LABELS, STYLE
from overlap.memory.bins import Bin, Border, Usage

_MIB = 2**20
_PAGE = Path(__file__).with_name("curve.html")
"""The page without its data: plain SVG and a few lines of JavaScript, nothing loaded from elsewhere."""
_PLACE = "/*DATA*/"


def draw_curve_png(usage: Usage, path: Path, title: str) -> None:
    """Draw the kinds stacked, one place per slot."""
    kinds = _used(usage.curve)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots()
        places = range(len(usage.curve))
        layers = [[border.bytes[kind] / _MIB for border in usage.curve] for kind in kinds]
        if layers:
            colours = [BIN_COLOURS[kind] for kind in kinds]
            axes.stackplot(places, *layers, labels=[BIN_LABELS[k] for k in kinds], colors=colours, step="mid")
            axes.legend(frameon=False, loc="upper left", fontsize=8)
        top = max(places, key=lambda place: usage.curve[place].total)
        axes.annotate(
            f"{usage.curve[top].slot}: {usage.curve[top].total / _MIB:,.2f} MiB",
            (top, usage.curve[top].total / _MIB), (0, 6), textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
        axes.margins(x=0, y=0.15)
        axes.set_xlabel("slot, in issue order")
        axes.set_ylabel("live (MiB)")
        axes.set_title(title, loc="left", fontweight="bold")
        figure.savefig(path)


def write_curve_html(usage: Usage, path: Path, title: str) -> None:
    """Write a self-contained page: the curve, and what each slot holds where the pointer is."""
    kinds = _used(usage.curve)
    data = {
        "title": title,
        "kinds": [{"label": BIN_LABELS[kind], "colour": BIN_COLOURS[kind]} for kind in kinds],
        "slots": [border.slot for border in usage.curve],
        "bytes": [[border.bytes[kind] for border in usage.curve] for kind in kinds],
    }
    # Inside a script element, "</" would end it.
    text = json.dumps(data).replace("</", "<\\/")
    path.write_text(_PAGE.read_text(encoding="utf-8").replace(_PLACE, text), encoding="utf-8")


def _used(curve: Sequence[Border]) -> list[Bin]:
    return [kind for kind in Bin if any(border.bytes[kind] for border in curve)]
