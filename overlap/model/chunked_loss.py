"""Cross entropy of a linear map without its logits: neither forward nor backward holds more than a piece of them.

Forward goes over blocks of tokens and keeps one log-sum-exp per token; backward goes over blocks of the vocabulary,
so that each row of the weight gradient is written once, and adds the hidden gradient up in a wide type.
Legend: T tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlap.model.custom import apply
from overlap.model.linear import LateWeight, autocast_like, gradient_of_weight, graph_inputs, keep_weight
from overlap.model.precision import wide_dtype

_PIECE = 16 * 2**20
"""Logits held at once."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, ignored: int) -> Tensor:
    """Sum over tokens of the cross entropy of softmax(hidden weight^T).

    Args:
        hidden: [T, C].
        weight: [V, C].
        labels: [T] int64; tokens labelled `ignored` count nothing.
        ignored: That label.

    Returns:
        A scalar in float32, or float64 for float64 input. Any other label outside 0 to V - 1 makes it NaN, and with it
        the gradients of the token and of the weight: an error would have to wait for the device.
    """
    return apply(_LinearCrossEntropy, hidden, *graph_inputs(hidden, weight), labels, ignored)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        late: LateWeight | None,
        anchor: Tensor | None,
        labels: Tensor,
        ignored: int,
    ) -> Tensor:
        hidden, matrix = autocast_like(hidden), autocast_like(weight)
        wide = wide_dtype(hidden.dtype)
        log_sums = hidden.new_empty(len(hidden), dtype=wide)
        picked = torch.empty_like(log_sums)
        without = labels == ignored
        targets, unknown = _targets(labels, without, len(matrix))
        for block in _blocks(len(hidden), len(matrix)):
            logits = hidden[block].mm(matrix.t()).to(wide)
            log_sums[block] = logits.logsumexp(-1)
            picked[block] = logits.gather(-1, targets[block]).squeeze(-1)
        # backward reads these sums: NaN here is NaN there
        log_sums.masked_fill_(unknown, math.nan)
        ctx.save_for_backward(hidden, weight, labels, log_sums)
        ctx.ignored = ignored
        keep_weight(ctx, weight, late)
        return (log_sums - picked).masked_fill_(without, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, labels, log_sums = ctx.saved_tensors
        matrix = weight.to(hidden.dtype)
        kept = (hidden, matrix, labels, log_sums, grad)
        grad_hidden = _hidden_gradient(*kept, ignored=ctx.ignored) if ctx.needs_input_grad[0] else None
        compute = partial(_weight_gradient, ignored=ctx.ignored)
        return grad_hidden, gradient_of_weight(ctx, compute, *kept), None, None, None, None


def _targets(labels: Tensor, without: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the matrix to look up [T, 1], some row for tokens `without` label; which labels are no row [T]."""
    given = labels.masked_fill(without, 0)
    targets = given.clamp(0, rows - 1)
    return targets.unsqueeze(-1), given != targets


def _hidden_gradient(
    hidden: Tensor, matrix: Tensor, labels: Tensor, log_sums: Tensor, grad: Tensor, *, ignored: int
) -> Tensor:
    total = torch.zeros_like(hidden, dtype=log_sums.dtype)
    for block, piece in _logit_gradients(hidden, matrix, labels, log_sums, grad, ignored):
        total += piece.mm(matrix[block])
    return total.to(hidden.dtype)


def _weight_gradient(
    hidden: Tensor,
    matrix: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    *,
    ignored: int,
    dtype: torch.dtype,
) -> Tensor:
    result = torch.empty_like(matrix, dtype=dtype)
    for block, piece in _logit_gradients(hidden, matrix, labels, log_sums, grad, ignored):
        result[block] = piece.t().mm(hidden)
    return result


def _logit_gradients(
    hidden: Tensor, matrix: Tensor, labels: Tensor, log_sums: Tensor, grad: Tensor, ignored: int
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of the logits, a block of the vocabulary at a time: (rows of the matrix, [T, block])."""
    wide = log_sums.dtype
    factor = grad.to(wide) * (labels != ignored).to(wide).unsqueeze(-1)
    for block in _blocks(len(matrix), len(hidden)):
        piece = hidden.mm(matrix[block].t()).to(wide)
        piece = piece.sub_(log_sums.unsqueeze(-1)).exp_()
        ids = torch.arange(block.start, block.start + len(matrix[block]), device=labels.device)
        piece = piece.sub_((labels.unsqueeze(-1) == ids).to(wide)).mul_(factor)
        yield block, piece.to(hidden.dtype)


def _blocks(length: int, other: int) -> Iterator[slice]:
    """Cut `length` so that a block times `other` is no more than a piece of logits."""
    size = max(_PIECE // max(other, 1), 1)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
