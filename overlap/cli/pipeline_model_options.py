"""The options of a whole pipeline that `simulate` and `timeline` share, and what comes of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap.cli.modelled import DEFAULT_LAYERS, Modelled, describe
from overlap.lead import IN_PIPELINE
from overlap.pipeline_model.costs import ChunkTimes
from overlap.pipeline_model.layout import cut, even_layout, holds_of
from overlap.pipeline_model.memory import Peak, peaks
from overlap.pipeline_model.run import PipelineRun, RankTime, run_pipeline
from overlap.pipeline_model.torch_lists import PAIRED, SCHEDULES, SPLIT, make_schedule
from recompute.errors import ConfigError

DEFAULT_P2P = 0.3
"""Milliseconds: 16 MiB over a 400 Gb/s card."""
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline as the command line describes it."""

    ranks: int
    chunks: int
    schedule: str
    pairs: bool
    layout: tuple[int, ...]
    p2p: float
    pin_activations: bool
    input_mib: float
    activation_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a pipeline does and holds."""

    run: PipelineRun
    peaks: tuple[Peak, ...]


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    group = parser.add_argument_group("whole pipeline")
    group.add_argument("--pp", type=int, metavar="P", help="pipeline ranks; --layers is the whole model")
    group.add_argument("--vpp", type=int, metavar="V", help="virtual stages of a rank (default as the schedule needs)")
    group.add_argument("--schedule", help=f"{', '.join(SCHEDULES)} (default interleaved)")
    group.add_argument("--no-pairs", action="store_true", help="no forward overlaps with a backward")
    group.add_argument(
        "--pp-layout", metavar="N,N,...", help="layers of each virtual stage, 0 for an empty one (default: even)"
    )
    group.add_argument("--p2p-ms", type=float, metavar="MS",
                       help=f"one transfer between ranks (default {DEFAULT_P2P})")  # fmt: skip
    group.add_argument("--pin-activations", action="store_true",
                       help="put off weight gradients of recomputed layers too, where the schedule does")  # fmt: skip
    group.add_argument("--input-mib", type=float, metavar="MIB", help="a segment's input, for peaks in bytes")
    group.add_argument("--activation-mib", type=float, metavar="MIB", help="what one layer's backward needs")


def read_pipeline(args: argparse.Namespace, modelled: Modelled) -> Pipeline | None:
    """Check the options; None without --pp.

    Args:
        args: Parsed words.
        modelled: The model and its order.

    Raises:
        ConfigError: Names what is wrong.
    """
    if args.pp is None:
        for name in (
            "vpp",
            "schedule",
            "no_pairs",
            "pp_layout",
            "p2p_ms",
            "pin_activations",
            "input_mib",
            "activation_mib",
        ):
            value = getattr(args, name)
            if value is not None and value is not False:
                raise ConfigError(field=name, value=value, rule="has no effect without --pp")
        return None
    if modelled.system.lead:
        raise ConfigError(field="lead", value=modelled.system.lead, rule=IN_PIPELINE)
    schedule = "interleaved" if args.schedule is None else args.schedule
    for name, schedules in (("no_pairs", PAIRED), ("pin_activations", SPLIT)):
        if getattr(args, name) and schedule not in schedules:
            raise ConfigError(field=name, value=True, rule=f"has no effect with schedule {schedule}")
    if args.pin_activations and not modelled.system.recompute.enabled:
        raise ConfigError(field="pin_activations", value=True, rule="has no effect where nothing is recomputed")
    for name in ("input_mib", "activation_mib"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError(field=name, value=getattr(args, name), rule="must be a number of at least 0")
    chunks = _chunks(args)
    stages = args.pp * chunks
    layers = len(modelled.system.kinds)
    return Pipeline(
        ranks=args.pp,
        chunks=chunks,
        schedule=schedule,
        pairs=not args.no_pairs,
        layout=even_layout(layers, stages) if args.pp_layout is None else _layout(args.pp_layout, stages),
        p2p=DEFAULT_P2P if args.p2p_ms is None else args.p2p_ms,
        pin_activations=args.pin_activations,
        input_mib=args.input_mib or 0.0,
        activation_mib=args.activation_mib or 0.0,
    )


def default_layers(args: argparse.Namespace) -> int:
    """Layers of the model where --layers is left out: what --pp-layout says, or two per virtual stage.

    Raises:
        ConfigError: No ranks, no stages, or a layout that is none.
    """
    if args.pp is None:
        return DEFAULT_LAYERS
    for name, value, least in (("pp", args.pp, 2), ("vpp", _chunks(args), 1)):
        if value < least:
            raise ConfigError(field=name, value=value, rule=f"must be at least {least}")
    stages = args.pp * _chunks(args)
    return 2 * stages if args.pp_layout is None else sum(_layout(args.pp_layout, stages))


def _chunks(args: argparse.Namespace) -> int:
    """Virtual stages of a rank: as given, else 1 where the schedule knows no others."""
    if args.vpp is not None:
        chunks: int = args.vpp
        return chunks
    return 1 if args.schedule in {"1f1b", "gpipe"} else 2


def _layout(text: str, stages: int) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) != stages or not all(word.strip().isdecimal() for word in words):
        raise ConfigError(field="pp_layout", value=text, rule=f"must be {stages} numbers of layers with commas between")
    return tuple(map(int, words))


def simulate_pipeline(modelled: Modelled, pipeline: Pipeline) -> Simulated:
    """Make the schedule, place it in time, follow what it holds.

    Raises:
        ConfigError, ScheduleError: Settings that do not fit together.
    """
    schedule = make_schedule(
        pipeline.schedule, pipeline.ranks, pipeline.chunks, modelled.microbatches, pairs=pipeline.pairs
    )
    chunks = cut(modelled.system, pipeline.layout)
    times = ChunkTimes(chunks, modelled.queues, defer_wgrad=pipeline.pin_activations)
    held = {id(chunk): holds_of(chunk, defer_wgrad=pipeline.pin_activations) for chunk in chunks}
    return Simulated(
        run=run_pipeline(schedule, times, pipeline.p2p),
        peaks=peaks(
            schedule, [held[id(chunk)] for chunk in chunks],
            input_bytes=round(pipeline.input_mib * _MIB), activation_bytes=round(pipeline.activation_mib * _MIB),
        ),
    )  # fmt: skip


def pipeline_payload(modelled: Modelled, pipeline: Pipeline, simulated: Simulated) -> dict[str, Any]:
    """What was simulated, as one JSON object; times in milliseconds."""
    run, ranks = simulated.run, simulated.run.ranks
    return {
        "milliseconds": run.milliseconds,
        "working": max(rank.working for rank in ranks),
        "bubble_share": run.bubble_share,
        "exposed_p2p": _mean([rank.exposed_p2p for rank in ranks]),
        "exposed_a2a": _mean([rank.exposed_a2a for rank in ranks]),
        "paired_share": run.schedule.paired_share,
        "peak_inflight": max(peak.inflight for peak in simulated.peaks),
        "per_rank": [_rank(*pair, pipeline) for pair in zip(ranks, simulated.peaks, strict=True)],
        "config": {
            **describe(modelled),
            "pp": pipeline.ranks,
            "vpp": pipeline.chunks,
            "schedule": run.schedule.name,
            "pp_layout": list(pipeline.layout),
            "p2p_ms": pipeline.p2p,
            "pin_activations": pipeline.pin_activations,
        },
    }


def _rank(time: RankTime, peak: Peak, pipeline: Pipeline) -> dict[str, float]:
    found: dict[str, float] = {
        "working": time.working,
        "exposed_a2a": time.exposed_a2a,
        "exposed_p2p": time.exposed_p2p,
        "bubble": time.bubble,
        "peak_inflight": peak.inflight,
        "peak_segment_inputs": peak.segment_inputs,
        "peak_layer_activations": peak.layer_activations,
    }
    return {**found, "peak_bytes": peak.bytes} if pipeline.input_mib or pipeline.activation_mib else found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
