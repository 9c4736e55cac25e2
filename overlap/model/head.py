"""The end of the decoder: final norm, logits, loss.

Legend: B sequences, S positions, C hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from overlap.model.config import ModelConfig
from overlap.model.linear import Linear, linear
from overlap.model.norm import RMSNorm
from overlap.model.precision import wide_dtype

IGNORED = -100
"""Label of a position without loss."""


class Head(nn.Module):
    """Output matrix of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.projection = Linear(config.hidden, config.vocab)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Loss of a microbatch: hidden [B, S, C], labels [B, S] int64 -> scalar, float32 or wider."""
        return token_loss(self.projection(self.norm(hidden)), labels, per_token=self.config.per_token_loss)


class TiedHead(nn.Module):
    """Output matrix handed in: the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Loss of a microbatch: hidden [B, S, C], labels [B, S] int64, weight [V, C] -> scalar."""
        return token_loss(linear(self.norm(hidden), weight), labels, per_token=self.config.per_token_loss)


def token_loss(logits: Tensor, labels: Tensor, *, per_token: bool) -> Tensor:
    """Cross entropy over the positions whose label is not IGNORED.

    Args:
        logits: [B, S, V].
        labels: [B, S] int64.
        per_token: Sum over positions; else their mean, 0 if there are none.
    """
    wide = logits.flatten(0, 1).to(wide_dtype(logits.dtype))
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    if per_token:
        return total
    return total / (labels != IGNORED).sum().clamp(min=1)
