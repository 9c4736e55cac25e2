"""`demo`: the main job: train on text under each recompute rule; compare losses to the bit, memory to the byte."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from overlap.cli.build import build_chunk
from overlap.cli.folders import folder_at
from overlap.cli.options import Options, add_shared_options, read_options
from overlap.cli.report import console, messages, num_bytes, print_json, table
from overlap.cli.train import make_trainer
from overlap.draw import RuleResult, draw_losses, draw_memory
from overlap.memory.profile import Profile, profile_step
from recompute.config import RecomputeConfig
from recompute.errors import ConfigError

EQUAL, DIFFERENT = 0, 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to set recompute."""

    name: str
    config: RecomputeConfig


def rules(layers: int) -> tuple[Rule, ...]:
    """The rules that the demo compares."""
    return (
        Rule("none", RecomputeConfig.none()),
        Rule("uniform 1", RecomputeConfig.uniform(1)),
        Rule("uniform 2", RecomputeConfig.uniform(2)),
        Rule(f"block {layers // 2}", RecomputeConfig.block(max(layers // 2, 1))),
    )


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="the main job: train on text under each recompute rule and compare",
        description="Train the same model on text under each recompute rule. Exit status 0 if all loss curves are the "
        "same to the bit and every measured byte was predicted, 1 if not. Writes OUT/losses.png and OUT/memory.png.",
    )
    add_shared_options(parser)
    parser.set_defaults(
        layers=6, dense_layers=1, hidden=64, heads=4, ffn_width=160, experts=8, expert_width=48, shared_width=48,
        seq=(64,), batch=4, microbatches=4,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="training steps per rule (default 40)")
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for the pictures (default out)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, compare, draw; returns the exit status."""
    options = read_options(args)
    if options.recompute.enabled or options.program:
        name = "program" if options.program else "method"
        raise ConfigError(field=name, value=getattr(args, name), rule="the demo chooses it: leave it out")
    if args.steps < 1:
        raise ConfigError(field="steps", value=args.steps, rule="must be at least 1")
    out = folder_at("out", args.out)
    results = [_result(rule, options, args.steps) for rule in rules(options.model.layers)]
    same = all(result.losses == results[0].losses for result in results)
    exact = all(result.profile.measured == result.profile.predicted for result in results)
    draw_losses(results, out / "losses.png")
    draw_memory(results, out / "memory.png")
    if options.json:
        print_json({"losses_equal": same, "memory_exact": exact, "rules": [_as_json(result) for result in results]})
    else:
        _show(results, same, exact, out)
    return EQUAL if same and exact else DIFFERENT


def _result(rule: Rule, options: Options, steps: int) -> RuleResult:
    options = replace(options, recompute=rule.config)
    trainer = make_trainer(options, None, 3e-3)
    columns = (
        TextColumn(f"{rule.name:>10}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    reports = []
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        task = progress.add_task(rule.name, total=steps, state="")
        for _ in range(steps):
            reports.append(trainer.step())
            progress.update(task, advance=1, state=f"loss {reports[-1].loss:.4f}")
    milliseconds = sorted(report.milliseconds for report in reports)[len(reports) // 2]
    microbatches = trainer.data(0)
    return RuleResult(
        name=rule.name,
        losses=tuple(report.loss for report in reports),
        milliseconds=milliseconds,
        profile=profile_step(partial(build_chunk, options), microbatches),
    )


def _show(results: Sequence[RuleResult], same: bool, exact: bool, out: Path) -> None:
    console.print(
        table(
            "Peak memory of one step in bytes (weights, their gradients and the batch not counted)",
            ("rule", "measured", "predicted", "of none", "median step"),
            [
                (
                    result.name,
                    num_bytes(result.profile.measured.total),
                    num_bytes(result.profile.predicted.total),
                    f"{_share(result.profile, results[0].profile):.0%}",
                    f"{result.milliseconds:.0f} ms",
                )
                for result in results
            ],
        )
    )
    first = results[0].losses
    console.print(f"loss {first[0]:.4f} -> {first[-1]:.4f} in {len(first)} steps")
    console.print("loss curves: " + ("[green]the same to the bit[/]" if same else "[red]different[/]"))
    console.print("prediction: " + ("[green]exact in every bin[/]" if exact else "[red]not exact[/]"))
    console.print(f"pictures: {out / 'losses.png'}, {out / 'memory.png'}")


def _share(profile: Profile, of: Profile) -> float:
    return profile.measured.total / of.measured.total


def _as_json(result: RuleResult) -> dict[str, object]:
    return {
        "rule": result.name,
        "losses": list(result.losses),
        "milliseconds": result.milliseconds,
        **result.profile.as_json(),
    }
