"""Router scores in Triton: probabilities at the chosen experts and a token's part of both losses, one kernel each way.

A program takes one token. Legend: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TINY = tl.constexpr(1e-20)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _forward_kernel(  # type: ignore[no-untyped-def]
    logits, ids, counts, padding, probs, parts, tokens, experts, topk, scale, aux_scale, z_scale,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, PADDED: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, EXPERTS)
    inside = every < experts
    logit = tl.load(logits + token * experts + every, mask=inside, other=float("-inf"))
    top = tl.max(logit, 0)
    raised = tl.exp(logit - top)
    mass = tl.sum(raised, 0)
    score = tl.where(inside, tl.sigmoid(logit), 0.0) if SIGMOID else raised / mass
    slot = tl.arange(0, TOPK)
    used = slot < topk
    chosen = tl.load(ids + token * topk + slot, mask=used, other=0)
    at = tl.load(logits + token * experts + chosen, mask=used, other=float("-inf"))
    picked = tl.where(used, tl.sigmoid(at), 0.0) if SIGMOID else tl.exp(at - top) / mass
    prob = picked / (tl.sum(picked, 0) + _TINY) if NORMALISE else picked
    tl.store(probs + token * topk + slot, prob * scale, mask=used)
    keep = 1.0
    if PADDED:
        keep = 1.0 - tl.load(padding + token).to(tl.float32)
    share = tl.load(counts + every, mask=inside, other=0).to(tl.float32)
    tl.store(parts + token, keep * aux_scale * tl.sum(share * score, 0) / (tl.sum(score, 0) + _TINY))
    logsum = tl.log(mass) + top
    tl.store(parts + tokens + token, keep * z_scale * logsum * logsum)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _backward_kernel(  # type: ignore[no-untyped-def]
    logits, ids, counts, padding, grad_probs, grad_aux, grad_z, grad_logits,
    experts, topk, scale, aux_scale, z_scale,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, PADDED: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, EXPERTS)
    inside = every < experts
    logit = tl.load(logits + token * experts + every, mask=inside, other=float("-inf"))
    top = tl.max(logit, 0)
    raised = tl.exp(logit - top)
    mass = tl.sum(raised, 0)
    softmax = raised / mass
    score = tl.where(inside, tl.sigmoid(logit), 0.0) if SIGMOID else softmax
    keep = 1.0
    if PADDED:
        keep = 1.0 - tl.load(padding + token).to(tl.float32)
    share = tl.load(counts + every, mask=inside, other=0).to(tl.float32)
    total = tl.sum(score, 0) + _TINY
    weight = keep * aux_scale * tl.load(grad_aux)
    grad_score = weight * (share / total - tl.sum(share * score, 0) / (total * total))
    slot = tl.arange(0, TOPK)
    used = slot < topk
    chosen = tl.load(ids + token * topk + slot, mask=used, other=0)
    at = tl.load(logits + token * experts + chosen, mask=used, other=float("-inf"))
    picked = tl.where(used, tl.sigmoid(at), 0.0) if SIGMOID else tl.exp(at - top) / mass
    grad = tl.load(grad_probs + token * topk + slot, mask=used, other=0.0) * scale
    total = tl.sum(picked, 0) + _TINY
    correction = tl.sum(grad * picked, 0) / (total * total)
    for step in tl.static_range(STEPS):
        expert = tl.load(ids + token * topk + step)
        one = tl.load(grad_probs + token * topk + step) * scale
        if NORMALISE:
            one = one / total - correction
        grad_score += tl.where(every == expert, one, 0.0)
    if SIGMOID:
        grad_logit = grad_score * score * (1.0 - score)
    else:
        grad_logit = score * (grad_score - tl.sum(tl.where(inside, grad_score * score, 0.0), 0))
    logsum = tl.log(mass) + top
    grad_logit += keep * z_scale * tl.load(grad_z) * 2.0 * logsum * softmax
    tl.store(grad_logits + token * experts + every, grad_logit, mask=inside)


def score_forward(
    logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None, probs: Tensor, parts: Tensor,
    scale: float, sigmoid: bool, normalise: bool, aux: float, z: float,
) -> None:  # fmt: skip
    """Write probabilities and each token's part of the losses.

    Args:
        logits: [T, E] float32, contiguous.
        ids: [T, k] int64, contiguous.
        counts: [E] int64.
        padding: [T] bool, or None.
        probs: [T, k] float32, written: scores at `ids`, over their sum if `normalise`, times `scale`.
        parts: [2, T] float32, contiguous, written: `aux` times the sum over experts of counts * score / sum of scores;
            `z` times the square of the logits' logsumexp; both 0 at padding.
        scale: On the probabilities.
        sigmoid: Scores are sigmoids, else a softmax.
        normalise: See `probs`.
        aux: See `parts`.
        z: See `parts`.
    """
    tokens, experts = logits.shape
    topk = ids.shape[1]
    if tokens:
        _forward_kernel[(tokens,)](
            logits, ids, counts, logits if padding is None else padding, probs, parts, tokens, experts, topk,
            scale, aux, z, sigmoid, normalise, padding is not None, triton.next_power_of_2(experts),
            triton.next_power_of_2(topk),
        )  # fmt: skip


def score_backward(
    logits: Tensor, ids: Tensor, counts: Tensor, padding: Tensor | None,
    grad_probs: Tensor, grad_aux: Tensor, grad_z: Tensor, grad_logits: Tensor,
    scale: float, sigmoid: bool, normalise: bool, aux: float, z: float,
) -> None:  # fmt: skip
    """Write the gradient of score_forward's logits.

    `grad_aux` and `grad_z` are scalars on the device, the gradients of the sums of both kinds of parts.
    """
    tokens, experts = logits.shape
    topk = ids.shape[1]
    if tokens:
        _backward_kernel[(tokens,)](
            logits, ids, counts, logits if padding is None else padding, grad_probs, grad_aux, grad_z,
            grad_logits, experts, topk, scale, aux, z, sigmoid, normalise, padding is not None,
            triton.next_power_of_2(experts), triton.next_power_of_2(topk), topk,
        )  # fmt: skip
