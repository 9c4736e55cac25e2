"""The options that describe a job on many ranks, for `plan --budget` and `profile --oracle`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from overlap.cli.options import Options
from overlap.memory.device_model import DEVICES, DeviceModel
from overlap.model.config import ModelConfig
from overlap.planning.job import V_SHAPED, Job, Optimizer, PipelineSchedule, RoutingLoad
from overlap.planning.presets import PRESET_SEQ, PRESETS, load_preset
from recompute.errors import ConfigError

_JOB = ("preset", "pp", "ep", "dp", "virtual", "schedule", "routing", "skew", "optimizer", "shards", "keep_sends",
        "device_model")  # fmt: skip
SHARED = ("pp", "schedule")
"""Options that a pipeline which is planned slot by slot has too, under the same names."""
_PIPELINE_ONLY = ("vpp", "pp_layout", "pin_activations")
_TOKEN_FEEDS = ("padding", "packed")
_PER_RANK = 4
"""Microbatches per pipeline rank, where none are given."""


def add_job_options(parser: argparse.ArgumentParser, shared: Collection[str] = ()) -> None:
    """Add the options to a command's parser; those in `shared` it has already."""
    group = parser.add_argument_group("job", "the ranks that a prediction is for")
    default = f"default {PipelineSchedule.DUALPIPEV} with --pp"
    for name, kind, metavar, text in (
        ("preset", str, "NAME", f"a published model: {', '.join(PRESETS)}; options override it"),
        ("pp", int, "N", "pipeline ranks (default 1)"),
        ("ep", int, "N", "expert-parallel ranks (default 1)"),
        ("dp", int, "N", "data-parallel ranks (default: as many as --ep)"),
        ("virtual", int, "N", "model chunks of a pipeline rank, with --pp"),
        ("schedule", str, "NAME", f"{', '.join(PipelineSchedule)} ({default})"),
        ("routing", str, "NAME", f"rows that a rank receives: {', '.join(RoutingLoad)}"),
        ("skew", float, "X", "received over sent rows, with --routing skewed"),
        ("optimizer", str, "NAME", f"{', '.join(Optimizer)} (default distributed)"),
        ("shards", int, "N", "ranks that hold the same segment inputs, for --keep sharded (default 1)"),
        ("device-model", str, "NAME", f"rates that times come from: {', '.join(DEVICES)}"),
    ):
        if name in shared:
            continue
        dest = f"job_{name.replace('-', '_')}"
        group.add_argument(f"--{name}", dest=dest, type=kind, metavar=metavar, help=text)
    text = "what a rank sent stays until the step ends, as in torch's pipeline runtime"
    group.add_argument("--keep-sends", dest="job_keep_sends", action="store_true", default=None, help=text)


def share_with_job(args: argparse.Namespace) -> None:
    """Read the options of a pipeline as those of a job.

    Raises:
        ConfigError: Names one that a job has not.
    """
    for name in _PIPELINE_ONLY:
        if getattr(args, name):
            raise ConfigError(field=name, value=getattr(args, name), rule="has no effect with --budget; see --virtual")
    args.job_pp, args.job_schedule = args.pp, args.schedule


def given_job_options(args: argparse.Namespace) -> list[str]:
    """Names of the job options on the command line."""
    return [name for name in _JOB if _given(args, name) is not None]


def refuse_job_options(args: argparse.Namespace, rule: str) -> None:
    """Refuse what would have no effect.

    Raises:
        ConfigError: Names the first such option.
    """
    for name in given_job_options(args):
        raise ConfigError(field=name, value=_given(args, name), rule=rule)


def read_job(args: argparse.Namespace, options: Options) -> Job:
    """The job that the options describe.

    Raises:
        ConfigError: Names field, value and rule.
    """
    if options.program:
        raise ConfigError(field="program", value=options.program, rule="a job is of the built-in decoder")
    if options.lead:
        raise ConfigError(field="lead", value=options.lead, rule="is not modelled for a job: leave it out")
    pp, ep = args.job_pp or 1, args.job_ep or 1
    schedule = args.job_schedule or (PipelineSchedule.DUALPIPEV if pp > 1 else PipelineSchedule.ONE_F_ONE_B)
    seq = options.seq
    model = options.model
    if args.job_preset is not None:
        overrides: Any = dict(_changed(args, ModelConfig.__dataclass_fields__))
        model = replace(load_preset(args.job_preset), **overrides)
        seq = dict(_changed(args, ["seq"])).get("seq", PRESET_SEQ[args.job_preset])
        model = replace(model, max_seq=max(seq, 1))
    for name in _TOKEN_FEEDS:
        if getattr(model, name):
            raise ConfigError(field=name, value=True, rule="is not modelled for a job: leave it out")
    chosen = options.microbatches if "microbatches" in dict(_changed(args, ["microbatches"])) or pp == 1 else 0
    wanted = ("routing", "skew", "optimizer")
    given = {name: _given(args, name) for name in wanted if _given(args, name) is not None}
    if "skew" not in given and given.get("routing") == RoutingLoad.SKEWED:
        raise ConfigError(field="skew", value=None, rule="routing skewed needs it: give --skew")
    return Job(
        model=model,
        pp=_positive("pp", args.job_pp),
        ep=_positive("ep", args.job_ep),
        dp=_positive("dp", args.job_dp, ep),
        virtual=_positive("virtual", args.job_virtual, 2 if schedule in V_SHAPED else 1),
        schedule=schedule,
        microbatches=chosen or _PER_RANK * pp,
        seq=seq,
        batch=options.batch,
        shards=_positive("shards", args.job_shards),
        keep_sends=bool(args.job_keep_sends),
        **given,
    )


def read_device(args: argparse.Namespace) -> DeviceModel:
    """The device model.

    Raises:
        ConfigError: There is none of that name.
    """
    name = args.job_device_model or "h200"
    if name not in DEVICES:
        raise ConfigError(field="device_model", value=name, rule=f"must be {' or '.join(DEVICES)}")
    return DEVICES[name]


def describe_job(job: Job) -> dict[str, object]:
    """The job as a flat JSON object, the model under `model`."""
    plain = {name: getattr(job, name) for name in Job.__dataclass_fields__ if name != "model"}
    model = {name: getattr(job.model, name) for name in ModelConfig.__dataclass_fields__}
    return {**plain, "model": model}


def _given(args: argparse.Namespace, name: str) -> Any:
    """What the command line says of a job option: other commands run on real ranks, under names of their own."""
    return getattr(args, f"job_{name}", None)


def _changed(args: argparse.Namespace, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """Options that differ from their default."""
    for name in names:
        if name in vars(args) and getattr(args, name) != args.default_of(name):
            yield name, getattr(args, name)


def _positive(name: str, value: int | None, default: int = 1) -> int:
    if value is not None and value < 1:
        raise ConfigError(field=name, value=value, rule="must be an integer of at least 1")
    return default if value is None else value
