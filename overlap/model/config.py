"""ModelConfig: the shape of the decoder; every rule is checked when it is made. Never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from recompute.errors import ConfigError


class Attention(StrEnum):
    """Kind of attention."""

    MLA = "mla"
    """Multi-head latent attention: keys and values from one low-rank latent, a decoupled rotary part."""
    GQA = "gqa"
    """Grouped-query attention: `kv_heads` key/value heads shared by `heads` query heads."""


class Score(StrEnum):
    """How router logits become expert scores."""

    SIGMOID = "sigmoid"
    """Each expert on its own; the chosen scores are divided by their sum when topk > 1 (DeepSeek-V3)."""
    SOFTMAX = "softmax"
    """Over all experts, not renormalised after the choice."""


class DType(StrEnum):
    """Parameter and activation type."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a DeepSeek-V3-like decoder; the defaults are a tiny model over bytes.

    Raises:
        ConfigError: A value breaks a rule; names field, value and rule.
    """

    layers: int = 4
    """Decoder layers; 0 leaves embedding and head."""
    dense_layers: int = 0
    """Leading layers with a dense feed-forward in place of experts."""
    hidden: int = 32
    """Width of the residual stream."""
    heads: int = 2
    """Query heads."""
    kv_heads: int = 1
    """Key/value heads (gqa only); divides `heads`."""
    attention: Attention = Attention.MLA
    """Kind of attention."""
    q_rank: int = 0
    """Rank of the query projection (mla only); 0: one full matrix."""
    kv_rank: int = 16
    """Width of the key/value latent (mla only)."""
    nope_dim: int = 16
    """Head width without rotary (mla only)."""
    rope_dim: int = 8
    """Head width with rotary (mla only); even."""
    value_dim: int = 16
    """Head width of values (mla only)."""
    head_dim: int = 16
    """Head width (gqa only); even."""
    ffn_width: int = 64
    """Inner width of a dense feed-forward."""
    experts: int = 4
    """Experts of a MoE layer."""
    topk: int = 2
    """Experts per token."""
    expert_width: int = 24
    """Inner width of one expert."""
    shared_width: int = 24
    """Inner width of the shared expert; 0: no shared expert."""
    expert_groups: int = 1
    """Groups the experts are cut into; divides `experts`."""
    topk_groups: int = 1
    """Groups a token may choose from."""
    score: Score = Score.SIGMOID
    """How logits become scores."""
    route_scale: float = 1.0
    """Factor on the probabilities of the chosen experts."""
    aux_coefficient: float = 0.01
    """Weight of the load-balancing loss; 0: none."""
    z_coefficient: float = 0.001
    """Weight of the loss on squared log-partition of the router; 0: none."""
    jitter: float = 0.0
    """Router input is multiplied with uniform noise in [1 - jitter, 1 + jitter] in training."""
    expert_bias: bool = True
    """Add to the scores, for selection only, a bias that evens out the load (auxiliary-loss-free balancing)."""
    bias_rate: float = 0.001
    """Step of that bias per update."""
    dropout: float = 0.0
    """Dropout on what attention and feed-forward add to the residual stream."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    vocab: int = 256
    """Token ids."""
    tied: bool = False
    """Use the embedding as the output matrix too."""
    per_token_loss: bool = False
    """Loss of a microbatch: False the mean over its tokens, True the sum (the step divides by all tokens)."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    max_seq: int = 1024
    """Longest sequence."""
    dtype: DType = DType.FLOAT32
    """Parameter and activation type; the router computes in float32, or float64 in a float64 model."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_unused(self)
        _check_relations(self)


_COUNTS = {"layers": 0, "dense_layers": 0, "q_rank": 0, "shared_width": 0}
"""Smallest allowed value of the integer fields where it is not 1."""
_ENUMS: dict[str, type[StrEnum]] = {"attention": Attention, "score": Score, "dtype": DType}
_BELOW_ONE = ("jitter", "dropout", "attention_dropout")
_POSITIVE = ("route_scale", "norm_eps", "rope_base")
_NOT_NEGATIVE = ("aux_coefficient", "z_coefficient", "bias_rate")


def _check_types(config: ModelConfig) -> None:
    for name, field in ModelConfig.__dataclass_fields__.items():
        value = getattr(config, name)
        if field.type == "int":
            _check_count(name, value, _COUNTS.get(name, 1))
        elif field.type == "float":
            _check_number(name, value)
        elif field.type == "bool" and type(value) is not bool:
            raise ConfigError(field=name, value=value, rule="must be True or False")
    for name, kind in _ENUMS.items():
        object.__setattr__(config, name, _member(name, getattr(config, name), kind))


def _check_count(name: str, value: object, minimum: int) -> None:
    # bool is an int to Python; True layers is a mistake
    if type(value) is not int or value < minimum:
        raise ConfigError(field=name, value=value, rule=f"must be an integer, {minimum} or more")


def _check_number(name: str, value: object) -> None:
    if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
        raise ConfigError(field=name, value=value, rule="must be a finite number")
    if name in _BELOW_ONE and not 0 <= value < 1:
        raise ConfigError(field=name, value=value, rule="must be at least 0 and below 1")
    if name in _POSITIVE and value <= 0:
        raise ConfigError(field=name, value=value, rule="must be above 0")
    if name in _NOT_NEGATIVE and value < 0:
        raise ConfigError(field=name, value=value, rule="must be 0 or more")


def _member(name: str, value: object, kind: type[StrEnum]) -> StrEnum:
    if name == "dtype" and value == "float16":
        rule = "float16 is refused: its gradients need a loss scaler, which the step does not have; use bfloat16"
        raise ConfigError(field=name, value=value, rule=rule)
    if value not in [str(member) for member in kind]:
        raise ConfigError(field=name, value=value, rule="must be one of " + ", ".join(kind))
    return kind(value)


_OTHER_KIND = {
    Attention.MLA: ("kv_heads", "head_dim"),
    Attention.GQA: ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"),
}
"""Fields that only the other kind of attention reads."""


def _check_unused(config: ModelConfig) -> None:
    for name in _OTHER_KIND[config.attention]:
        if getattr(config, name) != ModelConfig.__dataclass_fields__[name].default:
            rule = f"has no effect with attention {config.attention}: leave it at its default"
            raise ConfigError(field=name, value=getattr(config, name), rule=rule)


def _check_relations(config: ModelConfig) -> None:
    group = config.experts // config.expert_groups
    rules = (
        ("dense_layers", config.dense_layers <= config.layers, f"must not exceed layers ({config.layers})"),
        ("kv_heads", config.heads % config.kv_heads == 0, f"must divide heads ({config.heads})"),
        ("rope_dim", config.rope_dim % 2 == 0, "must be even"),
        ("head_dim", config.head_dim % 2 == 0, "must be even"),
        ("topk", config.topk <= config.experts, f"must not exceed experts ({config.experts})"),
        ("expert_groups", config.experts % config.expert_groups == 0, f"must divide experts ({config.experts})"),
        ("topk_groups", config.topk_groups <= config.expert_groups,
         f"must not exceed expert_groups ({config.expert_groups})"),
        ("topk", config.topk <= config.topk_groups * group,
         f"must not exceed the experts of topk_groups groups ({config.topk_groups * group})"),
    )  # fmt: skip
    for name, holds, rule in rules:
        if not holds:
            raise ConfigError(field=name, value=getattr(config, name), rule=rule)
