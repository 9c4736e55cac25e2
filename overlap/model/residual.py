"""How a sub-layer joins the residual stream: by plain addition, or by hyper-connections.

Legend: B sequences, S positions, C hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from overlap.model.config import ModelConfig
from overlap.model.dropout import dropout
from overlap.model.hyper_connections import Contraction, HyperConnection, expand_streams


class PlainResidual(nn.Module):
    """x + dropout(F(x)). Its backward needs no activation."""

    carried = ("residual",)
    """What merge() needs beside the sub-layer's output."""
    linear = True
    """merge() is linear in its arguments, so adjoint() needs no activation (R8)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def split(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sub-layer's input and what merge() needs: [B, S, C] both."""
        return hidden, (hidden,)

    def merge(self, update: Tensor, *carried: Tensor) -> Tensor:
        """Add the sub-layer's output [B, S, C] to the residual stream."""
        (residual,) = carried
        # In the type of the gradient that adjoint() will see, so that both draw the same noise under autocast.
        update = update.to(residual.dtype)
        return dropout(update, self.config.dropout, training=self.training) + residual


Residual = PlainResidual | HyperConnection


def make_residual(config: ModelConfig) -> Residual:
    """What the config asks for."""
    return PlainResidual(config) if config.mhc is None else HyperConnection(config, config.mhc)


def make_contraction(config: ModelConfig) -> nn.Module:
    """From streams [B, S, n, C] to one [B, S, C]; nothing to do where there is one."""
    return nn.Identity() if config.mhc is None else Contraction(config, config.mhc)


def expand(hidden: Tensor, config: ModelConfig) -> Tensor:
    """The residual state that the first layer reads, from the embedding [B, S, C]."""
    return hidden if config.mhc is None else expand_streams(hidden, config.mhc)
