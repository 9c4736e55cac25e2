"""Two products in 8 bits that read one input, of one cast of it (backend te).

In latent attention the projections to the query and to the latent read what the layer's norm gives. See te_linear.
"""

from __future__ import annotations

from torch import Tensor, nn

from overlap.backends.te_layers import TELinear, is_plain
from overlap.model.linear import LinearPair


class TELinearPair(LinearPair):
    """In the place of model.linear.LinearPair."""

    def forward(self, first: nn.Module, second: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., I] -> [..., O] of each; one after the other where they cast unlike, or a call of one is seen."""
        if (
            type(first) is TELinear
            and type(second) is TELinear
            and first.shares_casts(second)
            and is_plain(first)
            and is_plain(second)
        ):
            return first.both(second, x)
        return super().forward(first, second, x)
