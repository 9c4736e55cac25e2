"""Router scores by a kernel of our own: what router.Router composes of torch's operations, in one kernel each way.

Legend: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.dispatch import Routing
from overlap.model.config import ModelConfig, Score
from overlap.model.custom import apply_many
from overlap.model.fused import contiguous, kernels


def scored(
    logits: Tensor, routing: Routing, padding: Tensor | None, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and losses.

    Args:
        logits: [T, E] float32.
        routing: The choice.
        padding: [T] bool, any stride, True at padding; None: there is none.
        config: Kind of score, scale of the probabilities, coefficients of the losses.

    Returns:
        Probabilities [T, k]; the load-balancing loss and the z-loss, scalars.
    """
    sigmoid = config.score is Score.SIGMOID
    tokens = max(logits.shape[0], 1) if padding is None else 1
    factor = tokens if config.per_token_loss else 1
    rule = _Rule(
        scale=config.route_scale,
        sigmoid=sigmoid,
        normalise=sigmoid and config.topk > 1,
        # the share of copies and the mean score are both divided by the tokens
        aux=config.experts * config.aux_coefficient / (config.topk * tokens * tokens) * factor,
        z=config.z_coefficient / tokens * factor,
    )
    real = None if padding is None else _for_real_tokens(padding, logits.dtype, config.per_token_loss)
    padding = contiguous(padding)
    probs, aux, z = apply_many(_Scores, logits, routing.expert_ids, routing.counts, padding, real, rule)
    return probs, aux, z


class _Rule(NamedTuple):
    """From scores to probabilities and losses."""

    scale: float
    sigmoid: bool
    normalise: bool
    """Divide by the sum of the chosen scores."""
    aux: float
    """Factor of each token's part of the load-balancing loss: sum over experts of counts * score / sum of scores."""
    z: float
    """Factor of each token's part of the z-loss: the square of the logits' logsumexp."""


def _for_real_tokens(padding: Tensor, dtype: torch.dtype, per_token: bool) -> Tensor:
    """[2]: what is left of both factors where the number of tokens is on the device."""
    mean = (~padding).sum().clamp(min=1).to(dtype).reciprocal()
    return torch.stack((mean, torch.ones_like(mean)) if per_token else (mean * mean, mean))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        counts: Tensor,
        padding: Tensor | None,
        real: Tensor | None,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, ids = logits.contiguous(), ids.contiguous()
        ctx.save_for_backward(logits, ids, counts, padding, real)
        ctx.rule = rule
        probs, parts = logits.new_empty(ids.shape), logits.new_empty(2, logits.shape[0])
        kernels("triton_router").score_forward(logits, ids, counts, padding, probs, parts, *rule)
        losses = parts.sum(-1)
        aux, z = (losses if real is None else losses * real).unbind()
        return probs, aux, z

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_probs: Tensor, grad_aux: Tensor, grad_z: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, ids, counts, padding, real = ctx.saved_tensors
        if real is not None:
            grad_aux, grad_z = grad_aux * real[0], grad_z * real[1]
        grad_logits = torch.empty_like(logits)
        kernels("triton_router").score_backward(
            logits, ids, counts, padding, grad_probs.contiguous(), grad_aux, grad_z, grad_logits, *ctx.rule
        )
        return grad_logits, None, None, None, None, None
