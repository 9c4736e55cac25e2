"""Causal attention by the kernels that Transformer Engine's module would choose, without the module.

The module chooses anew at every call, moves the generator on whether or not anything is dropped, and takes several
times the launches' host time. Here it is asked once per shape. What it does not do with cuDNN's kernels for bfloat16
stays its own. No call reads or sets the generator on the host, so a graph may capture it, if sequences are whole tiles.
Legend: B sequences, S positions, H heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as chooser
from transformer_engine.pytorch.attention.dot_product_attention.utils import get_full_cu_seqlens
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    AttnBiasType,
    AttnMaskType,
    FusedAttnBackend,
    QKVFormat,
    QKVLayout,
    SoftmaxType,
)

from overlap.model.custom import apply
from recompute.errors import ConfigError
from recompute.rng import is_recorded

_TILE = 128
"""Positions of a tile. A backward with a part of one, as cuDNN launches it, cannot be launched again by a graph: it
would read memory that is gone."""
_DRAWS_PER_THREAD = 16
"""Random numbers that the kernel takes from the generator per thread, where it drops any."""
_LAYOUT, _FORMAT, _NO_FORMAT = QKVLayout["bshd_bshd_bshd"], QKVFormat["bshd"], QKVFormat[None]
_MASK = (AttnBiasType["no_bias"], AttnMaskType["causal"], SoftmaxType["vanilla"], (-1, 0), False)
"""No bias, causal, plain softmax, a window over all that is before; the diagonal begins top left."""
_NINE_MISSING = (None,) * 9
"""Padded lengths, pages, quantizers, bias, offsets, generator (the default one)."""


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Settings of one shape; a call attends."""

    training: bool
    """Whether a backward may follow."""
    scale: float
    dropout: float
    deterministic: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, S, H, d] each, contiguous -> [B, S, H*d]; key and value may have fewer heads."""
        return apply(_Attention, query, key, value, self)


def chose_fused() -> bool:
    """Whether Transformer Engine's module took cuDNN's kernels for bfloat16 when it was last called."""
    made = chooser._attention_backends
    kind = made["fused_attention_backend"]
    return bool(made["use_fused_attention"]) and kind is not None and int(kind) == FusedAttnBackend.F16_arbitrary_seqlen


def check_tiles(length: int, training: bool) -> None:
    """Refuse to have these kernels recorded for sequences with a part of a tile, if a backward may follow.

    A graphed step says so before it warms up; a capture of the caller's own is found while it runs.

    Raises:
        ConfigError: They would be.
    """
    if length % _TILE and training and (is_recorded() or torch.cuda.is_current_stream_capturing()):
        rule = f"a CUDA graph can hold Transformer Engine's attention for multiples of {_TILE} tokens a sequence only"
        raise ConfigError(field="seq", value=length, rule=rule)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, settings: FusedAttention) -> Tensor:
        length = query.shape[1]
        check_tiles(length, settings.training)
        ends = get_full_cu_seqlens(query.shape[0], length, query.device)
        draws = _DRAWS_PER_THREAD if settings.dropout else 0
        out, *rest = tex.fused_attn_fwd(
            length, length, settings.training, settings.scale, settings.dropout, True, _LAYOUT, _FORMAT, _NO_FORMAT,
            *_MASK, ends, ends, query, key, value, query.dtype, *_NINE_MISSING, draws, False, False,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, ends, *rest)
        ctx.settings = settings
        result: Tensor = out.view(*out.shape[:-2], -1)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, ends, *rest = ctx.saved_tensors
        settings: FusedAttention = ctx.settings
        length = query.shape[1]
        grads = tex.fused_attn_bwd(
            length, length, settings.scale, settings.dropout, True, _LAYOUT, _FORMAT, _FORMAT, _LAYOUT, _NO_FORMAT,
            _NO_FORMAT, *_MASK, settings.deterministic, ends, ends, query, key, value, out,
            grad.contiguous().view_as(out), query.dtype, list(rest), None, None, None, None, None, False,
        )  # fmt: skip
        return grads[0], grads[1], grads[2], None
