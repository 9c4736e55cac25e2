"""`train --pp`: a byte-level language model, its layers spread over pipeline stages."""

from __future__ import annotations

import argparse
from dataclasses import replace

from overlap.cli.options import Options
from overlap.cli.pipeline_options import (
    alone_in_a_group,
    build_pipeline,
    describe_pipeline,
    read_pipeline,
    with_delays,
)
from overlap.cli.train import report, run_steps, text_data
from overlap.parallel.world import World
from overlap.pipelining.trainer import PipelineTrainer
from overlap.training.text import VOCAB
from recompute.errors import ConfigError


def train_in_pipeline(options: Options, args: argparse.Namespace, world: World) -> int:
    """Train, and report on rank 0; returns the exit status."""
    for name in ("save", "resume"):
        if getattr(args, name) is not None:
            raise ConfigError(field=name, value=getattr(args, name), rule="one file holds a model that is not cut")
    settings = read_pipeline(args, options)
    options = with_delays(replace(options, model=replace(options.model, vocab=VOCAB)), settings)
    with alone_in_a_group(world):
        pipeline, _ = build_pipeline(options, settings, world)
        trainer = PipelineTrainer(
            pipeline, text_data(options, args.text), learning_rate=args.lr, per_token=options.model.per_token_loss
        )
        reports = run_steps(trainer, args.steps)
    if world.rank == 0:
        report(options, args, reports, describe_pipeline(settings))
    return 0
