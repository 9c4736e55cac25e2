"""Manifold-constrained hyper-connections: n residual streams instead of one (arXiv 2512.24880).

A sub-layer reads a mix of the streams and adds to each of them; the streams mix by a matrix that a Sinkhorn projection
makes (nearly) doubly stochastic. Mappings are computed in float32 (float64 in a float64 model).
Legend: B sequences, S positions, n streams, C hidden, K = n*n + 2*n mapping entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from overlap.model.config import ModelConfig
from overlap.model.custom import apply
from overlap.model.dropout import dropout
from overlap.model.init import OwnInit
from overlap.model.precision import wide_dtype

_FIRST_GAIN = 0.01
"""Initial factor on what depends on the streams: a new model mixes evenly."""


STREAMS = "streams"
"""Name of the value that takes the streams past the feed-forward."""


class HyperConnection(OwnInit):
    """Joins one sub-layer (attention or feed-forward) to the streams [B, S, n, C]."""

    carried = (STREAMS, "h_post", "h_res")
    """What merge() needs beside the sub-layer's output."""
    linear = False
    """merge() multiplies the output with a mapping, so its gradient needs the output (R8)."""

    def __init__(self, config: ModelConfig, streams: int) -> None:
        super().__init__()
        self.config = config
        self.streams = streams
        entries = streams * streams + 2 * streams
        self.weight = nn.Parameter(torch.empty(entries, streams * config.hidden))
        self.gains = nn.Parameter(torch.empty(3))
        """Of pre, post and residual mapping."""
        self.bias = nn.Parameter(torch.empty(entries))

    def reset(self) -> None:
        """A small gain, no bias."""
        self.gains.fill_(_FIRST_GAIN)
        self.bias.zero_()

    def split(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The sub-layer's input [B, S, C], and what merge() needs: streams, h_post [B, S, n], h_res [B, S, n, n]."""
        h_pre, h_post, h_res = self.mappings(streams)
        return (h_pre.unsqueeze(-1) * streams).sum(-2), (streams, h_post, h_res)

    def merge(self, update: Tensor, *carried: Tensor) -> Tensor:
        """New stream i = sum over j of h_res[j, i] * stream j, plus h_post[i] * update [B, S, C]."""
        streams, h_post, h_res = carried
        added = h_post.unsqueeze(-1) * update.unsqueeze(-2)
        added = dropout(added, self.config.dropout, training=self.training)
        # autocast would narrow the streams themselves
        with torch.autocast(streams.device.type, enabled=False):
            mixed = h_res.transpose(-1, -2).matmul(streams)
        return added + mixed

    def mappings(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, n, C] -> h_pre [B, S, n], h_post [B, S, n], h_res [B, S, n, n], in the streams' type."""
        n, epsilon = self.streams, self.config.mhc_epsilon
        wide = wide_dtype(streams.dtype)
        flat = streams.flatten(-2).to(wide)
        # autocast would compute the mappings in the narrow type
        with torch.autocast(flat.device.type, enabled=False):
            raw = F.linear(flat, self.weight.to(wide))
        size = torch.linalg.vector_norm(flat, dim=-1, keepdim=True) / flat.shape[-1] ** 0.5
        widths = [n, n, n * n]
        scaled, gains = torch.split(raw / (size + epsilon), widths, dim=-1), self.gains.to(wide).unbind()
        biases = torch.split(self.bias.to(wide), widths)
        pre, post, residual = (x * gain + bias for x, gain, bias in zip(scaled, gains, biases, strict=True))
        h_pre = pre.sigmoid() + epsilon
        h_post = 2 * post.sigmoid()
        h_res = sinkhorn(residual.view(*residual.shape[:-1], n, n), self.config.mhc_iterations, epsilon)
        return h_pre.to(streams.dtype), h_post.to(streams.dtype), h_res.to(streams.dtype)


class Contraction(OwnInit):
    """Learned weighted sum that makes one stream of n."""

    def __init__(self, config: ModelConfig, streams: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(streams, streams * config.hidden))
        self.gain = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(streams))

    def reset(self) -> None:
        """A small gain, no bias."""
        self.gain.fill_(_FIRST_GAIN)
        self.bias.zero_()

    def forward(self, streams: Tensor) -> Tensor:
        """[B, S, n, C] -> [B, S, C]."""
        wide = streams.to(wide_dtype(streams.dtype))
        flat = wide.flatten(-2)
        with torch.autocast(flat.device.type, enabled=False):
            raw = F.linear(flat, self.weight.to(flat.dtype))
        scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        weights = (raw * scale * self.gain.to(flat.dtype) + self.bias.to(flat.dtype)).sigmoid() + self.eps
        return (weights.unsqueeze(-1) * wide).sum(-2).to(streams.dtype)


def expand_streams(hidden: Tensor, streams: int) -> Tensor:
    """Copy into equal streams: [B, S, C] -> [B, S, n, C], contiguous."""
    return hidden.unsqueeze(-2).repeat(1, 1, streams, 1)


def sinkhorn(logits: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Make matrices with positive entries whose columns, and nearly whose rows, sum to one.

    softmax over rows, then columns and rows are divided by their sums in turn; the columns come last, so that each
    new stream is a convex combination of old ones. The gradient is exact through all iterations, which are run again
    for it: between forward and backward only the logits are kept.

    Args:
        logits: [..., n, n].
        iterations: At least 1; each normalises rows, then columns.
        epsilon: Added to the entries once and to every divisor.
    """
    return apply(_Sinkhorn, logits, iterations, epsilon)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, epsilon: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.epsilon = iterations, epsilon
        return _iterate(logits, iterations, epsilon, [])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        steps: list[tuple[Tensor, Tensor, int]] = []
        _iterate(logits, ctx.iterations, ctx.epsilon, steps)
        for result, divisor, dim in reversed(steps):
            # result = m / (sum(m) + epsilon)
            grad = (grad - (grad * result).sum(dim, keepdim=True)) / divisor
        rows = logits.softmax(-1)
        return rows * (grad - (grad * rows).sum(-1, keepdim=True)), None, None


def _iterate(logits: Tensor, iterations: int, epsilon: float, steps: list[tuple[Tensor, Tensor, int]]) -> Tensor:
    """The projection; notes every division in `steps` as (result, divisor, dimension of the sum)."""
    matrix = logits.softmax(-1) + epsilon
    # the softmax was the first normalisation of the rows
    for dim in (-2, *((-1, -2) * (iterations - 1))):
        divisor = matrix.sum(dim, keepdim=True) + epsilon
        matrix = matrix / divisor
        steps.append((matrix, divisor, dim))
    return matrix
