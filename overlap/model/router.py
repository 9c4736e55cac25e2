"""Router: which experts a token visits, with what weight, and the losses and counters that keep the load even.

Owns the selection bias and the counters; changes them only through effects (R5) and update_expert_bias().
Legend: T tokens, C hidden, E experts, k experts per token, G groups.
Sources: Switch Transformer (2021) eq. 4 for the load-balancing loss, ST-MoE (2022) eq. 5 for the z-loss,
DeepSeek-V3 (2024) section 2.1.2 for sigmoid scores, group limit and selection bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.dispatch import Routing, make_routing
from overlap.model.config import ModelConfig, Score
from overlap.model.fused import fused
from overlap.model.logits import wide_logits
from overlap.model.precision import DTYPES, WideBuffers, wide_dtype
from overlap.model.scores import scored
from overlap.parallel.world import SOLO, World

Select = Callable[[Tensor, int], Tensor]
"""select(scores [T, n], k) -> ids [T, k] int64: the k largest per row, distinct."""
Effects = tuple[tuple[str, Callable[[Tensor], None]], ...]

_GROUP_SCORE_OF = 2
"""A group is scored by the sum of this many of its best experts."""
_TINY = 1e-20


class Routed(NamedTuple):
    """What the router gives for T tokens."""

    probs: Tensor
    """[T, k], float32 or wider, with gradient."""
    routing: Routing
    losses: tuple[Tensor, ...]
    """Scalars, one per name in Router.loss_names."""


def select_largest(scores: Tensor, k: int) -> Tensor:
    """The ids of the k largest scores per row: [T, n] -> [T, k]."""
    return scores.topk(k, dim=-1).indices


class Router(WideBuffers):
    """Scores experts in float32 (float64 in a float64 model) and chooses top-k of them.

    Attributes:
        select: How the k largest are found; replace it to study ties.
        expert_bias: [E], added to the scores for selection only.
        tokens_per_expert: [E] int64, copies counted since the last update_expert_bias().
        aux_loss_sum, z_loss_sum: Scalars, the losses of all microbatches of successful steps, as they entered the
            objective; set to zero by whoever reports them.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    aux_loss_sum: Tensor
    z_loss_sum: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.select: Select = select_largest
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        wide = wide_dtype(DTYPES[config.dtype])
        self.register_buffer("expert_bias", torch.zeros(config.experts, dtype=wide))
        self.register_buffer("tokens_per_expert", torch.zeros(config.experts, dtype=torch.int64))
        self.register_buffer("aux_loss_sum", torch.zeros((), dtype=wide))
        self.register_buffer("z_loss_sum", torch.zeros((), dtype=wide))

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The auxiliary losses in use, in the order of Routed.losses."""
        weights = (("aux", self.config.aux_coefficient), ("z", self.config.z_coefficient))
        return tuple(name for name, weight in weights if weight > 0)

    @property
    def effects(self) -> Effects:
        """(value, apply) pairs of the stage that holds this router; its values `counts` and the losses."""
        logs = {"aux": self.log_aux, "z": self.log_z}
        return (("counts", self.count), *((name, logs[name]) for name in self.loss_names))

    def forward(self, x: Tensor, pinned: Routing | None = None, *, padding: Tensor | None = None) -> Routed:
        """Route tokens.

        Args:
            x: [T, C].
            pinned: A choice made before: probabilities and losses are computed at it and nothing is chosen (R7).
            padding: [T] bool, True where a token is padding: it goes to no expert and has no part in counts and
                losses. None: there is none.
        """
        logits = self._logits(x)
        if fused(logits):
            return self._by_kernel(logits, pinned, padding)
        scores = self._scores(logits)
        if pinned is None:
            pinned = make_routing(self._choose(scores.detach()), self.config.experts, padding, self.config.capacity)
        mean = _MeanOverTokens(padding)
        losses = {"aux": self._aux_loss, "z": self._z_loss}
        tokens = mean.count(x) if self.config.per_token_loss else 1
        return Routed(
            self._probabilities(scores, pinned.expert_ids),
            pinned,
            tuple(losses[name](logits, scores, pinned, mean) * tokens for name in self.loss_names),
        )

    def _by_kernel(self, logits: Tensor, pinned: Routing | None, padding: Tensor | None) -> Routed:
        """What forward() does with the logits, by a kernel of our own."""
        config = self.config
        if pinned is None:
            pinned = make_routing(self._pick(logits.detach()), config.experts, padding, config.capacity)
        probs, aux, z = scored(logits, pinned, padding, config)
        losses = {"aux": aux, "z": z}
        return Routed(probs, pinned, tuple(losses[name] for name in self.loss_names))

    def count(self, counts: Tensor) -> None:
        """Effect: add the copies per expert [E] of one microbatch; nothing in eval mode."""
        if self.training:
            self.tokens_per_expert.add_(counts)

    def log_aux(self, loss: Tensor) -> None:
        """Effect: add the load-balancing loss of one microbatch; nothing in eval mode."""
        if self.training:
            self.aux_loss_sum.add_(loss.detach())

    def log_z(self, loss: Tensor) -> None:
        """Effect: add the z-loss of one microbatch; nothing in eval mode."""
        if self.training:
            self.z_loss_sum.add_(loss.detach())

    def _logits(self, x: Tensor) -> Tensor:
        if self.training and self.config.jitter > 0:
            x = x.to(wide_dtype(x.dtype))
            x = x * torch.empty_like(x).uniform_(1 - self.config.jitter, 1 + self.config.jitter)
        return wide_logits(x, self.weight)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.config.score is Score.SIGMOID else logits.softmax(-1)

    def _pick(self, logits: Tensor) -> Tensor:
        """What a backend may do at once: [T, E] -> [T, k] int64."""
        return self._choose(self._scores(logits))

    def _choose(self, scores: Tensor) -> Tensor:
        """[T, E] -> [T, k] int64."""
        config = self.config
        if config.expert_bias:
            scores = scores + self.expert_bias
        if config.topk_groups < config.expert_groups:
            scores = self._limit_groups(scores)
        return self.select(scores, config.topk)

    def _limit_groups(self, scores: Tensor) -> Tensor:
        """Put the experts outside each token's best groups out of reach."""
        config = self.config
        grouped = scores.view(-1, config.expert_groups, config.experts // config.expert_groups)
        best = grouped.topk(min(_GROUP_SCORE_OF, grouped.shape[-1]), dim=-1).values.sum(-1)
        groups = self.select(best, config.topk_groups)
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, groups, False)
        return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(scores)

    def _probabilities(self, scores: Tensor, expert_ids: Tensor) -> Tensor:
        chosen = scores.gather(-1, expert_ids)
        if self.config.score is Score.SIGMOID and self.config.topk > 1:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY)
        return chosen * self.config.route_scale

    def _aux_loss(self, logits: Tensor, scores: Tensor, routing: Routing, mean: _MeanOverTokens) -> Tensor:
        """E * sum over experts of (share of copies) * (mean normalised score)."""
        config = self.config
        share = routing.counts.to(scores.dtype) / (mean.count(scores) * config.topk)
        normalised = mean(scores / (scores.sum(-1, keepdim=True) + _TINY))
        return (share * normalised).sum() * (config.experts * config.aux_coefficient)

    def _z_loss(self, logits: Tensor, scores: Tensor, routing: Routing, mean: _MeanOverTokens) -> Tensor:
        return mean(logits.logsumexp(-1).square()) * self.config.z_coefficient


class _MeanOverTokens:
    """Mean over the tokens that are no padding.

    Args:
        padding: [T] bool, or None.
    """

    def __init__(self, padding: Tensor | None) -> None:
        self._padding = padding

    def count(self, x: Tensor) -> Tensor | int:
        """Tokens of x [T, ...], at least 1."""
        return max(x.shape[0], 1) if self._padding is None else (~self._padding).sum().clamp(min=1)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, ...] -> [...]."""
        if self._padding is None:
            return x.mean(0)
        padding = self._padding.view(-1, *(1 for _ in x.shape[1:]))
        return x.masked_fill(padding, 0).sum(0) / self.count(x)


@torch.no_grad()
def update_expert_bias(model: nn.Module, world: World = SOLO) -> None:
    """Once per optimizer step: raise the bias of experts below the mean load, lower it above, restart the count.

    Args:
        model: Its routers are updated.
        world: The load is that of all ranks of the pipeline stage, so that the bias stays the same on them.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if world.groups is not None and routers:
        # One collective for all of them.
        loads = torch.stack([router.tokens_per_expert for router in routers])
        world.collectives.record("all_reduce", "tokens per expert", loads)
        dist.all_reduce(loads, group=world.data_group)
        for router, load in zip(routers, loads, strict=True):
            router.tokens_per_expert.copy_(load)
    for router in routers:
        if router.config.expert_bias:
            load = router.tokens_per_expert.double()
            step = (load.mean() - load).sign() * router.config.bias_rate
            router.expert_bias.add_(step.to(router.expert_bias.dtype))
        router.tokens_per_expert.zero_()
