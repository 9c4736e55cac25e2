"""The options that say what is recomputed, when, and where its inputs wait."""

from __future__ import annotations

import argparse

from recompute.config import Granularity, Keep, Method, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.modules import RecomputeModule

NO_METHOD = "none"


def add_recompute_options(group: argparse._ArgumentGroup) -> None:
    """Add them to a group of the parser."""
    group.add_argument("--method", default=NO_METHOD, help=f"recompute rule: {NO_METHOD}, {', '.join(Method)}")
    group.add_argument("--num-layers", type=_integer, metavar="N", help="layers per segment, or layers (block)")
    group.add_argument("--recompute-mtp", action="store_true", help="recompute the MTP depths under method block too")
    group.add_argument("--replay", help=f"when segments are replayed: {', '.join(Replay)}")
    group.add_argument(
        "--granularity", help=f"{', '.join(Granularity)} (default: what --method and --recompute-modules ask for)"
    )
    group.add_argument(
        "--recompute-modules",
        metavar="NAMES",
        help=f"parts to rebuild in the layers that --method leaves alone, by comma: {', '.join(RecomputeModule)}",
    )
    group.add_argument("--keep", help=f"where segment inputs wait for their replay: {', '.join(Keep)} (default device)")


def _integer(text: str) -> int | str:
    """An integer where it is one; other text is refused later, with the rule."""
    try:
        return int(text)
    except ValueError:
        return text


def read_recompute(args: argparse.Namespace) -> RecomputeConfig:
    """Check the recompute options.

    Raises:
        ConfigError: Names field, value and rule.
    """
    modules = () if args.recompute_modules is None else tuple(args.recompute_modules.split(","))
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
