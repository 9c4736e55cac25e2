"""Options of commands that run on several ranks, and what they mean: a layout, its groups, how tokens travel."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import BACKENDS, SOLO, World, close_world, launched_processes, open_world
from recompute.errors import ConfigError

ROUTES = ("router", "balanced", "first-rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a run is spread over ranks; the default is one process."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    data_rank: int = 0
    """Of this process: which data it draws."""
    capacity: float | None = None
    """Rows that an expert takes from each rank, in units of its fair share; None: as many as are sent."""
    route: str = ROUTES[0]
    """What chooses experts."""
    debug_collectives: bool = False
    """Whether ranks compare what they issued after every step."""
    backend: str = BACKENDS[0]
    timeout: timedelta = timedelta(minutes=5)


def add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of a command that torchrun may start on several ranks."""
    ranks = parser.add_argument_group("ranks (start with torchrun)")
    ranks.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share a layer's experts (default 1)")
    ranks.add_argument(
        "--capacity", type=float, metavar="X",
        help="rows that an expert takes from each rank, in units of its fair share; more are dropped, fewer are padded",
    )  # fmt: skip
    ranks.add_argument(
        "--route", choices=ROUTES, default=ROUTES[0],
        help="what chooses experts: the router, or for studies all experts in turn, or those of the first rank",
    )  # fmt: skip
    ranks.add_argument("--debug-collectives", action="store_true", help="compare after each step what ranks issued")
    ranks.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="of collectives (default: by device)")
    ranks.add_argument(
        "--collective-timeout", type=float, default=300.0, metavar="SECONDS",
        help="how long a collective waits for the other ranks (default 300)",
    )  # fmt: skip


def read_parallel(args: argparse.Namespace) -> ParallelOptions:
    """Check the options; the defaults for a command that does not have them.

    Raises:
        ConfigError: Names field, value and rule.
    """
    if "ep" not in vars(args):
        return ParallelOptions()
    layout = ParallelLayout(world_size=launched_processes(), ep=args.ep)
    seconds = args.collective_timeout
    if not 0 < seconds < math.inf:
        raise ConfigError(field="collective_timeout", value=seconds, rule="must be above 0 seconds and finite")
    if args.capacity is not None and not 0 < args.capacity < math.inf:
        raise ConfigError(field="capacity", value=args.capacity, rule="must be above 0 and finite")
    for name in ("capacity", "debug_collectives"):
        if layout.ep == 1 and getattr(args, name):
            rule = "has no effect without --ep above 1: leave it out"
            raise ConfigError(field=name, value=getattr(args, name), rule=rule)
    return ParallelOptions(
        layout=layout,
        data_rank=layout.data_rank(int(os.environ.get("RANK", "0"))),
        capacity=args.capacity,
        route=args.route,
        debug_collectives=args.debug_collectives,
        backend=args.backend,
        timeout=timedelta(seconds=seconds),
    )


@contextmanager
def joined(options: ParallelOptions, device: str) -> Iterator[World]:
    """Be one of the job's ranks; SOLO if the job is one process. The process group is left on the way out."""
    if options.layout.world_size == 1:
        yield SOLO
        return
    try:
        yield open_world(options.layout, device, options.timeout, options.backend)
    finally:
        close_world()


def lengths(text: str) -> tuple[int, ...]:
    """Sequence lengths, by data rank: `16`, or `16,24`."""
    return tuple(int(word) for word in text.split(","))


def own_length(seq: tuple[int, ...], parallel: ParallelOptions) -> int:
    """The sequence length of this rank's data.

    Raises:
        ConfigError: There is neither one length nor one per data rank.
    """
    if len(seq) == 1:
        return seq[0]
    if len(seq) != parallel.layout.data:
        rule = f"must be one length, or one for each of the {parallel.layout.data} ranks that draw data"
        raise ConfigError(field="seq", value=",".join(map(str, seq)), rule=rule)
    return seq[parallel.data_rank]
