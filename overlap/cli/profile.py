"""`profile`: peak live bytes by kind, measured, predicted and by formula; and the engine's own cost per slot."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from overlap.cli.build import build_chunk, random_microbatches
from overlap.cli.curves import add_curve_options, refuse_curve, write_curves
from overlap.cli.folders import folder_at
from overlap.cli.job_options import add_job_options, refuse_job_options
from overlap.cli.options import Options, add_shared_options, describe, read_options
from overlap.cli.oracle import add_oracle_options, refuse_oracle_options, run_oracle
from overlap.cli.report import console, num_bytes, print_json, table
from overlap.memory.profile import Profile, measure_step, profile_step
from recompute.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "profile",
        help="peak memory by kind: measured, predicted, by formula",
        description="Run one step and count what is alive at every slot border, beside what the plan predicts.",
    )
    add_shared_options(parser)
    add_curve_options(parser)
    add_oracle_options(parser)
    add_job_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile and report; returns the exit status."""
    options = read_options(args)
    if options.backend.name != "torch":
        for name, given in (("oracle", args.oracle), ("curve", args.curve)):
            if given:
                raise ConfigError(field=name, value=given, rule="is there for --backend torch only")
    if args.oracle:
        refuse_curve(args)
        return run_oracle(args, options)
    refuse_job_options(args, "has no effect without --oracle")
    refuse_oracle_options(args)
    if options.backend.name != "torch":
        return _measure_only(options)
    folder = None if args.curve is None else folder_at("curve", args.curve)
    result = profile_step(partial(build_chunk, options), random_microbatches(options, 0))
    files = [] if folder is None else write_curves(result.measured, options, folder)
    if options.json:
        print_json({**result.as_json(), "files": files, "config": describe(options)})
    else:
        _show(result)
        for name in files:
            console.print(f"wrote {name}")
    return 0


def _measure_only(options: Options) -> int:
    """A step of a backend whose kernels cannot run on fake tensors: nothing is predicted."""
    result = measure_step(build_chunk(options), random_microbatches(options, 0))
    measured = result.usage.as_json()
    if options.json:
        print_json({"measured": measured, "in_slot_peak": result.in_slot_peak, "config": describe(options)})
        return 0
    rows = [(name, num_bytes(nbytes)) for name, nbytes in measured.items()]
    console.print(table("Peak live bytes of one step, by kind", ("kind", "measured"), rows))
    console.print(f"highest inside a slot, its own temporaries included: {num_bytes(result.in_slot_peak)}")
    return 0


def _show(result: Profile) -> None:
    payload = result.as_json()
    columns = ("measured", "predicted", "formula")
    rows = [
        (name, *(num_bytes(payload[column][name]) if name in payload[column] else "" for column in columns))
        for name in payload["measured"]
    ]
    console.print(table("Peak live bytes of one step, by kind", ("kind", *columns), rows))
    console.print(f"highest inside a slot, its own temporaries included: {num_bytes(result.in_slot_peak)}")
