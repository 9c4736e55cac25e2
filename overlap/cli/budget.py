"""`plan --budget`: every way to recompute that fits the memory of one device, and the fastest of them."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from overlap.cli.folders import folder_at
from overlap.cli.job_options import describe_job, read_device, read_job
from overlap.cli.options import Options
from overlap.cli.report import console, messages, print_json, table
from overlap.draw_plan import draw_frontier
from overlap.planning.evaluate import Setting
from overlap.planning.explore import assumptions, explore
from overlap.planning.survey import survey
from recompute.errors import ConfigError
from recompute.planner import SELECTIONS, Candidate, Decision, parse_bytes

_GIB = 2**30
FITS, FITS_NOT = 0, 1
_FASTEST = 20
"""Choices that are shown beside the frontier."""


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    group = parser.add_argument_group("budget")
    group.add_argument("--budget", metavar="SIZE", help="memory of one device, as 80GiB: predict what fits, and choose")
    group.add_argument("--out", metavar="DIR", help="folder for the picture of memory against time")


def refuse_out(args: argparse.Namespace) -> None:
    """Refuse a folder that nothing would be written to.

    Raises:
        ConfigError: There is one.
    """
    if args.out is not None:
        raise ConfigError(field="out", value=args.out, rule="has no effect without --budget")


def run_budget(args: argparse.Namespace, options: Options) -> int:
    """Predict, choose and report; exit status 0 if something fits, 1 if nothing does."""
    budget = parse_bytes(args.budget)
    for name, given in (("method", options.recompute.enabled), ("delay_wgrad", args.delay_wgrad)):
        if given:
            raise ConfigError(field=name, value=getattr(args, name), rule="the planner chooses it: leave it out")
    job, device = read_job(args, options), read_device(args)
    folder = None if args.out is None else folder_at("out", args.out)
    begin = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        task = progress.add_task("dry runs of the distinct chunks")
        setting = Setting(job=job, survey=survey(job, device, SELECTIONS), device=device, order=options.order)
        decision = explore(setting, budget, lambda name: progress.update(task, description=name))
    pictures = []
    if folder is not None:
        pictures.append(str(folder / "frontier.png"))
        draw_frontier(decision, folder / "frontier.png")
    payload = {
        **_as_json(decision),
        "assumptions": list(assumptions(setting)),
        "pictures": pictures,
        "seconds": time.perf_counter() - begin,
        "job": describe_job(job),
        "device_model": device.as_json(),
    }
    if options.json:
        print_json(payload)
    else:
        _show(decision, payload)
    return FITS if decision.fitting else FITS_NOT


def _as_json(decision: Decision) -> dict[str, Any]:
    fastest = decision.fastest
    return {
        "budget": decision.budget,
        "fits": bool(decision.fitting),
        "fastest": None if fastest is None else _candidate(fastest, decision),
        "smallest": _candidate(decision.smallest, decision),
        "missing": decision.missing,
        "largest_bin": decision.largest_bin,
        "candidates": [_candidate(candidate, decision) for candidate in decision.candidates],
    }


def _candidate(candidate: Candidate, decision: Decision) -> dict[str, Any]:
    recompute = candidate.choice.recompute
    return {
        "name": str(candidate.choice),
        "method": "none" if recompute.method is None else str(recompute.method),
        "num_layers": recompute.num_layers,
        "recompute_mtp": recompute.recompute_mtp,
        "replay": str(recompute.replay),
        "modules": [str(module) for module in recompute.modules],
        "keep": str(recompute.keep),
        "delay_wgrad": candidate.choice.delay_wgrad,
        "peak": candidate.peak,
        "bins": dict(candidate.bins),
        "milliseconds": candidate.milliseconds,
        "fits": candidate.peak <= decision.budget,
        "frontier": candidate in decision.frontier,
    }


def _show(decision: Decision, payload: dict[str, Any]) -> None:
    names = {str(candidate.choice) for candidate in (*decision.frontier, *decision.fitting[:_FASTEST])}
    shown = [candidate for candidate in decision.candidates if str(candidate.choice) in names]
    order = sorted(shown, key=lambda candidate: candidate.milliseconds)
    rows = [
        (
            str(candidate.choice),
            f"{candidate.peak / _GIB:.1f}",
            f"{candidate.milliseconds / 1e3:.3f}",
            "[green]yes[/]" if candidate.peak <= decision.budget else "[red]no[/]",
            "*" if candidate in decision.frontier else "",
        )
        for candidate in order
    ]
    title = f"Predicted for the fullest rank; budget {decision.budget / _GIB:.1f} GiB"
    console.print(table(title, ("choice", "peak GiB", "step s", "fits", "frontier"), rows))
    console.print(f"{len(rows)} of {len(decision.candidates)} choices: the frontier and the fastest; --json has all")
    chosen = decision.fastest
    if chosen is None:
        console.print(
            f"[red]nothing fits[/]: {decision.smallest.choice} needs least and misses by "
            f"{decision.missing / _GIB:.2f} GiB; its largest kind is {decision.largest_bin}"
        )
        chosen = decision.smallest
    else:
        console.print(f"fastest that fits: [bold]{chosen.choice}[/]")
    kinds = sorted(chosen.bins.items(), key=lambda item: -item[1])
    console.print("  " + "  ".join(f"{kind} {nbytes / _GIB:.2f}" for kind, nbytes in kinds if nbytes), highlight=False)
    for sentence in payload["assumptions"]:
        console.print(f"- {sentence}", highlight=False)
    for picture in payload["pictures"]:
        console.print(f"picture: {picture}")
