"""Attention by Transformer Engine.

Legend: B sequences, S positions, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common.recipe import Float8CurrentScaling

from overlap.backends.te_fused_attention import FusedAttention, check_tiles, chose_fused
from overlap.backends.te_scaling import keep_out_of_process_lists
from overlap.model.attention import CoreAttention
from overlap.model.config import Attention, ModelConfig

_IN_FULL = partial(te.autocast, enabled=False, recipe=Float8CurrentScaling())
"""Attention runs in the model's own type; naming a recipe spares making the default one at every call."""


class TECoreAttention(CoreAttention):
    """te.DotProductAttention for full causal sequences, or the kernels it chooses; torch's where a mask is given.

    Args:
        config: Heads, widths, dropout.
        modules: Always by its module.
    """

    def __init__(self, config: ModelConfig, modules: bool) -> None:
        super().__init__()
        self.config = config
        self.by_modules = modules
        self.bind()

    def bind(self) -> None:
        """Make the module; it holds no parameter. What it chose for a shape is asked anew."""
        self._chosen: dict[tuple[Any, ...], FusedAttention | None] = {}
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
        """Leave out the module and what it chose."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_module", "_chosen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.bind()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None) -> Tensor:
        """[B, H, S, d] -> [B, S, H*d]."""
        if mask is not None:
            return super().forward(query, key, value, dropout, mask)
        # It reads [B, S, H, d] as if contiguous, whatever the strides: views of [B, H, S, d] would be other numbers.
        query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        fused = None if self.by_modules else self._fused(query, key, value, dropout)
        return self._by_module(query, key, value, dropout) if fused is None else fused(query, key, value)

    def _by_module(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        (module,) = self._module
        module.train(self.training)
        with _IN_FULL(), nullcontext() if dropout else _generator_at_rest():
            result: Tensor = module(query, key, value)
        if self.by_modules and chose_fused():
            check_tiles(query.shape[1], self.training or torch.is_grad_enabled())
        return result

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> FusedAttention | None:
        """The kernels that the module takes for this shape; None: others than we know."""
        training = self.training or torch.is_grad_enabled()
        deterministic = self._module[0].deterministic or torch.are_deterministic_algorithms_enabled()
        shape = (query.shape, key.shape, query.dtype, query.device, training, dropout, deterministic)
        if shape not in self._chosen:
            with torch.no_grad(), _generator_at_rest():
                self._by_module(query, key, value, dropout)
            settings = FusedAttention(training, query.shape[-1] ** -0.5, dropout, deterministic)
            self._chosen[shape] = settings if chose_fused() else None
        return self._chosen[shape]


@contextmanager
def _generator_at_rest() -> Iterator[None]:
    """Put the generator back afterwards: the kernel moves it on without dropout too, though it draws nothing."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    try:
        yield
    finally:
        generator.set_offset(offset)
