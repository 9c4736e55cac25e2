"""The reference model: a DeepSeek-V3-shaped mixture-of-experts decoder, cut into stages."""

from overlap.dispatch import Routing
from overlap.model.config import Attention, DType, ModelConfig, Score
from overlap.model.decoder import Decoder
from overlap.model.dropout import dropout, dropout_noise
from overlap.model.experts import GroupedExperts, SwiGLU
from overlap.model.hyper_connections import Contraction, HyperConnection, sinkhorn
from overlap.model.init import init_weights
from overlap.model.layers import DenseLayer, MoELayer
from overlap.model.linear import Linear, grouped_linear, linear
from overlap.model.mtp import MTPDepth
from overlap.model.router import Routed, Router, update_expert_bias
from overlap.model.sequences import Sequences

__all__ = [
    "Attention",
    "Contraction",
    "DType",
    "Decoder",
    "DenseLayer",
    "GroupedExperts",
    "HyperConnection",
    "Linear",
    "MTPDepth",
    "MoELayer",
    "ModelConfig",
    "Routed",
    "Router",
    "Routing",
    "Score",
    "Sequences",
    "SwiGLU",
    "dropout",
    "dropout_noise",
    "grouped_linear",
    "init_weights",
    "linear",
    "sinkhorn",
    "update_expert_bias",
]
