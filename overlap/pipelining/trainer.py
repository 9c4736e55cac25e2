"""PipelineTrainer: steps of AdamW on microbatches of text, through a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from overlap.engine import Feeds
from overlap.model.router import update_expert_bias
from overlap.parallel.agree import gather
from overlap.parallel.clip import clip_together
from overlap.parallel.counters import share_logged_losses
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.step import train_pipeline
from overlap.training.trainer import StepReport


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
        self.chunk = pipeline.first
        self.optimizer = torch.optim.AdamW(pipeline.parameter_groups(), lr=learning_rate)

    def step(self) -> StepReport:
        """One step: forward, backward, clip, AdamW, expert bias."""
        number, world = self.chunk.steps_done, self.chunk.world
        microbatches = self.data(number)
        begin = time.perf_counter()
        losses = train_pipeline(self.pipeline, microbatches)
        clip_together(self.pipeline.chunks, self.max_norm, frozenset({id(self.pipeline.shared.last)}))
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
