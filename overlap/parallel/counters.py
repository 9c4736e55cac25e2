"""What routers log, over all data ranks: buffers are then the same on all of them, as their parameters are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from overlap.model.router import Router
from overlap.parallel.world import World


@torch.no_grad()
def share_logged_losses(module: nn.Module, world: World) -> None:
    """After a step, make the logged losses of routers the mean over all data ranks. Collective."""
    routers = [part for part in module.modules() if isinstance(part, Router)]
    if world.groups is None or not routers:
        return
    logged = [loss for router in routers for loss in (router.aux_loss_sum, router.z_loss_sum)]
    losses = torch.stack(logged)
    world.collectives.record("all_reduce", "logged losses", losses)
    dist.all_reduce(losses, group=world.data_group)
    for buffer, loss in zip(logged, losses / world.layout.data, strict=True):
        buffer.copy_(loss)
