"""`simulate`: what an issue order costs, in a model of lanes and hardware queues; and the search for a better one."""

from __future__ import annotations

import argparse
from typing import Any

from overlap.cli.folders import file_at
from overlap.cli.modelled import Modelled, add_options, describe, read_modelled
from overlap.cli.pipeline_model_options import (
    Pipeline,
    add_pipeline_options,
    default_layers,
    pipeline_payload,
    read_pipeline,
    simulate_pipeline,
)
from overlap.cli.pipeline_model_report import show_pipeline
from overlap.cli.report import console, print_json, table
from overlap.orders import format_order
from overlap.search import Found, search
from overlap.simulate import QUEUES
from overlap.steady import Steady, measure, measure_step, with_order
from recompute.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "simulate",
        help="what an issue order costs, in a model; or search for the best one",
        description="Simulate layer pairs and a step: their time, idle compute, exposed communication per kind, and "
        "the bound max(compute, communication). With --pp: a whole pipeline of such steps. No model is built.",
    )
    add_options(parser)
    add_pipeline_options(parser)
    parser.add_argument(
        "--search", action="store_true", help="find the best order for these costs, starting from --order"
    )
    parser.add_argument("--for-queues", type=int, choices=QUEUES, nargs="+",
                        help="with --search: the queue models that count (default both)")  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="with --search: of its restarts (default 0)")
    parser.add_argument("--write", metavar="FILE", help="with --search: write the order found as a text table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and report; returns the exit status."""
    modelled = read_modelled(args, default_layers(args))
    for name in ("write", "seed", "for_queues"):
        if getattr(args, name) is not None and not args.search:
            raise ConfigError(field=name, value=getattr(args, name), rule="has no effect without --search")
    pipeline = read_pipeline(args, modelled)
    if pipeline is not None:
        return _run_pipeline(args, modelled, pipeline)
    written = None if args.write is None else file_at("write", args.write)
    payload = _report(modelled)
    if args.search:
        found = search(modelled.system, queues=args.for_queues or QUEUES, seed=args.seed or 0)
        payload["search"] = _found(modelled, found)
        if written is not None:
            written.write_text(format_order(found.order), encoding="utf-8")
    if args.json:
        print_json(payload)
    else:
        _show(payload)
    return 0


def _run_pipeline(args: argparse.Namespace, modelled: Modelled, pipeline: Pipeline) -> int:
    if args.search:
        raise ConfigError(field="search", value=True, rule="has no effect with --pp: search for a layer pair first")
    payload = pipeline_payload(modelled, pipeline, simulate_pipeline(modelled, pipeline))
    if args.json:
        print_json(payload)
    else:
        show_pipeline(payload)
    return 0


def _report(modelled: Modelled) -> dict[str, Any]:
    steady = measure(modelled.system, modelled.queues)
    step = measure_step(modelled.system, modelled.microbatches, modelled.queues)
    return {**_pair(steady), "milliseconds_per_step": step.end, "config": describe(modelled)}


def _pair(steady: Steady) -> dict[str, Any]:
    return {
        "milliseconds_per_pair": steady.milliseconds,
        "compute_idle": steady.compute_idle,
        "exposed": dict(steady.exposed),
        "bound": steady.bound,
        "over_bound": steady.over_bound,
    }


def _found(modelled: Modelled, found: Found) -> dict[str, Any]:
    system = with_order(modelled.system, found.order)
    return {
        "order": str(found.order),
        "table": format_order(found.order),
        "orders_tried": found.tried,
        "queues": {str(queues): _pair(measure(system, queues)) for queues in QUEUES},
        "milliseconds_per_step": measure_step(system, modelled.microbatches, modelled.queues).end,
    }


def _show(payload: dict[str, Any]) -> None:
    config = payload["config"]
    rows = [(f"order {config['order']}, {config['queues']} queue(s)", *_cells(payload))]
    if "search" in payload:
        rows += [
            (f"searched, {queues} queue(s)", *_cells(pair)) for queues, pair in payload["search"]["queues"].items()
        ]
    columns = ("milliseconds", "per pair", "bound", "over it", "compute idle", "exposed all-to-all")
    console.print(table("A layer pair in steady state", columns, rows))
    kinds = [f"{kind} {time:.3f}" for kind, time in payload["exposed"].items() if time > 0]
    console.print(f"exposed per pair: {'  '.join(kinds) if kinds else 'nothing'}")
    console.print(
        f"a step of {config['layers']} layers: {payload['milliseconds_per_step']:.1f} ms; {config['recompute']}"
    )
    if "search" in payload:
        console.print(f"{payload['search']['orders_tried']} orders tried; the best one:", highlight=False)
        console.print(payload["search"]["table"], highlight=False)


def _cells(pair: dict[str, Any]) -> tuple[str, ...]:
    exposed = sum(pair["exposed"].values())
    times = [f"{pair['milliseconds_per_pair']:.3f}", f"{pair['bound']:.3f}", f"{pair['over_bound']:.1%}"]
    return (*times, f"{pair['compute_idle']:.3f}", f"{exposed:.3f}")
