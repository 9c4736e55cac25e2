"""Trainer: steps of AdamW on microbatches of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap.chunk import ModelChunk
from overlap.engine import Feeds
from overlap.model.router import update_expert_bias
from overlap.parallel.clip import clip_gradients
from overlap.parallel.counters import share_counters
from overlap.parallel.world import SOLO, World
from overlap.step import train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step."""

    step: int
    loss: float
    """Mean over the step's microbatches, on all data ranks, of the main loss."""
    losses: Mapping[str, float]
    """The same for every loss of the head by its name: `loss`, and `mtp1_loss`, ... where there are MTP depths."""
    milliseconds: float
    tokens_per_second: float
    """Of all data ranks."""


class Trainer:
    """Drives a chunk with AdamW.

    Args:
        chunk: The model.
        data: `data(step)` gives that step's microbatches.
        learning_rate: Of AdamW.
        per_token: Whether a microbatch's loss is a sum over its tokens.
        world: The ranks that train together, each on data of its own.
    """

    def __init__(
        self,
        chunk: ModelChunk,
        data: Callable[[int], Sequence[Feeds]],
        *,
        learning_rate: float = 3e-3,
        per_token: bool = False,
        world: World = SOLO,
    ) -> None:
        self.chunk = chunk
        self.data = data
        self.per_token = per_token
        self.world = world
        self.optimizer = torch.optim.AdamW(chunk.parallel.parameter_groups(chunk), lr=learning_rate)

    def step(self) -> StepReport:
        """One step: forward, backward, clip, AdamW, expert bias."""
        number = self.chunk.steps_done
        microbatches = self.data(number)
        begin = time.perf_counter()
        losses = train_step(self.chunk, microbatches)
        clip_gradients(self.chunk, self.world, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        share_counters(self.chunk, self.world)
        update_expert_bias(self.chunk)
        seconds = time.perf_counter() - begin
        tokens = sum(feeds["ids"].numel() for feeds in microbatches)
        # a layer's own losses are named after the layer
        names = [loss.value for loss in self.chunk.program.losses if "." not in loss.value]
        means = self._over_ranks({name: self._mean_loss([item[name] for item in losses], tokens) for name in names})
        return StepReport(
            step=number,
            loss=means["loss"],
            losses=means,
            milliseconds=seconds * 1e3,
            tokens_per_second=tokens * self.world.layout.data / seconds,
        )

    def _mean_loss(self, losses: Sequence[torch.Tensor], tokens: int) -> float:
        total = float(torch.stack([loss.double() for loss in losses]).sum())
        return total / (tokens if self.per_token else len(losses))

    def _over_ranks(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The mean over the data ranks of each."""
        if self.world.groups is None:
            return means
        values = torch.tensor(list(means.values()), dtype=torch.float64, device=self.world.device)
        dist.all_reduce(values, group=self.world.data_group)
        return dict(zip(means, (values / self.world.layout.data).tolist(), strict=True))
