"""`plan`: what a run's schedule looks like: segments, slots, and what each segment keeps."""

from __future__ import annotations

import argparse
from typing import Any

from overlap.chunk import ModelChunk
from overlap.cli.budget import add_budget_options, refuse_out, run_budget
from overlap.cli.build import build_chunk
from overlap.cli.job_options import SHARED, add_job_options, refuse_job_options, share_with_job
from overlap.cli.options import Options, add_shared_options, describe, read_options
from overlap.cli.pipeline_options import add_pipeline_options, wants_pipeline
from overlap.cli.pipeline_plan import plan_pipeline
from overlap.cli.report import console, print_json, table
from overlap.ir import WEIGHTS, Schedule
from overlap.memory.gap import slot_text
from overlap.plan import PlanRequest
from overlap.side import Side
from overlap.step import step_plans
from overlap.verify import step_facts


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "plan",
        help="show segments, slots and what each segment keeps",
        description="Show what a step will issue, without running it.",
    )
    add_shared_options(parser)
    add_pipeline_options(parser)
    add_job_options(parser, shared=SHARED)
    add_budget_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and report; returns the exit status."""
    options = read_options(args)
    if args.budget is not None:
        share_with_job(args)
        return run_budget(args, options)
    refuse_job_options(args, "has no effect without --budget")
    refuse_out(args)
    if wants_pipeline(args):
        return plan_pipeline(options, args)
    chunk = build_chunk(options)
    facts = step_facts(chunk, options.microbatches)
    trained = chunk.program.trained()
    side = chunk.planner.side(options.recompute, trained)
    schedule = chunk.planner.schedule(PlanRequest(options.recompute, options.recompute, trained))
    payload = {
        "segments": [
            {"layers": list(segment.layers), **_kept(chunk, side, index, options)}
            for index, segment in enumerate(side.segments)
        ],
        "rebuilt": _rebuilt(side),
        "slots": dict(facts.slots),
        "replayed_a2a": facts.replayed_a2a,
        "replayed_a2a_per_layer": facts.replayed_a2a_per_layer,
        "order": str(chunk.order),
        "pair": [str(slot) for slot in schedule],
        "config": describe(options),
    }
    if options.lead:
        payload["first_plan"] = _first_plan(chunk, options.microbatches)
    if options.json:
        print_json(payload)
    else:
        _show(payload, schedule)
    return 0


def _first_plan(chunk: ModelChunk, microbatches: int) -> list[str]:
    """What a step with a lead issues first, by the microbatches' numbers in the step."""
    plan, numbers = step_plans(chunk, microbatches)[0]
    return [slot_text(issue, numbers[issue.slot.microbatch]) for issue in plan.issues]


def _kept(chunk: ModelChunk, side: Side, index: int, options: Options) -> dict[str, list[str]]:
    """What one segment keeps from its first pass for its replay and its adjoints; weights are kept anyway."""
    program = chunk.program
    survivors = {name for name, _ in chunk.planner.survivors(options.recompute, side.trained)}
    stages = [stage for layer in side.segments[index].layers for stage in program.layer_stages[layer]]
    pinned = [value for stage in stages for value in stage.pins if value in survivors]
    read = {value for stage in stages if stage.key in side.replay_needed for value in stage.reads}
    weights = {value for stage in program.stages if stage.key == (None, WEIGHTS) for value in stage.writes}
    kept = (read & survivors) - weights
    live_ins = [value for value in program.live_ins(side.segments[index].layers) if value in kept]
    fed = [value for value in live_ins if value not in program.producers]
    replayed = [stage.label for stage in stages if stage.key in side.replay_needed]
    return {"inputs": live_ins, "fed": fed, "pinned": pinned, "replayed": replayed}


def _rebuilt(side: Side) -> dict[str, list[str]]:
    """Per stage outside segments that is rebuilt, itself or what is rebuilt inside it."""
    by_key = side.program.by_key
    whole = {by_key[key].label: [by_key[key].name] for key in side.alone}
    parts = {by_key[key].label: sorted(map(str, modules)) for key, modules in side.parts.items()}
    return {**parts, **whole}


def _show(payload: dict[str, Any], schedule: Schedule) -> None:
    rows = [
        (
            " ".join(map(str, segment["layers"])),
            ", ".join(value + " (fed)" * (value in segment["fed"]) for value in segment["inputs"]),
            ", ".join(segment["pinned"]),
            " ".join(segment["replayed"]),
        )
        for segment in payload["segments"]
    ]
    rebuilt = [(label, ", ".join(names)) for label, names in payload["rebuilt"].items()]
    if rebuilt:
        console.print(table("Rebuilt outside segments", ("stage", "what"), rebuilt))
    if rows:
        console.print(table("Segments", ("layers", "inputs kept", "pinned", "replayed stages"), rows))
    elif not rebuilt:
        console.print("No segment: every layer keeps its activations.")
    slots = "  ".join(f"{op} {count}" for op, count in payload["slots"].items())
    console.print(f"slots of a step: {slots}; replayed all-to-alls: {payload['replayed_a2a']}")
    console.print("[bold]Issue order of one pair[/] (1: the microbatch that runs forward, 0: backward)")
    console.print("  " + " ".join(str(slot) for slot in schedule), soft_wrap=False, highlight=False)
    if "first_plan" in payload:
        console.print("[bold]Issue order of the first plan[/] (0, 1: the first and the second microbatch)")
        console.print("  " + " ".join(payload["first_plan"]), soft_wrap=False, highlight=False)
