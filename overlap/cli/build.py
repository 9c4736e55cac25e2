"""From options to a model chunk and its microbatches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overlap.chunk import ModelChunk
from overlap.cli.options import Options
from overlap.engine import Feeds
from overlap.model import Decoder
from overlap.scale import LossScale, PerMicrobatch, PerToken
from recompute.errors import ConfigError

OwnModel = Callable[[int, int], tuple[nn.Module, list[dict[str, Any]]]]
"""`function(seed, microbatches)` returns a module with `program()`, and the feeds of its microbatches."""


def build_chunk(options: Options) -> ModelChunk:
    """The model that the options describe, ready to train.

    Raises:
        ConfigError, ProgramError, ScheduleError: The options do not fit together.
    """
    if options.program:
        module, _ = load_own_model(options.program)(options.seed, 1)
        scale: LossScale = PerMicrobatch()
    else:
        module = Decoder(options.model, seed=options.seed)
        scale = PerToken() if options.model.per_token_loss else PerMicrobatch()
    return ModelChunk(
        module,
        recompute=options.recompute,
        order=options.order,
        delay_wgrad=options.delay_wgrad,
        seed=options.seed,
        loss_scale=scale,
    )


def random_microbatches(options: Options, step: int) -> list[Feeds]:
    """Microbatches of random tokens; each step's are others, the same for the same options."""
    if options.program:
        _, feeds = load_own_model(options.program)(options.seed + step, options.microbatches)
        return list(feeds)
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    shape = (options.batch, options.seq + 1)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(options.model.vocab, shape, generator=generator)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [draw() for _ in range(options.microbatches)]


def load_own_model(name: str) -> OwnModel:
    """Import `module:function`.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    rule = "must be MODULE:FUNCTION, importable from the current folder"
    if not module_name or not function_name:
        raise ConfigError(field="program", value=name, rule=rule)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: OwnModel = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(field="program", value=name, rule=f"{rule} ({error})") from error
    return function
