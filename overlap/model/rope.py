"""Rotary position embedding (Su et al., 2021), halves rotated against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap.model.config import Attention, ModelConfig
from overlap.model.precision import DTYPES, WideBuffers, wide_dtype


class Rotary(WideBuffers):
    """Tables of one model, shared by its layers: cos and sin [max_seq, width/2], float32 (float64 in such a model)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.rope_dim if config.attention is Attention.MLA else config.head_dim
        steps = torch.arange(0, width, 2, dtype=torch.float64) / width
        angle = torch.outer(torch.arange(config.max_seq, dtype=torch.float64), config.rope_base**-steps)
        dtype = wide_dtype(DTYPES[config.dtype])
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate by position; computed wide, returned in x's type.

        Args:
            x: [..., S, width]; [B, H, S, width] if `positions` are given.
            positions: [B, S] int64; None: 0 to S-1.
        """
        length = x.shape[-2]
        cos, sin = (
            table[:length] if positions is None else table[positions].unsqueeze(1) for table in (self.cos, self.sin)
        )
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
