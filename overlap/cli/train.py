"""`train`: a byte-level language model on text files."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from overlap.chunk import ModelChunk
from overlap.cli.build import build_chunk, parallel, to_device
from overlap.cli.folders import file_at, folder_at
from overlap.cli.graph_options import add_graph_option, check_graph
from overlap.cli.options import Options, add_shared_options, describe, read_options
from overlap.cli.parallel_options import add_parallel_options, joined
from overlap.cli.pipeline_options import add_pipeline_options, wants_pipeline
from overlap.cli.report import console, messages, print_json
from overlap.parallel.world import SOLO, World
from overlap.training.checkpoint import load_checkpoint, save_checkpoint
from overlap.training.rows import cut_rows
from overlap.training.seeds import data_seed
from overlap.training.text import VOCAB, ByteText, default_text
from overlap.training.trainer import StepReport, Trainer
from recompute.errors import ConfigError


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model on text",
        description="Train on text with AdamW; save and resume bitwise.",
    )
    add_shared_options(parser)
    add_parallel_options(parser)
    add_pipeline_options(parser)
    parser.set_defaults(seq=(64,), batch=4, microbatches=4, hidden=64, ffn_width=128, expert_width=48, shared_width=48)
    job = parser.add_argument_group("job")
    job.add_argument("--text", nargs="+", metavar="PATH", help="text files (default: text that CPython ships)")
    job.add_argument("--steps", type=int, default=50, metavar="N", help="training steps to run (default 50)")
    job.add_argument("--lr", type=float, default=3e-3, metavar="RATE", help="learning rate (default 3e-3)")
    job.add_argument(
        "--save",
        metavar="FILE|FOLDER",
        help="write a checkpoint at the end: a file, or a folder of several ranks",
    )
    job.add_argument("--resume", metavar="FILE|FOLDER", help="go on from a checkpoint")
    add_graph_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and report; returns the exit status."""
    options = read_options(args)
    if options.program:
        raise ConfigError(field="program", value=options.program, rule="train knows the built-in decoder only")
    if args.steps < 1:
        raise ConfigError(field="steps", value=args.steps, rule="must be at least 1")
    if not 0 < args.lr < math.inf:
        raise ConfigError(field="lr", value=args.lr, rule="must be above 0 and finite")
    check_graph(args, options)
    _check_places(args, several=options.parallel.layout.world_size > 1)
    with joined(options.parallel, options.device) as world:
        if wants_pipeline(args):
            # imported here: it takes from this module what both share
            from overlap.cli.pipeline_train import train_in_pipeline

            return train_in_pipeline(options, args, world)
        return _run(options, args, world)


def _run(options: Options, args: argparse.Namespace, world: World) -> int:
    trainer = make_trainer(options, args.text, args.lr, world, graph=args.cuda_graph)
    config = {**saved_config(options), "lr": args.lr, "text": list(args.text or ())}
    if args.resume is not None:
        _resume(Path(args.resume), trainer, config)
    reports = run_steps(trainer, args.steps)
    if args.save is not None:
        _save(Path(args.save), trainer, config)
    if world.rank:
        return 0
    report(options, args, reports, {})
    return 0


def report(options: Options, args: argparse.Namespace, reports: list[StepReport], more: dict[str, object]) -> None:
    """Print what came of a run; `more` are further options of it."""
    payload = {
        "losses": [report.loss for report in reports],
        "losses_by_name": {name: [report.losses[name] for report in reports] for name in reports[0].losses},
        "first_step": reports[0].step,
        "tokens_per_second": sorted(report.tokens_per_second for report in reports)[len(reports) // 2],
        "milliseconds": sorted(report.milliseconds for report in reports)[len(reports) // 2],
        "config": {**describe(options), **more, "steps": args.steps, "lr": args.lr},
    }
    if options.json:
        print_json(payload)
    else:
        console.print(
            f"loss {reports[0].loss:.4f} -> {reports[-1].loss:.4f} in {len(reports)} steps, "
            f"median {payload['tokens_per_second']:,.0f} tokens/s"
        )
        for name, first in reports[0].losses.items():
            if name != "loss":
                console.print(f"  {name} {first:.4f} -> {reports[-1].losses[name]:.4f}")


def _check_places(args: argparse.Namespace, *, several: bool) -> None:
    """Refuse a folder for one process to write, a file for several ranks, and what cannot be made, before training."""
    if args.save is not None and several and Path(args.save).is_file():
        raise ConfigError(field="save", value=args.save, rule="must be a folder to write, not a file: there are ranks")
    if args.save is not None and several:
        folder_at("save", args.save)
    elif args.save is not None:
        file_at("save", args.save)
    if args.resume is not None and several and Path(args.resume).is_file():
        raise ConfigError(field="resume", value=args.resume, rule="one file holds the run of one process only")


def _save(path: Path, trainer: Trainer, config: dict[str, object]) -> None:
    if trainer.chunk.world.groups is None:
        save_checkpoint(path, trainer.chunk, trainer.optimizer, config)
        return
    from overlap.training.sharded_checkpoint import save_folder

    save_folder(path, trainer.chunk, trainer.optimizer, config)


def _resume(path: Path, trainer: Trainer, config: dict[str, object]) -> None:
    if trainer.chunk.world.groups is None and not path.is_dir():
        load_checkpoint(path, trainer.chunk, trainer.optimizer, config)
        return
    from overlap.training.sharded_checkpoint import load_folder

    load_folder(path, trainer.chunk, trainer.optimizer, config)


def make_trainer(
    options: Options, paths: list[str] | None, learning_rate: float, world: World = SOLO, *, graph: bool = False
) -> Trainer:
    """A trainer on text; the vocabulary is the 256 bytes."""
    options = replace(options, model=replace(options.model, vocab=VOCAB))
    data = text_data(options, paths)
    per_token = options.model.per_token_loss
    chunk = parallel(build_chunk(options, world), options)
    return Trainer(chunk, data, learning_rate=learning_rate, per_token=per_token, graph=graph)


def text_data(options: Options, paths: list[str] | None) -> Callable[[int], Any]:
    """Microbatches of text by step."""
    text = ByteText([Path(path) for path in paths] if paths else [default_text()], options.seq)
    return partial(_data, text, options)


def _data(text: ByteText, options: Options, step: int) -> Any:
    rank = options.parallel.data_rank
    rows = text.microbatches(options.seed, step, options.microbatches, options.batch, rank)
    generator = torch.Generator().manual_seed(data_seed(options.seed, step, rank))
    return [to_device(cut_rows(dict(feeds), options.model, generator), options.device) for feeds in rows]


def saved_config(options: Options) -> dict[str, object]:
    """What a checkpoint's run must agree on: all that changes the numbers, not how they are computed."""
    how = {
        "method",
        "num_layers",
        "recompute_mtp",
        "replay",
        "granularity",
        "recompute_modules",
        "keep",
        "order",
        "delay_wgrad",
        "lead",
        "program",
        "device",
        "transport",
        "loopback_scale",
        "debug_collectives",
        "collective_backend",
        "ep",
        "fsdp",
    }
    return {name: value for name, value in describe(options).items() if name not in how}


class _Steps(Protocol):
    """A trainer of any kind."""

    chunk: ModelChunk

    def step(self) -> StepReport:
        """One step."""


def run_steps(trainer: _Steps, steps: int) -> list[StepReport]:
    """Train, with a progress bar on a terminal."""
    reports: list[StepReport] = []
    quiet = trainer.chunk.world.rank > 0 or not messages.is_terminal
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=messages, disable=quiet) as progress:
        task = progress.add_task("training", total=steps, state="")
        for _ in range(steps):
            report = trainer.step()
            reports.append(report)
            state = "  ".join(f"{name} {value:.4f}" for name, value in report.losses.items())
            state += f"  {report.tokens_per_second:,.0f} tokens/s"
            progress.update(task, advance=1, state=state)
    return reports
