"""Presets: published models, and the grids that they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from overlap.model.config import DType, ModelConfig
from recompute.errors import ConfigError

DEEPSEEK_V3 = ModelConfig(
    layers=61, dense_layers=3, hidden=7168, heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64,
    value_dim=128, ffn_width=18432, experts=256, topk=8, expert_width=2048, shared_width=2048, expert_groups=8,
    topk_groups=4, route_scale=2.5, vocab=129280, mtp=1, mhc=4, max_seq=4096, dtype=DType.BFLOAT16,
)  # fmt: skip
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2) with four residual streams (arXiv 2512.24880)."""

PRESETS: Mapping[str, ModelConfig] = MappingProxyType({"deepseek-v3": DEEPSEEK_V3})
PRESET_SEQ: Mapping[str, int] = MappingProxyType({"deepseek-v3": 4096})
"""Tokens of a sequence."""


def load_preset(name: str) -> ModelConfig:
    """The model of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in PRESETS:
        raise ConfigError(field="preset", value=name, rule=f"must be {' or '.join(PRESETS)}")
    return PRESETS[name]
