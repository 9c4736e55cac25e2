"""Options of pipeline parallelism, and what they mean: a layout of virtual stages and a schedule."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from overlap.backends import BACKENDS
from overlap.chunk import NEEDS_SHARDS
from overlap.cli.build import Bench, make_bench, make_decoder_chunk, parallel
from overlap.cli.options import Options
from overlap.lead import IN_PIPELINE
from overlap.model.precision import DTYPES
from overlap.parallel.world import World
from overlap.pipelining.layout import PipelineLayout, make_layout, parse_layers
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.schedules import SPLITS, ScheduleKind, placement_of
from recompute.config import Keep
from recompute.errors import ConfigError

DEFAULTS = {"pp": 1, "vpp": None, "schedule": None, "pp_layout": None, "pin_activations": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """A pipeline as the command line describes it."""

    layout: PipelineLayout
    kind: ScheduleKind
    pin_activations: bool


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of a command that can run a pipeline."""
    pipeline = parser.add_argument_group("pipeline (start with torchrun)")
    pipeline.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline ranks (default 1)")
    pipeline.add_argument("--vpp", type=int, metavar="N", help="virtual stages per rank (default: by schedule)")
    pipeline.add_argument("--schedule", choices=[*ScheduleKind], help="how microbatches travel (default interleaved)")
    pipeline.add_argument(
        "--pp-layout", metavar="N,N,...", help="layers of each virtual stage, 0 for an empty one (default: even)"
    )
    pipeline.add_argument(
        "--pin-activations", action="store_true",
        help="put off weight gradients of recomputed layers too, where the schedule does",
    )  # fmt: skip


def wants_pipeline(args: argparse.Namespace) -> bool:
    """Whether any of the options is set."""
    return any(getattr(args, name, default) != default for name, default in DEFAULTS.items())


def read_pipeline(args: argparse.Namespace, options: Options) -> PipelineOptions:
    """Check the options.

    Raises:
        ConfigError: Names field, value and rule.
    """
    if options.program:
        rule = "the built-in decoder is the only model that can be cut into stages"
        raise ConfigError(field="program", value=options.program, rule=rule)
    if options.backend.name != BACKENDS[0]:
        rule = f"a model that is cut into stages runs on {BACKENDS[0]}'s modules only"
        raise ConfigError(field="backend", value=options.backend.name, rule=rule)
    if options.lead:
        raise ConfigError(field="lead", value=options.lead, rule=IN_PIPELINE)
    if options.recompute.keep is Keep.SHARDED:
        raise ConfigError(field="keep", value=Keep.SHARDED.value, rule=NEEDS_SHARDS)
    kind = ScheduleKind(args.schedule or ScheduleKind.INTERLEAVED)
    if args.pin_activations and kind not in SPLITS:
        rule = f"has no effect with schedule {kind}, which never puts weight gradients off: leave it out"
        raise ConfigError(field="pin_activations", value=True, rule=rule)
    default = {ScheduleKind.ONE_F_ONE_B: 1, ScheduleKind.GPIPE: 1}.get(kind, 2)
    layout = make_layout(
        pp=args.pp,
        vpp=default if args.vpp is None else args.vpp,
        layers=options.model.layers,
        per_stage=None if args.pp_layout is None else parse_layers(args.pp_layout),
        placement=placement_of(kind),
    )
    return PipelineOptions(layout=layout, kind=kind, pin_activations=args.pin_activations)


def with_delays(options: Options, pipeline: PipelineOptions) -> Options:
    """The options with delayed weight gradients where the schedule needs them."""
    return replace(options, delay_wgrad=True) if pipeline.kind in SPLITS else options


def build_pipeline(
    options: Options, pipeline: PipelineOptions, world: World, *, one_by_one: bool = False
) -> tuple[Pipeline, Bench]:
    """One rank's share of the pipeline, in step with its replicas, and what it runs on; one_by_one as in parallel()."""
    bench = make_bench(options, world)
    make = partial(make_decoder_chunk, options, bench)
    share = Pipeline(
        pipeline.layout,
        pipeline.kind,
        lambda cut, border: parallel(make(cut=cut, border=border), options, one_by_one=one_by_one),
        group=None if world.groups is None else world.groups.pp,
        lanes=bench.lanes,
        dtype=DTYPES[options.model.dtype],
        device=bench.device,
        pin_activations=pipeline.pin_activations,
    )
    return share, bench


@contextmanager
def alone_in_a_group(world: World) -> Iterator[None]:
    """A process group of this process alone, where there is no other: torch's pipelining asks for one."""
    if world.groups is not None:
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in __all__
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def describe_pipeline(pipeline: PipelineOptions) -> dict[str, object]:
    """The options as a flat JSON object."""
    return {
        "pp": pipeline.layout.pp,
        "vpp": pipeline.layout.vpp,
        "schedule": str(pipeline.kind),
        "pp_layout": list(pipeline.layout.layers),
        "pin_activations": pipeline.pin_activations,
    }
