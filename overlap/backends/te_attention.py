"""Norm and attention by Transformer Engine.

Legend: B sequences, S positions, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.constants import TE_DType

from overlap.backends.te_scaling import keep_out_of_process_lists
from overlap.model.attention import CoreAttention
from overlap.model.config import Attention, ModelConfig
from overlap.model.custom import apply
from overlap.model.linear import autocast_like

_IN_FULL = partial(te.autocast, enabled=False, recipe=Float8CurrentScaling())
"""Attention runs in the model's own type; naming a recipe spares making the default one at every call."""


class TENorm(nn.Module):
    """In the place of model.norm.RMSNorm.

    Args:
        weight: Its parameter, [width].
        eps: Added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width], same type."""
        return apply(_RMSNorm, x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = autocast_like(x).contiguous().view(-1, x.shape[-1])
        matched = weight.to(rows.dtype)
        y, _, scale = tex.rmsnorm_fwd(rows, matched, eps, None, None, TE_DType[rows.dtype], 0, False)
        ctx.save_for_backward(rows, scale, weight)
        result: Tensor = y.view(x.shape)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, scale, weight = ctx.saved_tensors
        matched = weight.to(rows.dtype)
        grad_rows, grad_weight = tex.rmsnorm_bwd(
            grad.to(rows.dtype).contiguous().view_as(rows), rows, scale, matched, 0, False
        )
        return grad_rows.view(grad.shape), grad_weight.view_as(weight).to(weight.dtype), None


class TECoreAttention(CoreAttention):
    """te.DotProductAttention for full causal sequences; torch's where a mask says who attends to whom.

    Args:
        config: Heads, widths, dropout.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.bind()

    def bind(self) -> None:
        """Make the module; it holds no parameter."""
        config = self.config
        latent = config.attention is Attention.MLA
        widths = (config.nope_dim + config.rope_dim, config.value_dim) if latent else (config.head_dim,) * 2
        self._module: tuple[Any, ...] = (
            te.DotProductAttention(
                config.heads,
                widths,
                num_gqa_groups=config.heads if latent else config.kv_heads,
                attention_dropout=config.attention_dropout,
                qkv_format="bshd",
                attn_mask_type="causal",
            ),
        )
        keep_out_of_process_lists(self._module[0])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module out."""
        return {name: value for name, value in self.__dict__.items() if name != "_module"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.bind()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None) -> Tensor:
        """[B, H, S, d] -> [B, S, H*d]."""
        if mask is not None:
            return super().forward(query, key, value, dropout, mask)
        (module,) = self._module
        module.train(self.training)
        # It reads [B, S, H, d] as if contiguous, whatever the strides: views of [B, H, S, d] would be other numbers.
        query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        with _IN_FULL(), nullcontext() if dropout else _generator_at_rest():
            result: Tensor = module(query, key, value)
        return result


@contextmanager
def _generator_at_rest() -> Iterator[None]:
    """Put the generator back afterwards: the kernel moves it on without dropout too, though it draws nothing."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    try:
        yield
    finally:
        generator.set_offset(offset)
