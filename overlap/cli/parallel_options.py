"""Options of commands that run on several ranks, and what they mean: a layout, its groups, how tokens travel."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from overlap.dispatch.symmetric_memory import check_device
from overlap.parallel.agree import gather
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.watch import Watch
from overlap.parallel.world import BACKENDS, SOLO, World, close_world, launched_processes, open_world
from recompute.errors import ConfigError

RANK_TRANSPORTS = ("all_to_all", "symmetric_memory")
"""Those that take tokens to other ranks."""
PATIENCE = 0.8
"""Share of the time limit after which a rank says where the ranks are."""
ROUTES = ("router", "balanced", "first-rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a run is spread over ranks; the default is one process."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    data_rank: int = 0
    """Of this process: which data it draws."""
    capacity_factor: float | None = None
    """Copies that an expert takes from each rank, in units of its fair share; None: as many as choose it."""
    route: str = ROUTES[0]
    """What chooses experts."""
    debug_collectives: bool = False
    """Whether ranks compare what they issued after every step."""
    backend: str = BACKENDS[0]
    timeout: timedelta = timedelta(minutes=5)
    fsdp: bool = False
    """Whether parameters, gradients and optimizer state are sharded over the data ranks."""


def add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of a command that torchrun may start on several ranks."""
    ranks = parser.add_argument_group("ranks (start with torchrun)")
    ranks.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share a layer's experts (default 1)")
    ranks.add_argument(
        "--capacity", dest="capacity_factor", type=float, metavar="X",
        help="rows that an expert takes from each rank, in units of its fair share; more are dropped, fewer are padded",
    )  # fmt: skip
    ranks.add_argument(
        "--route", choices=ROUTES, default=ROUTES[0],
        help="what chooses experts: the router, or for studies all experts in turn, or those of the first rank",
    )  # fmt: skip
    ranks.add_argument("--fsdp", action="store_true", help="shard parameters, gradients and optimizer over the ranks")
    ranks.add_argument("--debug-collectives", action="store_true", help="compare after each step what ranks issued")
    ranks.add_argument(
        "--collective-backend", choices=BACKENDS, default=BACKENDS[0], help="of collectives (default: by device)"
    )
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
    layout = ParallelLayout(world_size=launched_processes(), ep=args.ep, pp=vars(args).get("pp", 1))
    seconds = args.collective_timeout
    if not 0 < seconds < math.inf:
        raise ConfigError(field="collective_timeout", value=seconds, rule="must be above 0 seconds and finite")
    if args.capacity_factor is not None and not 0 < args.capacity_factor < math.inf:
        raise ConfigError(field="capacity", value=args.capacity_factor, rule="must be above 0 and finite")
    if layout.world_size == 1:
        for name in ("fsdp", "debug_collectives", "collective_backend", "collective_timeout"):
            if getattr(args, name) != args.default_of(name):
                raise ConfigError(field=name, value=getattr(args, name), rule="has no effect in one process")
    return ParallelOptions(
        layout=layout,
        data_rank=layout.data_rank(int(os.environ.get("RANK", "0"))),
        capacity_factor=args.capacity_factor,
        route=args.route,
        debug_collectives=args.debug_collectives,
        backend=args.collective_backend,
        fsdp=args.fsdp,
        timeout=timedelta(seconds=seconds),
    )


def capacity_of(args: argparse.Namespace) -> int | None:
    """Rows of each expert: the factor times its fair share of the longest microbatch, rounded up.

    Equal on all ranks, whatever their lengths, so that split sizes are.
    """
    if vars(args).get("capacity_factor") is None or not 0 < args.capacity_factor < math.inf:
        return None  # read_parallel() says why
    copies = max(args.seq) * args.batch * args.topk
    rows: int = math.ceil(args.capacity_factor * copies / max(args.experts, 1))
    return max(1, rows)


def transport_of(args: argparse.Namespace) -> str:
    """The transport that was asked for, or the one that fits.

    Raises:
        ConfigError: It does not fit the number of ranks that share experts.
    """
    shared = vars(args).get("ep", 1) > 1
    if args.transport is None:
        return "all_to_all" if shared else "local"
    name: str = args.transport
    if shared != (name in RANK_TRANSPORTS):
        rule = f"experts on several ranks need {' or '.join(RANK_TRANSPORTS)}" if shared else "needs --ep above 1"
        raise ConfigError(field="transport", value=name, rule=rule)
    if name == "symmetric_memory":
        check_device(args.device)
    return name


def describe_parallel(options: ParallelOptions) -> dict[str, object]:
    """The options as a flat JSON object."""
    return {
        "world_size": options.layout.world_size,
        "ep": options.layout.ep,
        "fsdp": options.fsdp,
        "route": options.route,
        "debug_collectives": options.debug_collectives,
        "collective_backend": options.backend,
    }


def say(message: str) -> None:
    """Print an error on stderr, with the rank where there are several."""
    rank = os.environ.get("RANK", "0")
    where = f"rank {rank}: " if launched_processes() > 1 else ""
    print(f"error: {where}{message}", file=sys.stderr)


def leave_together(world: World) -> None:
    """Wait for all ranks before an exit status that is not 0: the launcher ends every rank when it sees the first."""
    if world.groups is not None:
        gather(world, None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def joined(options: ParallelOptions, device: str) -> Iterator[World]:
    """Be one of the job's ranks; SOLO if the job is one process. The process group is left on the way out."""
    if options.layout.world_size == 1:
        yield SOLO
        return
    try:
        world = open_world(options.layout, device, options.timeout, options.backend, options.debug_collectives)
        watch = Watch(world, patience=PATIENCE * options.timeout.total_seconds())
        with watch.guard():
            yield replace(world, watch=watch)
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
