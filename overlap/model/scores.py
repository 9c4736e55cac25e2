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
from overlap.model.fused import kernels


def scored(
    logits: Tensor, routing: Routing, padding: Tensor | None, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and the rows of the losses.

    Args:
        logits: [T, E] float32.
        routing: The choice.
        padding: [T] bool, True at padding; None: there is none.
        config: Kind of score, scale of the probabilities.

    Returns:
        Probabilities [T, k]; [T] sum over experts of counts * score / sum of scores; [T] squares of the logits'
        logsumexp; both 0 at padding.
    """
    sigmoid = config.score is Score.SIGMOID
    rule = _Rule(config.route_scale, sigmoid, sigmoid and config.topk > 1)
    probs, aux, squares = apply_many(_Scores, logits, routing.expert_ids, routing.counts, padding, rule)
    return probs, aux, squares


class _Rule(NamedTuple):
    """From scores to probabilities."""

    scale: float
    sigmoid: bool
    normalise: bool
    """Divide by the sum of the chosen scores."""


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None, rule: _Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, ids = logits.contiguous(), ids.contiguous()
        ctx.save_for_backward(logits, ids, counts, padding)
        ctx.rule = rule
        probs = logits.new_empty(ids.shape)
        aux, squares = logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])
        kernels("triton_router").score_forward(logits, ids, counts, padding, probs, aux, squares, *rule)
        return probs, aux, squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_probs: Tensor, grad_aux: Tensor, grad_squares: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits, ids, counts, padding = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        kernels("triton_router").score_backward(
            logits, ids, counts, padding, grad_probs.contiguous(), grad_aux, grad_squares, grad_logits, *ctx.rule
        )
        return grad_logits, None, None, None, None
