"""The options that `simulate` and `timeline` share: what is simulated, without a model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from overlap.costs import PRESETS, load_costs
from overlap.lead import check_lead, check_second
from overlap.orders import ORDER_NAMES, load_order
from overlap.simulate import QUEUES
from overlap.synthetic import DENSE, MOE, System
from recompute.config import Granularity, Method, RecomputeConfig, Replay
from recompute.errors import ConfigError

DEFAULT_LAYERS = 8
_NO_METHOD = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """A simulation as the command line describes it."""

    system: System
    queues: int
    microbatches: int
    json: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    parser.add_argument("--order", default="single_queue", metavar="NAME|FILE",
                        help=f"{', '.join(ORDER_NAMES)}, or a text table (default single_queue); fused: today's best "
                        "system with all its habits")  # fmt: skip
    parser.add_argument("--queues", type=int, choices=QUEUES, default=1, help="hardware queues (default 1)")
    parser.add_argument("--costs", default="h200", metavar="PRESET|FILE",
                        help=f"{', '.join(PRESETS)}, a JSON file, or a recorded TRACE#N (default h200)")  # fmt: skip
    parser.add_argument("--method", default="uniform", help=f"{_NO_METHOD}, {', '.join(Method)} (default uniform)")
    parser.add_argument("--num-layers", type=int, metavar="N", help="layers per segment, or layers (block) (default 1)")
    parser.add_argument("--replay", help=f"{', '.join(Replay)} (default: hidden if the order has R steps)")
    parser.add_argument("--delay-wgrad", action=argparse.BooleanOptionalAction, default=True,
                        help="weight gradients in slots of their own (default yes)")  # fmt: skip
    parser.add_argument("--lead", type=int, default=0, metavar="N",
                        help="layers of the second forward that run beside the first (default 0)")  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N",
                        help="layers of the model (default 8; with --pp two per virtual stage)")  # fmt: skip
    parser.add_argument("--dense-layers", type=int, default=0, metavar="N", help="leading dense layers (default 0)")
    parser.add_argument("--microbatches", type=int, default=6, metavar="N", help="of the step (default 6)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")


def read_modelled(args: argparse.Namespace, default_layers: int = DEFAULT_LAYERS) -> Modelled:
    """Check the options.

    Args:
        args: Parsed words.
        default_layers: Layers of the model where --layers is left out.

    Raises:
        ConfigError, ScheduleError: Names what is wrong.
    """
    layers = default_layers if args.layers is None else args.layers
    for name, value in (("layers", layers), ("microbatches", args.microbatches)):
        if value < 1:
            raise ConfigError(field=name, value=value, rule="must be at least 1")
    if not 0 <= args.dense_layers <= layers:
        raise ConfigError(field="dense_layers", value=args.dense_layers, rule="must be from 0 to the layers")
    check_lead(args.lead, layers)
    check_second(args.lead, args.microbatches)
    recompute = _recompute(args)
    return Modelled(
        system=System(
            kinds=(DENSE,) * args.dense_layers + (MOE,) * (layers - args.dense_layers),
            order=load_order(args.order, recompute.replay),
            recompute=recompute,
            costs=load_costs(args.costs),
            delayed=args.delay_wgrad,
            lead=args.lead,
        ),
        queues=args.queues,
        microbatches=args.microbatches,
        json=args.json,
    )


def _recompute(args: argparse.Namespace) -> RecomputeConfig:
    if args.method == _NO_METHOD:
        for name in ("num_layers", "replay"):
            if getattr(args, name) is not None:
                raise ConfigError(field=name, value=getattr(args, name), rule="has no effect with method none")
        return RecomputeConfig.none()
    config = RecomputeConfig(
        granularity=Granularity.FULL,
        method=args.method,
        num_layers=1 if args.num_layers is None else args.num_layers,
        replay=Replay.JUST_IN_TIME if args.replay is None else args.replay,
    )
    if args.replay is None and load_order(args.order, Replay.HIDDEN).replays:
        return replace(config, replay=Replay.HIDDEN)
    return config


def describe(modelled: Modelled) -> dict[str, object]:
    """What was simulated, as a flat JSON object."""
    system = modelled.system
    return {
        "order": system.order.name,
        "costs": system.costs.name,
        "queues": modelled.queues,
        "recompute": str(system.recompute),
        "delay_wgrad": system.delayed,
        "lead": system.lead,
        "layers": len(system.kinds),
        "dense_layers": system.kinds.count(DENSE),
        "microbatches": modelled.microbatches,
    }
