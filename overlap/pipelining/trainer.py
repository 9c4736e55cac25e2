"""PipelineTrainer: steps of AdamW on microbatches of text, through a pipeline.

Gradients are averaged over the replicas of a stage when the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.engine import Feeds
from overlap.model.experts import GroupedExperts
from overlap.model.router import update_expert_bias
from overlap.parallel.agree import gather
from overlap.parallel.counters import share_logged_losses
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.step import train_pipeline
from overlap.training.trainer import StepReport

_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""


class PipelineTrainer:
    """Drives this rank's share of a pipeline with AdamW.

    Args:
        pipeline: The share.
        data: `data(step)` gives that step's microbatches, the same on all ranks of the pipeline.
        learning_rate: Of AdamW.
        per_token: Whether a microbatch's loss is a sum over its tokens.
        max_norm: Gradients are scaled so that the norm over the whole model is at most this.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        data: Callable[[int], Sequence[Feeds]],
        *,
        learning_rate: float = 3e-3,
        per_token: bool = False,
        max_norm: float = 1.0,
    ) -> None:
        self.pipeline = pipeline
        self.data = data
        self.per_token = per_token
        self.max_norm = max_norm
        self.chunk = pipeline.lead
        self.optimizer = torch.optim.AdamW(list(pipeline.named_parameters().values()), lr=learning_rate)

    def step(self) -> StepReport:
        """One step: forward, backward, average, clip, AdamW, expert bias."""
        number, world = self.chunk.steps_done, self.chunk.world
        microbatches = self.data(number)
        begin = time.perf_counter()
        losses = train_pipeline(self.pipeline, microbatches)
        average_gradients(self.pipeline)
        clip_gradients(self.pipeline, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for chunk in self.pipeline.chunks:
            share_logged_losses(chunk, world)
            update_expert_bias(chunk, world)
        seconds = time.perf_counter() - begin
        # a layer's own losses are named after the layer
        own = {name: sum(float(item[name]) for item in losses) for name in losses[0] if "." not in name}
        everyone = gather(world, own)
        names = dict.fromkeys(name for sums in everyone for name in sums)
        replicas = world.layout.data
        tokens = replicas * sum(feeds["ids"].numel() for feeds in microbatches)
        parts = tokens if self.per_token else len(losses) * replicas
        means = {name: sum(sums.get(name, 0.0) for sums in everyone) / parts for name in names}
        return StepReport(
            step=number,
            loss=means["loss"],
            losses=means,
            milliseconds=seconds * 1e3,
            tokens_per_second=tokens / seconds,
        )


def average_gradients(pipeline: Pipeline) -> None:
    """Average over the ranks that draw data; an expert's gradient has the tokens of the ranks that it serves already.

    Collective over the stage's ranks.
    """
    world = pipeline.lead.world
    if world.groups is None or world.layout.data == 1:
        return
    dense, experts = _apart(pipeline)
    for parameters, group in ((dense, world.data_group), (experts, world.expert_data_group)):
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= world.layout.data


def clip_gradients(pipeline: Pipeline, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm over the whole model is at most `max_norm`; the same on every rank.

    Collective. An embedding that two stages hold counts once.

    Returns:
        The norm before.
    """
    world = pipeline.lead.world
    dense, experts = _apart(pipeline)
    counted = [parameter for parameter in dense if parameter is not pipeline.shared.last]
    total, spread = _square(counted, world.device), _square(experts, world.device)
    if world.groups is not None:
        dist.all_reduce(spread, group=world.ep_group)
        total = total + spread
        dist.all_reduce(total, group=world.groups.pp)
    else:
        total = total + spread
    norm = total.sqrt()
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for parameter in (*dense, *experts):
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def _apart(pipeline: Pipeline) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that all ranks of a stage hold, and those of its experts."""
    experts = {
        id(parameter)
        for chunk in pipeline.chunks
        for module in chunk.modules()
        if isinstance(module, GroupedExperts)
        for parameter in module.parameters()
    }
    every = list(pipeline.named_parameters().values())
    return [p for p in every if id(p) not in experts], [p for p in every if id(p) in experts]


def _square(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    return total
