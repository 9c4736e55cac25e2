"""`profile --curve`: memory over the slots of a step as a picture and a page; on a GPU a snapshot, tagged by slot."""

from __future__ import annotations

import argparse
from pathlib import Path

from overlap.cli.build import build_chunk, random_microbatches
from overlap.cli.options import Options
from overlap.draw_curve import draw_curve_png, write_curve_html
from overlap.memory.bins import Usage
from overlap.memory.snapshot import record_snapshot
from overlap.step import train_step
from recompute.errors import ConfigError


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    text = "write curve.png and curve.html (memory by kind at every slot) there; on a GPU also snapshot.pickle, each "
    text += "allocation tagged with its slot, for pytorch.org/memory_viz"
    parser.add_argument("--curve", metavar="DIR", help=text)


def refuse_curve(args: argparse.Namespace) -> None:
    """Refuse a curve of a step that is not run.

    Raises:
        ConfigError: One is asked for.
    """
    if args.curve is not None:
        raise ConfigError(field="curve", value=args.curve, rule="has no effect with --oracle")


def write_curves(usage: Usage, options: Options, folder: Path) -> list[str]:
    """Write the files; returns their names.

    Args:
        usage: Of a measured step.
        options: Of the same step: a snapshot runs it again.
        folder: Is there.
    """
    title = f"Memory of a step: {options.recompute}, order {options.order}, {options.device}"
    draw_curve_png(usage, folder / "curve.png", title)
    write_curve_html(usage, folder / "curve.html", title)
    names = ["curve.png", "curve.html"]
    if options.device != "cpu":
        chunk, feeds = build_chunk(options), random_microbatches(options, 0)
        train_step(chunk, feeds)
        with record_snapshot(folder / "snapshot.pickle") as observer:
            train_step(chunk, feeds, observers=(observer,))
        names.append("snapshot.pickle")
    return [str(folder / name) for name in names]
