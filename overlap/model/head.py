"""The end of the decoder: final norm, logits, loss.

Legend: B sequences, S positions, C hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from overlap.model.chunked_loss import linear_cross_entropy
from overlap.model.config import ModelConfig
from overlap.model.linear import Linear
from overlap.model.norm import RMSNorm
from overlap.model.precision import wide_dtype
from overlap.model.residual import make_contraction
from overlap.model.sequences import Sequences, as_sequences, sequence_feeds

IGNORED = -100
"""Label of a position without loss."""


class AnyHead(nn.Module):
    """Contraction of the streams, final norm, logits, losses of the main model and of every MTP depth."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.contraction = make_contraction(config)
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    @property
    def feeds(self) -> tuple[str, ...]:
        """What forward() reads of the feeds: the targets, and where sequences end if targets are to be moved."""
        moves = self.config.mtp > 0 or not self.config.labels
        targets = "labels" if self.config.labels else "ids"
        return (targets, *(sequence_feeds(self.config) if moves else ()))

    @property
    def loss_names(self) -> tuple[str, ...]:
        """What forward() returns: `loss`, then `mtp1_loss`, `mtp2_loss`, ..."""
        return ("loss", *(f"mtp{depth + 1}_loss" for depth in range(self.config.mtp)))

    def loss_weight(self, name: str) -> float:
        """Factor on one of them in the objective."""
        return 1.0 if name == "loss" else self.config.mtp_scale / self.config.mtp

    def total_loss(self, hidden: Tensor, labels: Tensor, *tied: Tensor, detach: bool = False) -> Tensor:
        """Sum of the cross entropy over tokens: [T, C], [T] -> scalar; `detach`: no gradient for the output matrix."""
        raise NotImplementedError

    def forward(self, state: Tensor, *reads: Tensor) -> Any:
        """Losses of a microbatch: scalars, float32 or wider.

        Args:
            state: Of the last decoder layer, [B, S, C] or [B, S, n, C].
            reads: The output [B, S, C] of each MTP depth, the feeds, and the output matrix [V, C] if it is tied.
        """
        config = self.config
        depths, rest = reads[: config.mtp], reads[config.mtp :]
        feeds, tied = rest[: len(self.feeds)], rest[len(self.feeds) :]
        sequences = as_sequences(self.feeds[1:], feeds[1:])
        labels = feeds[0] if config.labels else derived_labels(feeds[0], sequences)
        total = partial(self._loss, tied)
        losses = [total(self.norm(self.contraction(state)), labels, per_token=config.per_token_loss)]
        for depth, output in enumerate(depths, start=1):
            ahead = labels_ahead(labels, sequences, depth)
            mean = total(output, ahead, per_token=False, detach=config.mtp_detach)
            losses.append(mean * (labels != IGNORED).sum() if config.per_token_loss else mean)
        return tuple(losses) if config.mtp else losses[0]

    def _loss(
        self, tied: Sequence[Tensor], hidden: Tensor, labels: Tensor, *, per_token: bool, detach: bool = False
    ) -> Tensor:
        """Loss over the positions [B, S] whose label is not IGNORED: its sum, or its mean (0 if there are none)."""
        total = self.total_loss(hidden.flatten(0, 1), labels.flatten(), *tied, detach=detach)
        return total if per_token else total / (labels != IGNORED).sum().clamp(min=1)


class Head(AnyHead):
    """Output matrix of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.projection = Linear(config.hidden, config.vocab)

    def total_loss(self, hidden: Tensor, labels: Tensor, *tied: Tensor, detach: bool = False) -> Tensor:
        """Without logits; through them where an adapter stands in for the projection."""
        projection = self.projection
        if type(projection) is Linear:
            weight = projection.weight.detach() if detach else projection.weight
            return linear_cross_entropy(hidden, weight, labels, ignored=IGNORED)
        if detach:
            frozen = {name: parameter.detach() for name, parameter in projection.named_parameters()}
            logits = functional_call(projection, frozen, (hidden,))
        else:
            logits = projection(hidden)
        return _cross_entropy(logits.to(wide_dtype(logits.dtype)), labels)


class TiedHead(AnyHead):
    """Output matrix handed in: the embedding."""

    def total_loss(self, hidden: Tensor, labels: Tensor, *tied: Tensor, detach: bool = False) -> Tensor:
        """Without logits."""
        (weight,) = tied
        return linear_cross_entropy(hidden, weight.detach() if detach else weight, labels, ignored=IGNORED)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over tokens: [T, V], [T] -> scalar; labels outside the vocabulary as without logits.

    torch's own would fail on the device, which takes the process with it: here loss and gradients are NaN.
    """
    given = labels.masked_fill(labels == IGNORED, 0)
    unknown = (given < 0) | (given >= logits.shape[-1])
    total = F.cross_entropy(logits, labels.masked_fill(unknown, 0), ignore_index=IGNORED, reduction="sum")
    # a factor of one changes no bit, of the gradients either
    return total * torch.ones_like(total).masked_fill_(unknown.any(), math.nan)


def derived_labels(ids: Tensor, sequences: Sequences) -> Tensor:
    """The next token of each token's sequence, IGNORED at its end and at padding: [B, S] int64."""
    labels = sequences.ahead(ids, 1, fill=IGNORED)
    mask = sequences.padding_mask
    if mask is None:
        return labels
    return labels.masked_fill(mask | sequences.ahead(mask, 1, fill=True), IGNORED)


def labels_ahead(labels: Tensor, sequences: Sequences, depth: int) -> Tensor:
    """Targets of an MTP depth: labels moved `depth` places, IGNORED past the sequence's end and at padding."""
    moved = sequences.ahead(labels, depth, fill=IGNORED)
    return moved if sequences.padding_mask is None else moved.masked_fill(sequences.padding_mask, IGNORED)
