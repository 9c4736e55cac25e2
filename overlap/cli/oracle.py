"""`profile --oracle`: the highest point of a step, predicted without running it; for one CPU step or a job's ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

from overlap.cli.build import build_chunk, random_microbatches
from overlap.cli.groups import read_groups, run_groups
from overlap.cli.job_options import describe_job, given_job_options, read_device, read_job
from overlap.cli.options import Options, describe
from overlap.cli.report import console, num_bytes, print_json, table
from overlap.memory.oracle import measure_peak, predict_peak
from overlap.planning.bins import RankBin
from overlap.planning.evaluate import Evaluation, RankPeak, Setting
from overlap.planning.explore import assumptions
from overlap.planning.survey import survey
from recompute.config import Method
from recompute.errors import ConfigError
from recompute.planner import Choice

EQUAL, DIFFERENT = 0, 1
_MIB = 2**20


def add_oracle_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    group = parser.add_argument_group("oracle")
    group.add_argument(
        "--oracle",
        action="store_true",
        help="the highest point of the step, in-slot temporaries included, against the CPU allocator's own events; "
        "with options of a job: of its ranks, nothing measured",
    )
    group.add_argument("--groups", metavar="K,K", help="the peak under uniform for each of these group sizes")
    group.add_argument("--out", metavar="DIR", help="folder for the picture of --groups")
    group.add_argument("--rank", type=int, metavar="N", help="one pipeline rank of a job (default: all, the fullest)")


def refuse_oracle_options(args: argparse.Namespace) -> None:
    """Refuse what has no effect without --oracle.

    Raises:
        ConfigError: Names the first such option.
    """
    _refuse(args, ("rank", "groups", "out"), "has no effect without --oracle")


def _refuse(args: argparse.Namespace, names: Iterable[str], rule: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(field=name, value=getattr(args, name), rule=rule)


def run_oracle(args: argparse.Namespace, options: Options) -> int:
    """Predict and report; exit status 1 if the measurement differs."""
    if given_job_options(args):
        _refuse(args, ("groups", "out"), "has no effect for a job")
        return _job(args, options)
    _refuse(args, ("rank",), "has no effect without a job, as --pp")
    if options.device != "cpu":
        rule = "the oracle is checked against the CPU allocator; for a GPU run benchmarks.memory.run --suite oracle"
        raise ConfigError(field="device", value=options.device, rule=rule)
    if args.groups is not None:
        if options.recompute.method is not None and options.recompute.method is not Method.UNIFORM:
            raise ConfigError(field="method", value=args.method, rule="--groups is about uniform: leave it out")
        return run_groups(options, read_groups(args.groups), args.out)
    _refuse(args, ("out",), "has no effect without --groups")
    build, feeds = partial(build_chunk, options), random_microbatches(options, 0)
    predicted = predict_peak(build, feeds)
    measured = measure_peak(build(), feeds)
    payload = {
        "predicted_peak": predicted.bytes,
        "measured_peak": measured,
        "equal": predicted.bytes == measured,
        "slot": predicted.slot,
        "config": describe(options),
    }
    if options.json:
        print_json(payload)
    else:
        console.print(f"predicted {num_bytes(predicted.bytes)} bytes, in slot {predicted.slot}", highlight=False)
        verdict = "[green]equal[/]" if payload["equal"] else "[red]different[/]"
        console.print(f"allocator {num_bytes(measured)} bytes: {verdict}", highlight=False)
    return EQUAL if payload["equal"] else DIFFERENT


def _job(args: argparse.Namespace, options: Options) -> int:
    job, device = read_job(args, options), read_device(args)
    if args.rank is not None and not 0 <= args.rank < job.pp:
        raise ConfigError(field="rank", value=args.rank, rule=f"must be from 0 to below pp ({job.pp})")
    setting = Setting(job=job, survey=survey(job, device, (options.recompute,)), device=device, order=options.order)
    outcome = Evaluation(setting, Choice(options.recompute, options.delay_wgrad)).outcome()
    shown = outcome.fullest if args.rank is None else outcome.ranks[args.rank]
    payload = {
        "rank": _rank(shown),
        "ranks": [_rank(rank) for rank in outcome.ranks],
        "milliseconds": outcome.milliseconds,
        "chunks": [str(shape) for shape in setting.shapes],
        "assumptions": list(assumptions(setting)),
        "choice": str(Choice(options.recompute, options.delay_wgrad)),
        "job": describe_job(job),
        "device_model": device.as_json(),
    }
    if options.json:
        print_json(payload)
    else:
        _show(shown, payload)
    return EQUAL


def _rank(rank: RankPeak) -> dict[str, Any]:
    bins = {kind.value: rank.bins[kind] for kind in RankBin}
    return {"rank": rank.rank, "peak": rank.total, "waiting": rank.waiting, "bins": bins}


def _show(shown: RankPeak, payload: dict[str, Any]) -> None:
    rows = [(kind.value, f"{shown.bins[kind] / _MIB:,.1f}") for kind in RankBin if shown.bins[kind]]
    title = f"Rank {shown.rank} of {len(payload['ranks'])} under {payload['choice']}, at its peak"
    console.print(table(title, ("kind", "MiB"), [*rows, ("total", f"{shown.total / _MIB:,.1f}")]))
    console.print(f"microbatches that wait for their backward: {shown.waiting}")
    console.print("peak of each rank, MiB: " + " ".join(f"{rank['peak'] / _MIB:,.0f}" for rank in payload["ranks"]))
    console.print(f"predicted step: {payload['milliseconds'] / 1e3:.3f} s")
    for sentence in payload["assumptions"]:
        console.print(f"- {sentence}", highlight=False)
