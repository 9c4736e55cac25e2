"""ModelConfig: the shape of the decoder; every rule is checked when it is made. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from overlap.model.config_rules import check_config


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
    capacity: int | None = None
    """Copies that an expert takes from a microbatch of one rank: later ones are dropped, missing ones are padded, so
    that every size is known beforehand. None: it takes all."""
    bias_rate: float = 0.001
    """Step of that bias per update."""
    dropout: float = 0.0
    """Dropout on what attention and feed-forward add to the residual stream."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    cut_attention: bool = False
    """Cut stage `attn` behind attention: norm, router and permutation become a stage `post_attn`, which orders place
    and run backward by itself."""
    vocab: int = 256
    """Token ids."""
    tied: bool = False
    """Use the embedding as the output matrix too."""
    per_token_loss: bool = False
    """Loss of a microbatch: False the mean over its tokens, True the sum (the step divides by all tokens)."""
    mhc: int | None = None
    """Residual streams, joined by manifold-constrained hyper-connections; None: one stream and plain additions."""
    mhc_iterations: int = 20
    """Sinkhorn iterations of the residual mapping."""
    mhc_epsilon: float = 1e-6
    """Added to what the mappings divide by, and to the mappings themselves."""
    mtp: int = 0
    """Multi-token prediction depths; depth d predicts the token d places behind the next one."""
    mtp_repeat: bool = False
    """All depths use one and the same layer."""
    mtp_dense: bool = False
    """The depths' layers are dense."""
    mtp_widths: tuple[int, ...] = ()
    """Inner feed-forward width (dense, or of an expert) of each depth; empty: the decoder's."""
    mtp_scale: float = 0.1
    """Weight of the mean of the depths' losses."""
    mtp_detach: bool = False
    """The depths' losses train the depths alone: hidden states, embedding and output matrix are read detached."""
    padding: bool = False
    """A feed `padding_mask` says which tokens are padding: not attended to, not routed, not counted."""
    packed: bool = False
    """Rows hold several sequences: feeds `cu_seqlens` (their ends) and `positions` (for the rotary embedding)."""
    labels: bool = True
    """A feed `labels` holds the targets; False: they are derived from the ids."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_base: float = 10000.0
    """Base of the rotary wavelengths."""
    max_seq: int = 1024
    """Longest sequence."""
    dtype: DType = DType.FLOAT32
    """Parameter and activation type; the router computes in float32, or float64 in a float64 model."""

    def __post_init__(self) -> None:
        check_config(self, ENUMS)


ENUMS: dict[str, type[StrEnum]] = {"attention": Attention, "score": Score, "dtype": DType}
"""Fields that hold a member of an enum, and also take its text."""
