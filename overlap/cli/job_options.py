"""The options that describe a job on many ranks, for `plan --budget` and `profile --oracle`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from overlap.cli.options import Options
from overlap.memory.device_model import DEVICES, DeviceModel
from overlap.model.config import ModelConfig
from overlap.planning.job import V_SHAPED, Job, Optimizer, PipelineSchedule, RoutingLoad
from overlap.planning.presets import PRESET_SEQ, PRESETS, load_preset
from recompute.errors import ConfigError

_JOB = ("preset", "pp", "ep", "dp", "virtual", "schedule", "routing", "skew", "optimizer", "keep_sends", "device_model")
_TOKEN_FEEDS = ("padding", "packed")
_PER_RANK = 4
"""Microbatches per pipeline rank, where none are given."""


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    group = parser.add_argument_group("job", "the ranks that a prediction is for")
    group.add_argument("--preset", metavar="NAME", help=f"a published model: {', '.join(PRESETS)}; options override it")
    group.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default 1)")
    group.add_argument("--ep", type=int, metavar="N", help="expert-parallel ranks (default 1)")
    group.add_argument("--dp", type=int, metavar="N", help="data-parallel ranks (default: as many as --ep)")
    group.add_argument("--virtual", type=int, metavar="N", help="model chunks of a pipeline rank")
    default = f"default {PipelineSchedule.DUALPIPEV} with --pp"
    group.add_argument("--schedule", metavar="NAME", help=f"{', '.join(PipelineSchedule)} ({default})")
    group.add_argument("--routing", metavar="NAME", help=f"rows that a rank receives: {', '.join(RoutingLoad)}")
    group.add_argument("--skew", type=float, metavar="X", help="received over sent rows, with --routing skewed")
    group.add_argument("--optimizer", metavar="NAME", help=f"{', '.join(Optimizer)} (default distributed)")
    group.add_argument("--keep-sends", action="store_true", default=None,
                       help="what a rank sent stays until the step ends, as in torch's pipeline runtime")  # fmt: skip
    group.add_argument("--device-model", metavar="NAME", help=f"rates that times come from: {', '.join(DEVICES)}")


def given_job_options(args: argparse.Namespace) -> list[str]:
    """Names of the job options on the command line."""
    return [name for name in _JOB if getattr(args, name) is not None]


def refuse_job_options(args: argparse.Namespace, rule: str) -> None:
    """Refuse what would have no effect.

    Raises:
        ConfigError: Names the first such option.
    """
    for name in given_job_options(args):
        raise ConfigError(field=name, value=getattr(args, name), rule=rule)


def read_job(args: argparse.Namespace, options: Options) -> Job:
    """The job that the options describe.

    Raises:
        ConfigError: Names field, value and rule.
    """
    if options.program:
        raise ConfigError(field="program", value=options.program, rule="a job is of the built-in decoder")
    pp, ep = args.pp or 1, args.ep or 1
    schedule = args.schedule or (PipelineSchedule.DUALPIPEV if pp > 1 else PipelineSchedule.ONE_F_ONE_B)
    seq = options.seq
    model = options.model
    if args.preset is not None:
        overrides: Any = dict(_changed(args, ModelConfig.__dataclass_fields__))
        model = replace(load_preset(args.preset), **overrides)
        seq = dict(_changed(args, ["seq"])).get("seq", PRESET_SEQ[args.preset])
        model = replace(model, max_seq=max(seq, 1))
    for name in _TOKEN_FEEDS:
        if getattr(model, name):
            raise ConfigError(field=name, value=True, rule="is not modelled for a job: leave it out")
    chosen = options.microbatches if "microbatches" in dict(_changed(args, ["microbatches"])) or pp == 1 else 0
    given = {name: getattr(args, name) for name in ("routing", "skew", "optimizer") if getattr(args, name) is not None}
    if "skew" not in given and given.get("routing") == RoutingLoad.SKEWED:
        raise ConfigError(field="skew", value=None, rule="routing skewed needs it: give --skew")
    return Job(
        model=model,
        pp=_positive("pp", args.pp),
        ep=_positive("ep", args.ep),
        dp=_positive("dp", args.dp, ep),
        virtual=_positive("virtual", args.virtual, 2 if schedule in V_SHAPED else 1),
        schedule=schedule,
        microbatches=chosen or _PER_RANK * pp,
        seq=seq,
        batch=options.batch,
        keep_sends=bool(args.keep_sends),
        **given,
    )


def read_device(args: argparse.Namespace) -> DeviceModel:
    """The device model.

    Raises:
        ConfigError: There is none of that name.
    """
    name = args.device_model or "h200"
    if name not in DEVICES:
        raise ConfigError(field="device_model", value=name, rule=f"must be {' or '.join(DEVICES)}")
    return DEVICES[name]


def describe_job(job: Job) -> dict[str, object]:
    """The job as a flat JSON object, the model under `model`."""
    plain = {name: getattr(job, name) for name in Job.__dataclass_fields__ if name != "model"}
    model = {name: getattr(job.model, name) for name in ModelConfig.__dataclass_fields__}
    return {**plain, "model": model}


def _changed(args: argparse.Namespace, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Options that differ from their default."""
    for name in names:
        if name in vars(args) and getattr(args, name) != args.default_of(name):
            yield name, getattr(args, name)


def _positive(name: str, value: int | None, default: int = 1) -> int:
    if value is not None and value < 1:
        raise ConfigError(field=name, value=value, rule="must be an integer of at least 1")
    return default if value is None else value
