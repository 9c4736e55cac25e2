"""Options about where the model's layers come from, and in what precision they compute."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from overlap.backends import BACKENDS
from overlap.model.fp8 import Fp8Config, Recipe
from recompute.errors import ConfigError

_FP8_DETAILS = ("first_bf16", "last_bf16", "amax_history")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The backend as the command line describes it."""

    name: str
    fp8: Fp8Config | None


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command's parser."""
    group = parser.add_argument_group("backend")
    group.add_argument("--backend", default=BACKENDS[0], help=f"whose layers: {', '.join(BACKENDS)} (default torch)")
    group.add_argument("--fp8", metavar="RECIPE", help=f"products in 8 bits (te): {', '.join(Recipe)}")
    group.add_argument("--fp8-first-bf16", type=int, metavar="N", help="leading layers without fp8 (default 0)")
    group.add_argument("--fp8-last-bf16", type=int, metavar="N", help="trailing decoder layers without fp8 (default 0)")
    group.add_argument(
        "--fp8-amax-history", type=int, metavar="N", help="steps that scales of delayed look back on (default 1024)"
    )


def read_backend_options(args: argparse.Namespace) -> BackendOptions:
    """Check the options.

    Raises:
        ConfigError: Names field, value and rule.
    """
    if args.backend not in BACKENDS:
        raise ConfigError(field="backend", value=args.backend, rule="must be one of " + ", ".join(BACKENDS))
    details = {name: getattr(args, f"fp8_{name}") for name in _FP8_DETAILS}
    given = {name: value for name, value in details.items() if value is not None}
    if args.fp8 is None:
        for name, value in given.items():
            raise ConfigError(field=f"fp8_{name}", value=value, rule="has no effect without --fp8: leave it out")
    if args.backend == BACKENDS[0]:
        if args.fp8 is not None:
            raise ConfigError(field="fp8", value=args.fp8, rule="needs --backend te")
        return BackendOptions(name=args.backend, fp8=None)
    if args.program:
        raise ConfigError(field="backend", value=args.backend, rule="has no effect with --program: leave it out")
    if args.device != "cuda":
        raise ConfigError(field="backend", value=args.backend, rule="runs on a GPU only: add --device cuda")
    return BackendOptions(name=args.backend, fp8=None if args.fp8 is None else Fp8Config(recipe=args.fp8, **given))


def describe_backend(options: BackendOptions) -> dict[str, object]:
    """The options as a flat JSON object."""
    fp8 = options.fp8
    details = {f"fp8_{name}": None if fp8 is None else getattr(fp8, name) for name in _FP8_DETAILS}
    return {"backend": options.name, "fp8": None if fp8 is None else str(fp8.recipe), **details}
