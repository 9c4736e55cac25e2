"""`plan --pp`: what every pipeline rank holds: stages, layers, segments, pairs, microbatches in flight."""

from __future__ import annotations

import argparse
from typing import Any

from overlap.cli.options import Options, describe
from overlap.cli.pipeline_options import PipelineOptions, describe_pipeline, read_pipeline
from overlap.cli.report import console, print_json, table
from overlap.pipelining.in_flight import in_flight
from overlap.pipelining.schedules import count_pairs, make_orders
from recompute.segments import plan_segments


def plan_pipeline(options: Options, args: argparse.Namespace) -> int:
    """Plan and report; needs one process only. Returns the exit status."""
    settings = read_pipeline(args, options)
    layout = settings.layout
    orders = make_orders(settings.kind, layout, options.microbatches)
    held = in_flight(orders)
    payload = {
        "stages": [
            {
                "stage": stage,
                "rank": layout.rank_of(stage),
                "layers": list(layout.layers_of(stage)),
                "segments": _segments(options, settings, stage),
                "in_flight": held.stages[stage],
            }
            for stage in range(layout.num_stages)
        ],
        "ranks": [
            {
                "rank": rank,
                "in_flight": held.ranks[rank],
                "put_off": held.waiting[rank],
                "overlapped_pairs": count_pairs(orders[rank]),
            }
            for rank in range(layout.pp)
        ],
        "config": {**describe(options), **describe_pipeline(settings)},
    }
    print_json(payload) if options.json else _show(payload)
    return 0


def _segments(options: Options, settings: PipelineOptions, stage: int) -> list[list[int]]:
    """The segments of a stage, by layer numbers of the whole model (R1: the rule counts within the stage)."""
    layers = settings.layout.layers_of(stage)
    depths = options.model.mtp if stage == settings.layout.num_stages - 1 else 0
    segments = plan_segments(len(layers), depths, options.recompute)
    return [[layers.start + layer for layer in segment.layers] for segment in segments]


def _show(payload: dict[str, Any]) -> None:
    stages = [
        (each["stage"], each["rank"], each["layers"], each["segments"], each["in_flight"]) for each in payload["stages"]
    ]
    columns = ("virtual stage", "rank", "layers", "segments", "most in flight")
    console.print(table("Virtual stages", columns, stages))
    ranks = [(each["rank"], each["in_flight"], each["put_off"], each["overlapped_pairs"]) for each in payload["ranks"]]
    of_ranks = ("rank", "most in flight", "most weight gradients put off", "overlapped pairs")
    console.print(table("Ranks", of_ranks, ranks))
