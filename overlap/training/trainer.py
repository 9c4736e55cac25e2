"""Trainer: steps of AdamW on microbatches of text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from overlap.chunk import ModelChunk, check_chunk
from overlap.cuda_graph import GraphedStep
from overlap.engine import Feeds
from overlap.model.router import update_expert_bias
from overlap.parallel.clip import clip_gradients
from overlap.parallel.counters import share_logged_losses
from overlap.scale import GivesSums
from overlap.step import Losses, train_step
from recompute.checks import check_positive
from recompute.config import check_bool
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step."""

    step: int
    loss: float
    """Mean of the main loss over the step's microbatches, of all ranks."""
    losses: Mapping[str, float]
    """The same for every loss of the head by its name: `loss`, and `mtp1_loss`, ... where there are MTP depths."""
    milliseconds: float
    tokens_per_second: float
    """Of all ranks together."""


class Trainer:
    """Drives a chunk with AdamW.

    Args:
        chunk: The model.
        data: `data(step)` gives that step's microbatches.
        learning_rate: Of AdamW.
        per_token: Whether a microbatch's loss is a sum over its tokens.
        graph: Whether steps are launched as one CUDA graph.

    Raises:
        ConfigError: With `graph`, settings that need the host in every step; `per_token` is not what the model says;
            another argument is not what it should be.
    """

    def __init__(
        self,
        chunk: ModelChunk,
        data: Callable[[int], Sequence[Feeds]],
        *,
        learning_rate: float = 3e-3,
        per_token: bool = False,
        graph: bool = False,
    ) -> None:
        check_chunk(chunk)
        check_positive("learning_rate", learning_rate)
        check_bool("per_token", per_token)
        check_bool("graph", graph)
        if isinstance(chunk.module, GivesSums) and per_token != chunk.module.per_token_loss:
            rule = f"the model's losses are {'means' if per_token else 'sums over tokens'}: as per_token_loss says"
            raise ConfigError(field="per_token", value=per_token, rule=rule)
        self.chunk = chunk
        self.data = data
        self.per_token = per_token
        self._train: Callable[[Sequence[Feeds]], list[Losses]] = (
            GraphedStep(chunk) if graph else partial(train_step, chunk)
        )
        self.optimizer = torch.optim.AdamW(chunk.parallel.parameter_groups(chunk), lr=learning_rate)

    def step(self) -> StepReport:
        """One step: forward, backward, clip, AdamW, expert bias."""
        number = self.chunk.steps_done
        microbatches = self.data(number)
        begin = time.perf_counter()
        losses = self._train(microbatches)
        clip_gradients(self.chunk, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        share_logged_losses(self.chunk, self.chunk.world)
        update_expert_bias(self.chunk, self.chunk.world)
        seconds = time.perf_counter() - begin
        tokens = int(self._over_ranks([sum(feeds["ids"].numel() for feeds in microbatches)])[0])
        # a layer's own losses are named after the layer
        names = [loss.value for loss in self.chunk.program.losses if "." not in loss.value]
        sums = [float(torch.stack([item[name].double() for item in losses]).sum()) for name in names]
        parts = tokens if self.per_token else len(losses) * self.chunk.world.layout.data
        means = {name: total / parts for name, total in zip(names, self._over_ranks(sums), strict=True)}
        return StepReport(
            step=number,
            loss=means["loss"],
            losses=means,
            milliseconds=seconds * 1e3,
            tokens_per_second=tokens / seconds,
        )

    def _over_ranks(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks that draw data."""
        world = self.chunk.world
        if world.groups is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=world.device)
        world.collectives.record("all_reduce", "report", total)
        dist.all_reduce(total, group=world.data_group)
        sums: list[float] = total.tolist()
        return sums
