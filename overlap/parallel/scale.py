"""The loss scale of a mean over all tokens of all data ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap.parallel.world import World
from overlap.scale import PerToken


class PerTokenOfRanks:
    """Each microbatch's loss is a sum over tokens; the step's is the mean over all tokens of all data ranks.

    Gradients are averaged over the data ranks afterwards, so a rank's factor is that many times one over all tokens.
    Counting is collective: every data rank calls it once per step.

    Args:
        world: The ranks.
        own: How a rank counts its own tokens.
    """

    per_token = True

    def __init__(self, world: World, own: PerToken = PerToken()) -> None:  # noqa: B008 (frozen)
        self._world = world
        self._own = own

    def __repr__(self) -> str:
        """The settings, which ranks compare."""
        return f"PerTokenOfRanks({self._own})"

    def factor(self, microbatches: Sequence[Mapping[str, Any]], accumulate: int, total_tokens: int | None) -> float:
        """Data ranks over the tokens of all of them; `total_tokens` are this rank's, as PerToken takes them."""
        tokens = self._own.tokens(microbatches, accumulate, total_tokens)
        total = torch.tensor(tokens, dtype=torch.int64, device=self._world.device)
        self._world.collectives.record("all_reduce", "tokens", total)
        dist.all_reduce(total, group=self._world.data_group)
        return self._world.layout.data / max(int(total), 1)
