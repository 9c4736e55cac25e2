"""`verify --pp`: a pipeline's step against plain autograd over the whole model, on every rank."""

from __future__ import annotations

import argparse
from typing import Any

from overlap.cli.build import make_decoder_chunk, parallel, random_microbatches
from overlap.cli.options import Options, describe
from overlap.cli.parallel_options import leave_together
from overlap.cli.pipeline_options import (
    alone_in_a_group,
    build_pipeline,
    describe_pipeline,
    read_pipeline,
    with_delays,
)
from overlap.cli.report import console, print_json, table
from overlap.engine import Engine
from overlap.parallel.agree import gather
from overlap.parallel.world import World
from overlap.pipelining.controls import PIPELINE_CONTROLS
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.verify import verify_pipeline
from overlap.plan import segments_of
from overlap.verify import Verdict, merged
from recompute.errors import ConfigError


def verify_in_pipeline(options: Options, args: argparse.Namespace, world: World) -> int:
    """Verify and report on rank 0; returns the exit status."""
    settings = read_pipeline(args, options)
    options = with_delays(options, settings)
    if args.control is not None and args.control not in PIPELINE_CONTROLS:
        rule = f"must be one of {', '.join(PIPELINE_CONTROLS)} in a pipeline"
        raise ConfigError(field="control", value=args.control, rule=rule)
    with alone_in_a_group(world):
        pipeline, bench = build_pipeline(options, settings, world, one_by_one=True)
        whole = make_decoder_chunk(options, bench, split_embedding=settings.layout.num_stages > 1)
        reference = parallel(whole, options, one_by_one=True)
        batches = [random_microbatches(options, step) for step in range(args.steps)]
        engine_type: Any = Engine if args.control is None else PIPELINE_CONTROLS[args.control]
        own = verify_pipeline(pipeline, reference, batches, engine_type=engine_type)
        verdicts = gather(world, own)
        facts = gather(world, _facts(pipeline, options.microbatches))
    verdict = merged(verdicts)
    if world.rank == 0:
        payload = {
            **_summary(verdict),
            "gradients": {
                "compared": sum(one.gradients.compared for one in verdicts),
                "different": list(verdict.gradients.different),
            },
            "ranks": [
                {"rank": rank, **each, **_summary(one)}
                for rank, (one, each) in enumerate(zip(verdicts, facts, strict=True))
            ],
            "config": {
                **describe(options),
                **describe_pipeline(settings),
                "steps": args.steps,
                "control": args.control,
            },
        }
        print_json(payload) if options.json else _show(verdict, payload)
    if not verdict.equal:
        leave_together(world)
    return 0 if verdict.equal else 1


def _facts(pipeline: Pipeline, num_microbatches: int) -> dict[str, Any]:
    return {
        "stages": [stage.stage_index for stage in pipeline.stages],
        "segments": [
            [list(segment.layers) for segment in segments_of(chunk.program, chunk.configs(num_microbatches)[0])]
            for chunk in pipeline.chunks
        ],
        "overlapped_pairs": pipeline.schedule(num_microbatches).overlapped,
        "receive_buffers": pipeline.receive_buffers,
    }


def _summary(verdict: Verdict) -> dict[str, Any]:
    return {
        "equal": verdict.equal,
        "loss_equal": verdict.loss_equal,
        "gradients": {"compared": verdict.gradients.compared, "different": list(verdict.gradients.different)},
        "buffers": {"compared": verdict.buffers.compared, "different": list(verdict.buffers.different)},
        "rng_equal": verdict.rng_equal,
        "max_live_segments": verdict.max_live_segments,
    }


def _show(verdict: Verdict, payload: dict[str, Any]) -> None:
    rows = [
        (
            f"rank {each['rank']}", each["stages"], each["overlapped_pairs"], each["gradients"]["compared"],
            len(each["gradients"]["different"]), "[green]equal[/]" if each["equal"] else "[red]different[/]",
        )
        for each in payload["ranks"]
    ]  # fmt: skip
    columns = ("rank", "virtual stages", "overlapped pairs", "gradients", "different", "verdict")
    console.print(table("Pipeline step against plain autograd over the whole model", columns, rows))
    for name in (*verdict.gradients.different, *verdict.buffers.different):
        console.print(f"  differs: {name}")
