"""`python -m overlap`: plan, verify, train, profile, demo, simulate, timeline.

Exit status: 0 well, 1 different (verify), 2 bad input, 3 another rank failed. With --json stdout carries one object
and stderr all else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from overlap.cli import demo, plan, profile, simulate, timeline, train, verify
from overlap.cli.parallel_options import say
from overlap.errors import ProgramError, RankFailed, ScheduleError
from recompute.errors import ConfigError

Command = Callable[[argparse.Namespace], int]
BAD_INPUT = 2
RANK_FAILED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words of the command line; None: the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m overlap",
        description="Layer-granular activation recompute for MoE training under all-to-all overlap.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (plan, verify, train, profile, demo, simulate, timeline):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    run: Command = args.run
    try:
        return run(args)
    except (ConfigError, ProgramError, ScheduleError) as error:
        say(str(error))
        return BAD_INPUT
    except RankFailed as error:
        say(str(error))
        return RANK_FAILED
