"""The options about parts of layers and about where segment inputs wait; and all recompute options as a config."""

from __future__ import annotations

import argparse

from recompute.config import Granularity, Keep, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule

NO_METHOD = "none"


def add_recompute_options(group: argparse._ArgumentGroup) -> None:
    """Add them to a group of the parser."""
    group.add_argument(
        "--granularity", help=f"{', '.join(Granularity)} (default: what --method and --recompute-modules ask for)"
    )
    group.add_argument(
        "--recompute-modules",
        metavar="NAMES",
        help=f"parts to rebuild in the layers that --method leaves alone, by comma: {', '.join(RecomputeModule)}",
    )
    group.add_argument("--keep", help=f"where segment inputs wait for their replay: {', '.join(Keep)} (default device)")


def read_recompute(args: argparse.Namespace) -> RecomputeConfig:
    """Check the recompute options.

    Raises:
        ConfigError: Names field, value and rule.
    """
    modules = tuple(args.recompute_modules.split(",")) if args.recompute_modules else ()
    method = None if args.method == NO_METHOD else args.method
    granularity = args.granularity
    if granularity is None:
        granularity = Granularity.SELECTIVE if modules else Granularity.FULL if method else Granularity.NONE
    if method is None:
        unread = {"num_layers": args.num_layers, "replay": args.replay, "recompute_mtp": args.recompute_mtp or None}
        for name, value in unread.items():
            if value is not None:
                raise ConfigError(field=name, value=value, rule="has no effect with method none: leave it out")
    return RecomputeConfig(
        granularity=granularity,
        method=method,
        num_layers=args.num_layers,
        recompute_mtp=args.recompute_mtp,
        replay=Replay.JUST_IN_TIME if args.replay is None else args.replay,
        modules=modules,
        keep=Keep.DEVICE if args.keep is None else args.keep,
    )


def describe_recompute(config: RecomputeConfig) -> dict[str, object]:
    """The config as a flat JSON object."""
    return {
        "granularity": str(config.granularity),
        "method": NO_METHOD if config.method is None else str(config.method),
        "num_layers": config.num_layers,
        "recompute_mtp": config.recompute_mtp,
        "replay": str(config.replay),
        "recompute_modules": [str(module) for module in config.modules],
        "keep": str(config.keep),
    }
