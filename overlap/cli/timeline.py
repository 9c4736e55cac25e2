"""`timeline`: a Chrome/Perfetto trace and a picture of lanes or pipeline ranks; a recorded run below the simulation."""

from __future__ import annotations

import argparse
import json
from typing import Any

from overlap.cli.folders import folder_at
from overlap.cli.modelled import Modelled, add_options, describe, read_modelled
from overlap.cli.pipeline_model_options import (
    Pipeline,
    add_pipeline_options,
    default_layers,
    pipeline_payload,
    read_pipeline,
    simulate_pipeline,
)
from overlap.cli.pipeline_model_report import check_ends, show_pipeline, write_pipeline
from overlap.cli.report import console, print_json
from overlap.draw_timeline import draw_timelines
from overlap.recordings import load_recording
from overlap.steady import measure_step
from overlap.timeline import chrome_trace
from recompute.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "timeline",
        help="a trace and a picture of a step's lanes, in a model",
        description="Simulate a step and write OUT/timeline.json (open it in ui.perfetto.dev) and OUT/timeline.png.",
    )
    add_options(parser)
    add_pipeline_options(parser)
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for the files (default out)")
    parser.add_argument(
        "--recorded", metavar="FILE", help="a recorded run's trace (TRACE#N: one of several), drawn below"
    )
    parser.add_argument("--from-ms", type=float, default=0.0, metavar="MS", help="where the picture begins (default 0)")
    parser.add_argument("--to-ms", type=float, metavar="MS", help="where it ends (default: with the step)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate, write, draw; returns the exit status."""
    modelled = read_modelled(args, default_layers(args))
    pipeline = read_pipeline(args, modelled)
    if pipeline is not None:
        return _run_pipeline(args, modelled, pipeline)
    recorded = () if args.recorded is None else load_recording("recorded", args.recorded)
    simulated = measure_step(modelled.system, modelled.microbatches, modelled.queues)
    timelines = (simulated, *recorded)
    last = max(timeline.end for timeline in timelines) if args.to_ms is None else args.to_ms
    check_ends(args.from_ms, last)
    out = folder_at("out", args.out)
    trace, picture = out / "timeline.json", out / "timeline.png"
    trace.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
    draw_timelines(timelines, picture, start=args.from_ms, end=last)
    payload = {
        "milliseconds": {timeline.name: timeline.end for timeline in timelines},
        "trace": str(trace),
        "picture": str(picture),
        "config": describe(modelled),
    }
    if args.json:
        print_json(payload)
    else:
        for timeline in timelines:
            console.print(f"{timeline.name}: {timeline.end:.2f} ms")
        console.print(f"trace: {trace}, picture: {picture}")
    return 0


def _run_pipeline(args: argparse.Namespace, modelled: Modelled, pipeline: Pipeline) -> int:
    if args.recorded is not None:
        raise ConfigError(field="recorded", value=args.recorded, rule="has no effect with --pp")
    simulated = simulate_pipeline(modelled, pipeline)
    written = write_pipeline(simulated.run, folder_at("out", args.out), args.from_ms, args.to_ms)
    payload = {**pipeline_payload(modelled, pipeline, simulated), **written}
    if args.json:
        print_json(payload)
    else:
        show_pipeline(payload)
        console.print(f"trace: {written['trace']}, picture: {written['picture']}")
    return 0
