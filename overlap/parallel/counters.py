"""What routers count, over all data ranks: the selection bias must move alike on every replica."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from overlap.model.router import Router
from overlap.parallel.world import World


@torch.no_grad()
def share_counters(module: nn.Module, world: World) -> None:
    """After a step, before update_expert_bias: counts become those of all data ranks, logged losses their mean.

    All buffers are then the same on all data ranks, as their parameters are.
    """
    routers = [part for part in module.modules() if isinstance(part, Router)]
    if world.groups is None or not routers:
        return
    counts = torch.cat([router.tokens_per_expert for router in routers])
    dist.all_reduce(counts, group=world.data_group)
    sizes = [router.tokens_per_expert.numel() for router in routers]
    for router, part in zip(routers, torch.split(counts, sizes), strict=True):
        router.tokens_per_expert.copy_(part)
    logged = [loss for router in routers for loss in (router.aux_loss_sum, router.z_loss_sum)]
    losses = torch.stack(logged)
    dist.all_reduce(losses, group=world.data_group)
    for buffer, loss in zip(logged, losses / world.layout.data, strict=True):
        buffer.copy_(loss)
