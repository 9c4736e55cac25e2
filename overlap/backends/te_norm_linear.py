"""A norm and the product behind it by one module of Transformer Engine (te.LayerNormLinear; backend te-modules).

It stands where a norm feeds exactly one product: in latent attention's query and key/value projections. A layer's own
norms feed several products, the router or a dispatch, the head's the loss: they stay norms by themselves.
Parameters, buffers and the state of delayed scaling stay in norm and product, under their names.
"""

from __future__ import annotations

from torch import Tensor, nn

from overlap.backends.te_layers import TEModuleLinear, is_plain
from overlap.backends.te_norm import TENorm
from overlap.model.norm import NormThenLinear


class TENormThenLinear(NormThenLinear):
    """In the place of model.norm.NormThenLinear."""

    def forward(self, norm: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; one after the other where either was replaced, or has hooks that would see it run."""
        if type(norm) is TENorm and type(linear) is TEModuleLinear and is_plain(norm) and is_plain(linear):
            return linear.behind_norm(norm.weight, norm.eps, x)
        return super().forward(norm, linear, x)
