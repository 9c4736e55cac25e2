"""Fixed choices of experts, for studies of load: they take the router's place, scores only weigh the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from overlap.model.router import Router
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class InTurn:
    """Token t's slot j goes to expert (t*k + j) of the first `experts`, counted in turn: an even load on these."""

    experts: int

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        """Ids [T, k] for scores [T, E]."""
        copies = torch.arange(scores.shape[0] * k, device=scores.device)
        return (copies % self.experts).view(-1, k)


def fix_route(model: nn.Module, experts: int) -> None:
    """Make every router of a model send its tokens to the first `experts` experts in turn.

    Raises:
        ConfigError: A token has more copies than there are experts to take them, or the choice is limited to groups.
    """
    for router in model.modules():
        if isinstance(router, Router):
            config = router.config
            if config.topk > experts:
                rule = f"must not exceed the experts that this route leaves ({experts})"
                raise ConfigError(field="topk", value=config.topk, rule=rule)
            if config.topk_groups < config.expert_groups:
                rule = "has no effect with a fixed route: leave it at expert_groups"
                raise ConfigError(field="topk_groups", value=config.topk_groups, rule=rule)
            router.select = InTurn(experts)
