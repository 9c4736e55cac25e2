"""The option to launch steps as CUDA graphs."""

from __future__ import annotations

import argparse

from overlap.cli.options import Options
from overlap.cli.pipeline_options import wants_pipeline
from overlap.cuda_graph import WARM_UP
from recompute.errors import ConfigError

PLAIN_STEPS, GRAPH_STEPS = 2, WARM_UP + 3


def add_graph_option(parser: argparse.ArgumentParser) -> None:
    """Add it to the parser of a command that runs steps."""
    parser.add_argument(
        "--cuda-graph",
        action="store_true",
        help=f"record the step after {WARM_UP} as a CUDA graph and launch that from then on",
    )


def check_graph(args: argparse.Namespace, options: Options) -> None:
    """Refuse the option where there is nothing to record.

    Raises:
        ConfigError: Names the rule.
    """
    if not args.cuda_graph:
        return
    if wants_pipeline(args):
        raise ConfigError(field="cuda_graph", value=True, rule="a pipeline's steps run as they are: leave it out")
    if options.device != "cuda":
        raise ConfigError(field="cuda_graph", value=True, rule="needs --device cuda")


def verify_steps(args: argparse.Namespace) -> int:
    """The training steps to compare.

    Raises:
        ConfigError: Too few.
    """
    least, usual = (WARM_UP + 1, GRAPH_STEPS) if args.cuda_graph else (1, PLAIN_STEPS)
    steps = usual if args.steps is None else int(args.steps)
    if steps < least:
        reason = f" with cuda_graph, whose first {WARM_UP} run as they are" if args.cuda_graph else ""
        raise ConfigError(field="steps", value=steps, rule=f"must be at least {least}{reason}")
    return steps
