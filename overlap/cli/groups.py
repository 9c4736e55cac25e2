"""`profile --oracle --groups`: the peak over the group size: predicted, measured, and by the textbook formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from overlap.cli.build import build_chunk, random_microbatches
from overlap.cli.folders import folder_at
from overlap.cli.options import Options, describe
from overlap.cli.report import console, num_bytes, print_json, table
from overlap.draw_plan import draw_curve
from overlap.memory.fake import fake_chunk
from overlap.memory.formula import formula
from overlap.memory.oracle import highest_of, measure_peak
from overlap.memory.predict import footprints_of
from recompute.config import RecomputeConfig
from recompute.errors import ConfigError

EQUAL, DIFFERENT = 0, 1


def read_groups(text: str) -> tuple[int, ...]:
    """Group sizes from `1,2,4`.

    Raises:
        ConfigError: They are no positive integers.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(field="groups", value=text, rule="must be layers of a segment with commas between, as 1,2,4")
    return tuple(int(part) for part in parts)


def run_groups(options: Options, groups: tuple[int, ...], out: str | None) -> int:
    """Predict, measure, compare, draw; exit status 1 if a prediction is not the measurement."""
    folder = None if out is None else folder_at("out", out)
    rows = _rows(options, groups)
    pictures = []
    if folder is not None:
        pictures.append(str(folder / "groups.png"))
        lines = {name: [row[name] for row in rows] for name in ("measured", "predicted", "formula")}
        title = f"Peak of a step of {options.model.layers} layers over the layers of a segment"
        draw_curve(groups, lines, title, folder / "groups.png")
    equal = all(row["predicted"] == row["measured"] for row in rows)
    payload = {"groups": rows, "equal": equal, "pictures": pictures, "config": describe(options)}
    if options.json:
        print_json(payload)
    else:
        cells = [(row["group"], *(num_bytes(row[n]) for n in ("measured", "predicted", "formula"))) for row in rows]
        console.print(
            table("Peak of a step, bytes", ("layers of a segment", "measured", "predicted", "formula"), cells)
        )
        for picture in pictures:
            console.print(f"picture: {picture}")
    return EQUAL if equal else DIFFERENT


def _rows(options: Options, groups: tuple[int, ...]) -> list[dict[str, Any]]:
    feeds = random_microbatches(options, 0)
    with fake_chunk(partial(build_chunk, options)) as chunk:
        footprints = footprints_of(chunk, feeds, constants=True)
    rows = []
    for group in groups:
        rule = RecomputeConfig.uniform(group, replay=options.recompute.replay)
        chunk = build_chunk(replace(options, recompute=rule))
        rows.append({
            "group": group,
            "measured": measure_peak(chunk, feeds),
            "predicted": highest_of(chunk, footprints).bytes,
            "formula": formula(chunk, footprints[0], len(feeds)).total,
        })  # fmt: skip
    return rows
